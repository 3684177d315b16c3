package lbgateway

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
)

// forgetAfter is for how long endpoints that go are collected before flows to them are looked for, at least: that reads the kernel's whole table. idle is how many times as
// long as this takes passes until the next time.
const (
	forgetAfter = 100 * time.Millisecond
	idle        = 10
)

// forget has the kernel forget flows to endpoints that are gone. Their next packets go to other endpoints, or are refused.
func (g *Gateway) forget(ctx context.Context, _ struct{}) error {
	g.mu.Lock()
	does, gone := g.does, maps.Clone(g.gone) // the maps of a state never change
	g.mu.Unlock()
	began := g.now()
	n, err := g.cfg.Flows.ForgetForwarded(ctx, func(f conntrack.Forwarded) bool { return does.stale(f, gone) })
	if err != nil {
		return err
	}
	g.forgetting.Store(int64(g.now().Sub(began)))
	if n > 0 {
		g.metrics.forgotten.Add(float64(n))
		klog.FromContext(ctx).V(1).Info("Forgot flows to endpoints that are gone", "flows", n)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for a := range gone {
		delete(g.gone, a)
	}
	return nil
}

// stale says whether a flow leads to an endpoint that is gone. Flows of UDP don't end by themselves while their client sends: they leave endpoints that are ending, too.
func (s state) stale(f conntrack.Forwarded, gone map[netip.Addr]bool) bool {
	is, ok := s.forwards[front{f.Protocol, f.To}]
	switch {
	case !ok:
		return s.addresses[f.To.Addr()] || gone[f.To.Addr()]
	case slices.Contains(is.Endpoints, f.Endpoint):
		return false
	}
	return f.Protocol == unix.IPPROTO_UDP || !slices.Contains(is.Draining, f.Endpoint)
}
