package view

import (
	"sync"
	"sync/atomic"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What was read stays known while the cache advances, however many ask at once; a version that is older than before is that of another history.
func TestAheadOfACacheThatAdvances(t *testing.T) {
	var a ahead[*metav1.PartialObjectMetadata]
	var version atomic.Uint64
	version.Store(1)
	const later = 1 << 40
	read := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "one", ResourceVersion: "1099511627776"}}
	a.note(version.Load, "shop", later, read)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 20_000 {
				version.Add(1)
				if got := a.upTo(version.Load, "shop"); got != later {
					t.Errorf("known up to %d, want %d", got, later)
					return
				}
				if got := a.beyond(version.Load); got["shop/one"] != read {
					t.Errorf("what was read is %v", got)
					return
				}
			}
		})
	}
	all.Wait()
	version.Store(1)
	if got := a.upTo(version.Load, "shop"); got != 1 || len(a.beyond(version.Load)) > 0 {
		t.Errorf("after the API server was restored it is known up to %d", got)
	}
}
