package view

import (
	"maps"
	"slices"
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
				if got, _ := a.beyond(version.Load, "shop"); got["shop/one"] != read {
					t.Errorf("what was read is %v", got)
					return
				}
			}
		})
	}
	all.Wait()
	version.Store(1)
	known, _ := a.beyond(version.Load, "shop")
	if got := a.upTo(version.Load, "shop"); got != 1 || len(known) > 0 {
		t.Errorf("after the API server was restored it is known up to %d, and %v", got, known)
	}
}

// What a list didn't have is gone, unless the cache shows that it came later.
func TestAheadKnowsWhatIsGone(t *testing.T) {
	var a ahead[*metav1.PartialObjectMetadata]
	at := func(namespace, name, version string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, ResourceVersion: version}}
	}
	version := uint64(60)
	cached := func() uint64 { return version }
	a.note(cached, "shop", 100, at("shop", "stays", "50"))
	_, gone := a.beyond(cached, "shop")
	for _, c := range []struct {
		object *metav1.PartialObjectMetadata
		want   bool
	}{{at("shop", "stays", "50"), false}, {at("shop", "went", "50"), true}, {at("shop", "came later", "101"), false}} {
		if got := gone(c.object); got != c.want {
			t.Errorf("%s is gone: %t", c.object.Name, got)
		}
	}
	if _, gone := a.beyond(cached, "bank"); gone(at("bank", "another", "50")) {
		t.Error("in a namespace that wasn't listed one is gone")
	}
	version = 100
	if _, gone := a.beyond(cached, "shop"); gone(at("shop", "went", "50")) {
		t.Error("it counts though the cache has come as far")
	}
}

// What an earlier list had, and a later one hadn't, is gone, though the cache has come as far as neither; whichever of the two is noted first.
func TestAheadForgetsWhatIsGone(t *testing.T) {
	at := func(namespace, name, version string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, ResourceVersion: version}}
	}
	for name, laterFirst := range map[string]bool{"in their order": false, "the later one first": true} {
		var a ahead[*metav1.PartialObjectMetadata]
		cached := func() uint64 { return 10 }
		notes := []func(){
			func() { a.note(cached, "shop", 50, at("shop", "stays", "40"), at("shop", "went", "41")) },
			func() { a.note(cached, "shop", 60, at("shop", "stays", "40")) },
		}
		if laterFirst {
			slices.Reverse(notes)
		}
		a.note(cached, "bank", 45, at("bank", "another", "42"))
		for _, note := range notes {
			note()
		}
		known, _ := a.beyond(cached, "shop")
		if got := slices.Sorted(maps.Keys(known)); !slices.Equal(got, []string{"bank/another", "shop/stays"}) {
			t.Errorf("%s: known are %q", name, got)
		}
	}
}
