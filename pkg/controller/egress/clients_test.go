package egress

import (
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

var nat = types.NamespacedName{Namespace: "internet", Name: "nat"}

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
				var w writes
				if w.pending(nat, tt.behind) {
					t.Error("pending before anything was written")
				}
				w.note(nat, "s", tt.entry)
				if !w.pending(nat, tt.behind) {
					t.Error("not pending")
				}
				if w.pending(types.NamespacedName{Name: "other"}, tt.behind) {
					t.Error("another Egress waits, too")
				}
				if w.pending(nat, tt.fine) || w.pending(nat, tt.behind) || len(w.all) > 0 {
					t.Error("pending after the cache has shown it")
				}
				w.note(nat, "s", tt.entry)
				time.Sleep(lagPatience)
				if w.pending(nat, tt.behind) {
					t.Error("pending for ever")
				}
				w.note(nat, "s", tt.entry)
				w.forget(nat)
				if w.pending(nat, tt.behind) {
					t.Error("pending for an Egress that has gone")
				}
			})
		})
	}
}

func TestRefusalsAreToldOnce(t *testing.T) {
	pod := func(uid string) *corev1.Pod { return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid)}} }
	var r refusals
	for i, step := range []struct {
		refused []*corev1.Pod
		told    int
	}{
		{nil, 0}, {[]*corev1.Pod{pod("a")}, 1}, {[]*corev1.Pod{pod("a"), pod("b")}, 1}, {[]*corev1.Pod{pod("b")}, 0},
		{[]*corev1.Pod{pod("a"), pod("b")}, 1}, {nil, 0},
	} {
		if got := r.tell(nat, step.refused); len(got) != step.told {
			t.Errorf("step %d: %d pods are told, want %d", i, len(got), step.told)
		}
	}
	if len(r.told) > 0 {
		t.Errorf("%v is kept", r.told)
	}
}
