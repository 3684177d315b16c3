package lists

import (
	"testing"
	"testing/synctest"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestWritesArePending holds that nothing is planned on a cache that lags behind, and that
// it is believed in the end.
func TestWritesArePending(t *testing.T) {
	slice := func(version string) []*discoveryv1.EndpointSlice {
		return []*discoveryv1.EndpointSlice{{ObjectMeta: metav1.ObjectMeta{Name: "s", ResourceVersion: version}}}
	}
	for _, tt := range []struct {
		name         string
		entry        write
		behind, fine []*discoveryv1.EndpointSlice
	}{
		{"created", write{made: true}, nil, slice("1")},
		{"changed", write{before: "1"}, slice("1"), slice("2")},
		{"changed, then deleted by somebody", write{before: "1"}, slice("1"), nil},
		{"deleted", write{before: "1"}, slice("1"), nil},
		{"deleted and made again", write{before: "1"}, slice("1"), slice("3")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if writes(nil).pending(tt.behind) {
					t.Error("pending before anything was written")
				}
				tt.entry.at = time.Now()
				w := writes{{Name: "s"}: tt.entry}
				if !w.pending(tt.behind) {
					t.Error("not pending")
				}
				if w.pending(tt.fine) || w.pending(tt.behind) || len(w) > 0 {
					t.Error("pending after the cache has shown it")
				}
				w[types.NamespacedName{Name: "s"}] = tt.entry
				time.Sleep(lagPatience)
				if w.pending(tt.behind) {
					t.Error("pending for ever")
				}
			})
		})
	}
}
