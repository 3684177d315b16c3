package place

import (
	"context"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/holding"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// failed returns the addresses that lack their route to a pod, and those to which a route still leads though the node is to stop. These
// are all, if that can't be read.
func (p *Place) failed(ctx context.Context, stops []*job) (lacking, leading map[netip.Addr]bool) {
	lacking, leading = map[netip.Addr]bool{}, map[netip.Addr]bool{}
	have, err := p.read(ctx)
	toPods, _ := p.wanted()
	for _, r := range toPods {
		lacking[r.Dst.Addr()] = !have[r]
	}
	for _, j := range stops {
		for _, a := range j.order.Addrs() {
			leading[a] = err != nil
		}
	}
	for r := range have {
		leading[r.Dst.Addr()] = true
	}
	return lacking, leading
}

// read returns the routes of floating addresses.
func (p *Place) read(ctx context.Context) (map[dataplane.Route]bool, error) {
	routes := map[dataplane.Route]bool{}
	for _, table := range []int{p.cfg.PodTable, p.cfg.ExportTable} {
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

// close lets no packets pass any more. Without a table there is nothing by which they do.
func (p *Place) close(ctx context.Context, stops []*job) error {
	if len(stops) == 0 {
		return nil
	}
	if exists, err := p.cfg.Table.Exists(ctx); err != nil || !exists {
		return err
	}
	var ends []nft.Renewal
	for _, j := range stops {
		ends = append(ends, renewals(j.order, 0)...)
	}
	return p.cfg.Table.Renew(ctx, ends...)
}

// lead makes the routes to pods, before which packets are dropped, and removes all others but those that may be of an earlier life.
func (p *Place) lead(ctx context.Context, stops []*job) error {
	if time.Since(p.began) >= holding.Lease {
		p.left = nil
	}
	var closed []netip.Addr
	for _, j := range stops {
		closed = append(closed, j.order.Addrs()...)
	}
	_, err := p.cfg.Table.Sync(ctx, p.ruleset(closed...))
	if err != nil {
		return err
	}
	toPods, exported := p.wanted()
	// Those for routing daemons come when packets pass.
	_, err = p.routes.SyncFunc(ctx, func(context.Context) ([]dataplane.Route, error) { return toPods, nil }, func(r dataplane.Route) bool {
		return p.ofEarlierLife(r) || r.Table == p.cfg.ExportTable && slices.Contains(exported, r)
	})
	return err
}

// open lets packets of addresses pass until their time.
func (p *Place) open(ctx context.Context, answers []*job) error {
	var lasting []nft.Renewal
	for _, j := range answers {
		lasting = append(lasting, renewals(j.order, time.Until(j.order.Until))...)
	}
	if len(lasting) == 0 {
		return nil
	}
	return p.cfg.Table.Renew(ctx, lasting...)
}

// settle tells routing daemons of addresses that have all else, and forgets those for which the node has stopped.
func (p *Place) settle(ctx context.Context, lacking map[netip.Addr]bool) error {
	want, exported := p.wanted()
	for _, r := range exported {
		if !lacking[r.Dst.Addr()] {
			want = append(want, r)
		}
	}
	_, err := p.routes.SyncFunc(ctx, func(context.Context) ([]dataplane.Route, error) { return want, nil }, p.ofEarlierLife)
	if err != nil {
		return err
	}
	_, err = p.cfg.Table.Sync(ctx, p.ruleset())
	return err
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

// ruleset is the table as it should be, for these addresses and more.
func (p *Place) ruleset(more ...netip.Addr) dataplane.Ruleset {
	r := ruleset.Floating{Addresses: p.addresses(more...), Tracked: p.cfg.Tracked}
	for _, h := range p.held {
		if h.OfEgress {
			r.OfEgresses = append(r.OfEgresses, h.Addrs()...)
		}
	}
	slices.SortFunc(r.OfEgresses, netip.Addr.Compare)
	return r.Ruleset()
}

// wanted are the routes of all addresses. That of a newer holder has the greater metric.
func (p *Place) wanted() (toPods, exported []dataplane.Route) {
	for _, id := range slices.Sorted(maps.Keys(p.held)) {
		h := p.held[id]
		for _, a := range h.Addrs() {
			to, gateway := netip.PrefixFrom(a, a.BitLen()), h.pod.IPv4
			if a.Is6() {
				gateway = h.pod.IPv6
			}
			if !gateway.IsValid() {
				continue // the pod hasn't the family
			}
			toPods = append(toPods, dataplane.Route{
				Table: p.cfg.PodTable, Dst: to, Link: h.pod.Link, Gateway: gateway, OnLink: true, Protocol: dataplane.ProtocolFloating,
			}.Canonical())
			exported = append(exported, dataplane.Route{
				Table: p.cfg.ExportTable, Dst: to, Link: p.cfg.Loopback, Metric: int(min(h.Epoch, math.MaxInt32)), Protocol: dataplane.ProtocolFloating,
			}.Canonical())
		}
	}
	return toPods, exported
}

// renewals are the elements of an address.
func renewals(o floating.Order, d time.Duration) (all []nft.Renewal) {
	for _, a := range o.Addrs() {
		all = append(all, nft.Renewal{Set: ruleset.Answering(dataplane.FamilyOf(a)), Key: dataplane.KeyOf(a), For: d})
	}
	return all
}
