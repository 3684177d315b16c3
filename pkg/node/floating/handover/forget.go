package handover

import (
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/node/floating"
)

// Start looks for what an earlier life of this program has left: routers here forget the flows of addresses that other nodes have.
func (h *Handover) Start(blocks []*v2.AddressBlock) {
	var all []floating.Address
	for _, b := range blocks {
		if a, stale := floating.Stale(h.cfg.Node, b); stale {
			all = append(all, a)
		}
	}
	if len(all) > 0 {
		h.later(func() { h.forget(h.limits.straggle, all...) })
	}
}

// forget lets routers here forget the flows of addresses that other nodes have, after some time. Those that are copied here all the time stay. If an
// address comes back, its flows are copied again. If that is asked for again meanwhile, only the last time counts.
func (h *Handover) forget(after time.Duration, all ...floating.Address) {
	last := h.toForget(all)
	select {
	case <-h.closing:
		return
	case <-time.After(after):
	}
	byPod := map[types.UID][]netip.Addr{}
	for _, a := range all {
		b := h.cfg.Block(a.Block)
		if !last(a) || b == nil || string(b.UID) != a.ID {
			continue
		}
		if _, stale := floating.Stale(h.cfg.Node, b); stale && a.Pod != "" {
			byPod[a.Pod] = slices.Concat(byPod[a.Pod], a.Addrs())
		}
	}
	for pod, addrs := range byPod {
		if err := h.cfg.Tables.Forget(h.life, pod, addrs); err != nil {
			klog.FromContext(h.life).V(2).Info("A router keeps connections of floating addresses that other nodes have", "pod", pod, "reason", err)
		}
	}
}

// toForget notes that flows of some addresses are to be forgotten. The function that it returns says of an address whether that wasn't noted again since
// then.
func (h *Handover) toForget(all []floating.Address) (last func(floating.Address) bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.asked++
	asked := h.asked
	for _, a := range all {
		h.forgets[a.ID] = asked
	}
	return func(a floating.Address) bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.forgets[a.ID] != asked {
			return false
		}
		delete(h.forgets, a.ID)
		return true
	}
}
