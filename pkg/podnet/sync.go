package podnet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
)

// Rules makes the node's rules as they should be: of each family one that looks the pods' addresses up
// in the pod table, and one after it for unassigned addresses.
func (n *Network) Rules(ctx context.Context) (dataplane.Result, error) {
	res, err := n.rules.Sync(ctx, n.wantedRules())
	if err != nil {
		return res, fmt.Errorf("sync rules: %w", err)
	}
	return res, nil
}

// wantedRules are the rules of the node.
func (n *Network) wantedRules() []dataplane.Rule {
	families := []dataplane.Family{dataplane.IPv4}
	if n.ipv6 {
		families = append(families, dataplane.IPv6)
	}
	var rules []dataplane.Rule
	for _, f := range families {
		pods := dataplane.Rule{Family: f, Priority: n.opts.RulePriority, Table: n.opts.PodTable, Protocol: n.opts.Protocol}
		unassigned := pods
		unassigned.Priority, unassigned.Table = pods.Priority+1, dataplane.TableUnassigned
		rules = append(rules, pods, unassigned)
	}
	return rules
}

// forwardIPv4 and forwardIPv6 make the host forward packets of a family. New links get IPv6's default, which may differ from that of all.
var (
	forwardIPv4 = sysctl.Setting{Key: "net/ipv4/ip_forward", Value: "1"}
	forwardIPv6 = []sysctl.Setting{ipv6Setting("all", "forwarding", "1"), ipv6Setting("default", "forwarding", "1")}
)

// Forward makes the host forward packets, and says whether anything had to be set. It can be
// repeated at any time. A family that can't be read doesn't keep the other one from being set.
func (n *Network) Forward(ctx context.Context) (changed bool, err error) {
	changed, err = n.set(n.host, forwardIPv4)
	if !n.ipv6 {
		return changed, err
	}
	settings, learnedErr := n.keepAdvertised(ctx)
	if learnedErr != nil {
		// The host would forget routes that it needs.
		return changed, errors.Join(err, learnedErr)
	}
	changed6, err6 := n.set(n.host, append(settings, forwardIPv6...)...)
	return changed || changed6, errors.Join(err, err6)
}

// keepAdvertised returns the parameters that keep the routes of uplinks which were learned by router
// advertisements. A host that forwards ignores these, and forgets the routes, unless
// accept_ra is 2. A pod is no router, whatever it advertised.
func (n *Network) keepAdvertised(ctx context.Context) ([]sysctl.Setting, error) {
	routes, err := n.handle.Routes(ctx, dataplane.IPv6, unix.RT_TABLE_MAIN, unix.RTPROT_RA)
	if err != nil {
		return nil, err
	}
	var settings []sysctl.Setting
	for _, r := range routes {
		l, err := n.handle.LinkByIndex(ctx, r.Link)
		if errors.Is(err, rtnl.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		always := ipv6Setting(l.Name, "accept_ra", "2")
		if l.AcceptRA == 1 && !ours(l) && !slices.Contains(settings, always) {
			settings = append(settings, always)
		}
	}
	return settings, nil
}

// Sync makes the routes to all pods as they should be. want returns the pods; it is
// called after the kernel was read, so that a pod which is recorded before it is
// attached keeps its routes. A pod whose link has no index yet keeps the routes that
// it has. It goes on after a failure; the Result counts the changes and the
// error joins the failures.
func (n *Network) Sync(ctx context.Context, want func(context.Context) ([]Wired, error)) (dataplane.Result, error) {
	attaching := map[netip.Addr]bool{}
	result, err := n.routes.SyncFunc(ctx, func(ctx context.Context) ([]dataplane.Route, error) {
		pods, err := want(ctx)
		if err != nil {
			return nil, err
		}
		return n.wantedRoutes(ctx, pods, attaching)
	}, func(r dataplane.Route) bool { return attaching[r.Dst.Addr()] })
	if err != nil {
		return result, fmt.Errorf("sync pod routes: %w", err)
	}
	return result, nil
}

// wantedRoutes returns the routes to pods, and adds to attaching the addresses
// of pods that have no link yet.
func (n *Network) wantedRoutes(ctx context.Context, pods []Wired, attaching map[netip.Addr]bool) ([]dataplane.Route, error) {
	clear(attaching)
	local := map[netip.Addr]bool{} // the nodes' addresses that are this host's
	var routes []dataplane.Route
	for _, p := range pods {
		if p.HostIfIndex == 0 {
			for _, a := range p.Address.Addrs() {
				attaching[a] = true
			}
			continue
		}
		for _, a := range p.NodeAddrs.Addrs() {
			if _, known := local[a]; known {
				continue
			}
			var err error
			if local[a], err = isLocal(ctx, n.handle, a, 0); err != nil {
				return nil, err
			}
		}
		// A route can't have another source.
		sources := slices.DeleteFunc(p.NodeAddrs.Addrs(), func(a netip.Addr) bool { return !local[a] })
		routes = append(routes, n.hostRoutes(p.Address, ipam.AddressOf(sources...), p.HostIfIndex)...)
	}
	return routes, nil
}

// isLocal says whether an address is one of a namespace, and of a link there if that isn't 0, by the route that each
// address has in table local.
func isLocal(ctx context.Context, h *rtnl.Handle, a netip.Addr, link int) (bool, error) {
	r, err := h.RouteTo(ctx, a, link)
	if errors.Is(err, rtnl.ErrNotExist) {
		return false, nil
	}
	return err == nil && r.Type == dataplane.Local && r.Dst == single(a), err
}
