package tables

import (
	"context"
	"net/netip"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
)

// shared lets calls about addresses of one pod that wait while one is under way be one call, the next one: each reads the whole table of the
// pod, and a node may have many addresses to hand over.
type shared struct {
	do func(pod types.UID, addrs []netip.Addr) (Found, error)

	mu   sync.Mutex
	next map[types.UID]*call // a pod has an entry while somebody works for it
}

// Found are flows by their known source.
type Found map[netip.Addr][]conntrack.Flow

// call is one that hasn't begun.
type call struct {
	addrs []netip.Addr
	done  chan struct{} // closed at the end
	found Found
	err   error
}

// call has something done for addresses of a pod, and returns what was found for all that took part.
func (s *shared) call(ctx context.Context, pod types.UID, addrs []netip.Addr) (Found, error) {
	s.mu.Lock()
	c, working := s.next[pod]
	if c == nil {
		c = &call{done: make(chan struct{})}
		s.next[pod] = c
	}
	c.addrs = append(c.addrs, addrs...)
	if !working {
		go s.work(pod)
	}
	s.mu.Unlock()
	select {
	case <-c.done:
		return c.found, c.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// work makes calls for a pod until nobody waits.
func (s *shared) work(pod types.UID) {
	for {
		s.mu.Lock()
		c := s.next[pod]
		if c == nil {
			delete(s.next, pod)
			s.mu.Unlock()
			return
		}
		s.next[pod] = nil
		s.mu.Unlock()
		c.found, c.err = s.do(pod, c.addrs)
		close(c.done)
	}
}
