package natgateway

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/plan/gateway"
)

// countEvery is the time between two counts of the connections of each client.
const countEvery = 5 * time.Second

// count finds out which clients have more connections than one may have. The kernel counts a sample of
// many: a client that opens one after the other, and closes each of the sample, would have any number.
func (g *Gateway) count(ctx context.Context) {
	over, err := g.overLimit(ctx)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Can't count the connections of clients", "reason", err)
		return
	}
	g.mu.Lock()
	changed := !slices.Equal(g.over, over)
	g.over = over
	g.mu.Unlock()
	if changed {
		g.loop.Changed()
	}
}

// overLimit returns the clients, sorted, that have more connections than one may have. The table of
// connections is read only if it has as many.
func (g *Gateway) overLimit(ctx context.Context) ([]netip.Addr, error) {
	g.mu.Lock()
	most := cmp.Or(g.applied, &gateway.State{}).MaxPerClient
	g.mu.Unlock()
	tracked, _, err := g.kernel.Flows.Size()
	if err != nil || most == 0 || tracked <= most {
		return nil, err
	}
	counts, err := g.kernel.Flows.Clients(ctx, g.Addresses()...)
	var over []netip.Addr
	for a, n := range counts {
		if n > most {
			over = append(over, a)
		}
	}
	slices.SortFunc(over, netip.Addr.Compare)
	return over, err
}

// Addresses are those by which connections of clients leave: the router's own, and floating ones.
func (g *Gateway) Addresses() []netip.Addr {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.applied == nil || g.applied.Floating == nil {
		return g.cfg.Addresses
	}
	return slices.Concat(g.cfg.Addresses, g.applied.Floating.Addresses)
}
