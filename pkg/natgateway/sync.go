package natgateway

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/gateway"
)

func (g *Gateway) sync(ctx context.Context) error {
	g.mu.Lock()
	due := g.due
	g.due = time.Time{}
	g.mu.Unlock()
	err := g.syncOnce(ctx)
	if err != nil && g.applied == nil {
		g.report(Clients, err)
	}
	switch {
	case due.IsZero():
	case err != nil:
		g.mu.Lock()
		g.due = due
		g.mu.Unlock()
	default:
		g.metrics.latency.Observe(time.Since(due).Seconds())
	}
	return err
}

// syncOnce makes the kernel as it should be.
func (g *Gateway) syncOnce(ctx context.Context) error {
	want, err := g.want(ctx)
	if err != nil {
		return err
	}
	if !g.started {
		if err := g.begin(ctx, want); err != nil {
			return err
		}
	}
	if c, ok := g.change(want); ok {
		if err = g.follow(ctx, want, c); err == nil {
			return nil
		}
		klog.FromContext(ctx).V(2).Info("Comparing everything with the kernel", "because", err)
	}
	return g.compare(ctx, want)
}

// compare reads all from the kernel, and makes it as it should be. It goes on after a
// failure as far as it can.
func (g *Gateway) compare(ctx context.Context, want gateway.State) (err error) {
	g.mu.Lock()
	g.doubtful = false
	g.mu.Unlock()
	g.compared = time.Now()
	defer func() {
		if err != nil {
			g.doubt()
		}
	}()
	portErr := g.kernel.Network.Listen(ctx, g.cfg.Port, g.families)
	links, tunnels, clientErr := g.kernel.Tunnels.Ensure(ctx, want.Tunnels)
	g.metrics.failed.Set(float64(len(want.Tunnels) - len(links)))
	if clientErr != nil && len(links) == 0 {
		return fmt.Errorf("no client has a tunnel: %w", clientErr)
	}
	g.watch(want.Tunnels, links)
	wantedRoutes, wantedRules := want.Routes(links)
	rules, ruleErr := g.kernel.Rules.Sync(ctx, wantedRules)
	routes, routeErr := g.kernel.Routes.Sync(ctx, wantedRoutes)
	// The last that lets a client in, and so that its first packet finds the way back.
	filter, filterErr := g.kernel.Filter.Sync(ctx, want.Filter(links))
	g.repaired(ctx, want, map[string]dataplane.Result{kindTunnel: tunnels, kindRoute: routes, kindRule: rules, kindFilter: filter})
	if err := errors.Join(portErr, ruleErr, routeErr, filterErr); err != nil {
		return errors.Join(err, clientErr)
	}
	before := g.applied
	g.apply(want, links)
	err = errors.Join(clientErr, g.prune(ctx, want), g.release(ctx, want, before))
	g.report(Clients, nil)
	return err
}

// change returns the clients that came and left since the last sync. It returns false if more
// has to be done, or may have to.
func (g *Gateway) change(want gateway.State) (gateway.Change, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.applied == nil || g.doubtful || len(g.links) < len(g.applied.Tunnels) || time.Since(g.compared) > g.cfg.Resync {
		return gateway.Change{}, false
	}
	return want.Since(*g.applied)
}

// follow makes and removes the objects of clients that came and left, without reading anything.
func (g *Gateway) follow(ctx context.Context, want gateway.State, c gateway.Change) error {
	made, err := g.kernel.Tunnels.Add(ctx, c.Came)
	if err != nil {
		return err
	}
	links := maps.Clone(g.links)
	maps.Copy(links, made)
	g.watch(want.Tunnels, links)
	came, _ := gateway.State{Tunnels: c.Came}.Routes(links)
	left, _ := gateway.State{Tunnels: c.Left}.Routes(links)
	if err := errors.Join(g.kernel.Routes.Add(ctx, came...), g.kernel.Routes.Delete(ctx, left...)); err != nil {
		return err
	}
	var former []dataplane.TunnelLink
	for _, t := range c.Left {
		former = append(former, links[t.Remote])
		delete(links, t.Remote)
	}
	if _, err := g.kernel.Filter.Sync(ctx, want.Filter(links)); err != nil {
		return err
	}
	if _, err := g.kernel.Tunnels.Remove(ctx, former); err != nil {
		return err
	}
	klog.FromContext(ctx).V(2).Info("Clients changed", "came", len(c.Came), "left", len(c.Left), "clients", len(want.Tunnels))
	before := g.applied
	g.apply(want, links)
	return g.release(ctx, want, before)
}

// apply notes the state that was made.
func (g *Gateway) apply(want gateway.State, links map[netip.Addr]dataplane.TunnelLink) {
	g.mu.Lock()
	g.applied, g.links = &want, links
	g.mu.Unlock()
}

// begin makes the filter, before the port of FoU is opened and the first tunnel is made. The filter admits clients whose
// tunnels a former process has left, and nobody else.
func (g *Gateway) begin(ctx context.Context, want gateway.State) error {
	links, err := g.kernel.Tunnels.Links(ctx)
	if err != nil {
		return err
	}
	if _, err := g.kernel.Filter.Sync(ctx, want.Filter(links)); err != nil {
		return err
	}
	g.released = want.Inherited(links)
	g.started = true
	return nil
}

// prune removes tunnels to addresses that are no client's.
func (g *Gateway) prune(ctx context.Context, want gateway.State) error {
	result, err := g.kernel.Tunnels.Prune(ctx, want.Tunnels)
	if result.Deleted > 0 {
		klog.FromContext(ctx).Info("Clients left", "tunnels", result.Deleted, "clients", len(want.Tunnels))
	}
	return err
}

// release forgets the connections of former clients, and of addresses that another pod has now.
// After a failure the next sync tries again.
func (g *Gateway) release(ctx context.Context, want gateway.State, before *gateway.State) error {
	if before != nil {
		g.released = append(g.released, want.Released(*before)...)
	}
	if len(g.released) == 0 {
		return nil
	}
	n, err := g.kernel.Flows.Forget(ctx, g.released...)
	if err == nil {
		klog.FromContext(ctx).V(2).Info("Forgot connections of former clients", "addresses", len(g.released), "connections", n)
		g.released = nil
	}
	return err
}

// repaired counts the changes of a sync as repairs if the wanted state is that of the last
// sync.
func (g *Gateway) repaired(ctx context.Context, want gateway.State, results map[string]dataplane.Result) {
	g.mu.Lock()
	same := g.applied != nil && g.applied.Equal(want)
	g.mu.Unlock()
	var total dataplane.Result
	for kind, r := range results {
		total = total.Plus(r)
		if same {
			g.repairs.Done(ctx, kind, r.Added+r.Replaced+r.Deleted)
		}
	}
	if total.Changed() && !same {
		klog.FromContext(ctx).V(2).Info("Clients changed", "added", total.Added, "replaced", total.Replaced, "deleted", total.Deleted,
			"clients", len(want.Tunnels), "destinations", len(want.Destinations))
	}
}
