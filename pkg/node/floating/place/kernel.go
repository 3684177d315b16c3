package place

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// lacking are the addresses that lack their route inward: all, if that can't be read.
func (p *Place) lacking(ctx context.Context) map[netip.Addr]bool {
	all := map[netip.Addr]bool{}
	have, _ := p.read(ctx)
	inward, _ := p.wanted()
	for _, r := range inward {
		all[r.Dst.Addr()] = !have[r]
	}
	return all
}

// read returns the routes of floating addresses.
func (p *Place) read(ctx context.Context) (map[dataplane.Route]bool, error) {
	routes := map[dataplane.Route]bool{}
	for _, table := range []int{p.cfg.PodTable, p.cfg.ExportTable, localTable} {
		for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
			have, err := p.cfg.Handle.Routes(ctx, f, table, dataplane.ProtocolFloating)
			if err != nil {
				return nil, fmt.Errorf("read the routes of floating addresses: %w", err)
			}
			for _, r := range have {
				routes[r.Route] = true
			}
		}
	}
	return routes, nil
}

// isOf says whether a job is about one of some addresses.
func isOf(j *job, addrs map[netip.Addr]bool) bool {
	return slices.ContainsFunc(j.order.Addrs(), func(a netip.Addr) bool { return addrs[a] })
}

