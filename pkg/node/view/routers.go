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
	known map[types.NamespacedName]keptRouters
}

// keptRouters are listed once, by the first caller of list.
type keptRouters struct {
	list  func() []client.Router
	until time.Time
}

// changed forgets the routers of an Egress.
func (r *routers) changed(egress types.NamespacedName) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.known, egress)
}

// get returns the routers of an Egress, which must not be changed.
func (r *routers) get(egress types.NamespacedName, list func() []client.Router) []client.Router {
	return r.entry(egress, list).list()
}

func (r *routers) entry(egress types.NamespacedName, list func() []client.Router) keptRouters {
	r.mu.Lock()
	defer r.mu.Unlock()
	k, found := r.known[egress]
	if found && time.Now().Before(k.until) {
		return k
	}
	if r.known == nil || !found && len(r.known) >= mostKept {
		r.known = map[types.NamespacedName]keptRouters{}
	}
	// The list may have memory for many more.
	k = keptRouters{until: time.Now().Add(keepRouters), list: sync.OnceValue(func() []client.Router { return slices.Clone(list()) })}
	r.known[egress] = k
	return k
}
