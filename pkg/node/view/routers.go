package view

import (
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/plan/client"
)

const (
	// keepRouters is for how long routers are kept without a change: a slice may have gone to another Service.
	keepRouters = 5 * time.Second
	// mostKept is how many Egresses have their routers kept.
	mostKept = 4096
)

// routers are the routers of Egresses, as they were listed last. All pods of the node ask for them again and again, and
// EndpointSlices may be many.
type routers struct {
	mu    sync.Mutex
	known map[types.NamespacedName]*keptRouters
}

// keptRouters has one goroutine list them at a time.
type keptRouters struct {
	mu  sync.Mutex
	all []client.Router
	// changes and listed are guarded by routers.mu: listed is when they were listed, the zero time after a change.
	changes int
	listed  time.Time
}

// changed forgets the routers of an Egress.
func (r *routers) changed(egress types.NamespacedName) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if k := r.known[egress]; k != nil {
		k.changes++
		k.listed = time.Time{}
	}
}

// get returns the routers of an Egress, which must not be changed.
func (r *routers) get(egress types.NamespacedName, list func() ([]client.Router, error)) ([]client.Router, error) {
	k := r.entry(egress)
	k.mu.Lock()
	defer k.mu.Unlock()
	changes, fresh := r.state(k)
	if fresh {
		return k.all, nil
	}
	all, err := list()
	if err != nil {
		return nil, err
	}
	k.all = slices.Clone(all) // the list may have been of many more
	r.mu.Lock()
	defer r.mu.Unlock()
	if k.changes == changes {
		k.listed = time.Now()
	}
	return k.all, nil
}

func (r *routers) entry(egress types.NamespacedName) *keptRouters {
	r.mu.Lock()
	defer r.mu.Unlock()
	k := r.known[egress]
	if k == nil {
		if r.known == nil || len(r.known) >= mostKept {
			r.known = map[types.NamespacedName]*keptRouters{}
		}
		k = &keptRouters{}
		r.known[egress] = k
	}
	return k
}

func (r *routers) state(k *keptRouters) (changes int, fresh bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return k.changes, !k.listed.IsZero() && time.Since(k.listed) < keepRouters
}