// own returns the node's addresses, sorted. Nobody forwards packets to link-local ones, which links of pods have.
func (p *Place) own(ctx context.Context) ([]netip.Addr, error) {
	have, err := p.cfg.Handle.Addrs(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the node's addresses: %w", err)
	}
	var all []netip.Addr
	for _, a := range have {
		if addr := a.Prefix.Addr(); !addr.IsLinkLocalUnicast() {
			all = append(all, addr)
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all), nil
}

// fence makes the tables.
func (p *Place) fence(ctx context.Context, addresses []netip.Addr) (dataplane.Result, error) {
	want := ruleset.Floating{Addresses: addresses, Tracked: p.cfg.Tracked, Local: p.local}
	for _, h := range p.held {
		if h.OfEgress {
			want.OfEgresses = append(want.OfEgresses, h.Addrs()...)
		}
		if h.OfServices {
			want.Services = append(want.Services, servicesAt(h)...)
		}
	}
	for _, s := range p.services { // of an earlier life, whose packets still pass
		if slices.Contains(p.left, s.Address) && !slices.ContainsFunc(want.Services, func(o ruleset.Service) bool { return o.Address == s.Address }) {
			want.Services = append(want.Services, s)
		}
	}
	slices.SortFunc(want.OfEgresses, netip.Addr.Compare)
	return p.cfg.Tables.sync(ctx, want)
}

// servicesAt are the Services at the addresses of a block.
func servicesAt(h held) (all []ruleset.Service) {
	for _, a := range h.Addrs() {
		s := ruleset.Service{Address: a}
		for _, p := range h.Ports {
			s.Ports = append(s.Ports, ruleset.Port{Protocol: p.Protocol, Port: p.Port})
		}
		all = append(all, s)
	}
	return all
}

// lead makes the routes inward, before which packets are dropped, and removes all others but those that may be of an earlier life.
func (p *Place) lead(ctx context.Context, stops []*job) (made repaired, err error) {
	if p.earlier() {
		p.left, p.services = nil, nil
	}
	var closed []netip.Addr
	for _, j := range stops {
		closed = append(closed, j.order.Addrs()...)
	}
	if made.rules, err = p.fence(ctx, p.addresses(closed...)); err != nil {
		return made, err
	}
	inward, exported := p.wanted()
	// Those for routing daemons come when packets pass.
	made.routes, err = p.routes.SyncFunc(ctx, func(context.Context) ([]dataplane.Route, error) { return inward, nil }, func(r dataplane.Route) bool {
		return p.ofEarlierLife(r) || r.Table == p.cfg.ExportTable && slices.Contains(exported, r)
	})
	return made, err
}

// open lets packets of addresses pass until their time.
func (p *Place) open(ctx context.Context, answers []*job) error {
	return p.cfg.Tables.open(ctx, answers, func(o floating.Order) time.Duration { return time.Until(o.Until) })
}

// passing are the orders whose packets are to pass when tables were made anew: some of now, and all others that last. Whoever gave these may not give them again soon.
func (p *Place) passing(now []*job) []*job {
	all, known := slices.Clone(now), map[netip.Addr]bool{}
	note := func(o floating.Order) {
		for _, a := range o.Addrs() {
			known[a] = true
		}
	}
	for _, j := range now {
		note(j.order)
	}
	for _, h := range p.held {
		if time.Until(h.Until) > 0 && !slices.ContainsFunc(h.Addrs(), func(a netip.Addr) bool { return known[a] }) {
			note(h.Order)
			all = append(all, &job{order: h.Order})
		}
	}
	return all
}

// settle tells routing daemons of addresses that have all else, and forgets those for which the node has stopped.
func (p *Place) settle(ctx context.Context, lacking map[netip.Addr]bool) (made repaired, err error) {
	want, exported := p.wanted()
	for _, r := range exported {
		if !lacking[r.Dst.Addr()] {
			want = append(want, r)
		}
	}
	made.routes, err = p.routes.SyncFunc(ctx, func(context.Context) ([]dataplane.Route, error) { return want, nil }, p.ofEarlierLife)
	if err != nil {
		return made, err
	}
	made.rules, err = p.fence(ctx, p.addresses())
	return made, err
}

// ofEarlierLife says whether a route stays since an earlier life may have told the kernel to answer.
func (p *Place) ofEarlierLife(r dataplane.Route) bool {
	if !slices.Contains(p.left, r.Dst.Addr()) {
		return false
	}
	for _, h := range p.held {
		if slices.Contains(h.Addrs(), r.Dst.Addr()) {
			return false
		}
	}
	return true
}

// addresses are those of which packets are dropped unless the node answers for them, each once.
func (p *Place) addresses(more ...netip.Addr) []netip.Addr {
	all := append(slices.Clone(p.left), more...)
	for _, h := range p.held {
		all = append(all, h.Addrs()...)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// oldest is the metric of the exported route of the epoch 0.
const oldest = 1_000_000_000

// metric makes the exported route of a newer holder the better one wherever routes meet: lower metrics are, in the kernel, and as
// MULTI_EXIT_DISC of BGP (RFC 4271, section 9.1.2.2).
func metric(epoch int64) int { return int(max(1, oldest-epoch)) }

// wanted are the routes of all addresses: inward, to pods or to the node itself, and for routing daemons.
func (p *Place) wanted() (inward, exported []dataplane.Route) {
	for _, id := range slices.Sorted(maps.Keys(p.held)) {
		h := p.held[id]
		for _, a := range h.Addrs() {
			to, ok := p.inward(h, a)
			if !ok {
				continue // the pod hasn't the family
			}
			inward = append(inward, to)
			exported = append(exported, dataplane.Route{
				Table: p.cfg.ExportTable, Dst: to.Dst, Link: p.cfg.Loopback, Metric: metric(h.Epoch), Protocol: dataplane.ProtocolFloating,
			}.Canonical())
		}
	}
	return inward, exported
}

// inward is the route of an address.
func (p *Place) inward(h held, a netip.Addr) (r dataplane.Route, ok bool) {
	if h.OfServices {
		r = inwardRoute(a)
		r.Table, r.Type, r.Link, r.Scope = localTable, dataplane.Local, p.cfg.Loopback, dataplane.HostScope
		return r.Canonical(), true
	}
	return Inward(h.pod, p.cfg.PodTable, a)
}

// Inward is the route of an address to a pod, in the table of pods; not ok if the pod hasn't the family.
func Inward(pod Pod, table int, a netip.Addr) (r dataplane.Route, ok bool) {
	r = inwardRoute(a)
	r.Table, r.Link, r.Gateway, r.OnLink = table, pod.Link, pod.IPv4, true
	if a.Is6() {
		r.Gateway = pod.IPv6
	}
	return r.Canonical(), r.Gateway.IsValid()
}

func inwardRoute(a netip.Addr) dataplane.Route {
	return dataplane.Route{Dst: netip.PrefixFrom(a, a.BitLen()), Protocol: dataplane.ProtocolFloating}
}
