// Package masquerade lets clients of Egresses leave by the address of the node on which their router runs.
//
// It owns the table dataplane.NftTableMasquerade, the routes of the protocol dataplane.ProtocolTransit, and the transit addresses on lo in the
// network namespaces of routers. It must not know which pods are routers, nor how a router translates.
//
// Nothing in a packet tells the node whether a router forwards the packet or has made it: FoU to clients, and requests to the API server,
// have the router's address as well. So a router gives its clients' packets another source, its transit address, and the node translates
// only that one. When the node is ready, the address is on lo of the router, where the router finds it:
//
//	1 table    packets from the address by the router's link may be forwarded, and get the node's address
//	2 route    answers lead to the router
//	3 lo       the router lets clients in
//
// The router sends such packets with one hop left: without the table the kernel doesn't forward them. Two other ways don't do. A rule that
// drops is gone when all rulesets are flushed. A routing policy rule for packets without a mark drops answers as well: to check the link by which
// an answer comes (rp_filter), the kernel looks up the way back without the mark.
//
// A router keeps its address as long as its link is there, whatever its Egress says meanwhile, since connections have the address. After a restart
// the addresses are read from the routes.
package masquerade

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/store"
)

// Router is a router pod whose clients are to leave by the node's address: the node's end of its link, its own addresses, and its
// network namespace.
type Router struct {
	Link int
	ipam.Address
	store.Netns
}

// Config is what a Keeper is made of.
type Config struct {
	Handle *rtnl.Handle
	// Table is the table dataplane.NftTableMasquerade.
	Table *nft.Table
	// PodTable is the routing table of pods.
	PodTable int
}

// Keeper keeps a node's objects.
type Keeper struct {
	cfg    Config
	routes *route.Syncer
	// transits are the transit addresses that routers have, by the index of the link; nil before the kernel was read.
	transits map[int]transit
	// clean says that there is nothing of Coil's, and dirty that the last sync failed: what is missing may never have been made.
	clean, dirty bool
	// untold are the links of routers that weren't told of their addresses.
	untold map[int]bool
}

// transit has the number of a router's transit address, and the router's own addresses.
type transit struct {
	number int
	own    ipam.Address
}

// New returns a Keeper that has done nothing yet.
func New(cfg Config) *Keeper {
	return &Keeper{cfg: cfg, routes: route.New(cfg.Handle, dataplane.ProtocolTransit, cfg.PodTable), untold: map[int]bool{}}
}

// Result says what a Sync has found.
type Result struct {
	// Repaired is how many objects were missing although they had been made.
	Repaired int
	// Routers is how many routers the node translates for. Without any, no later Sync is needed.
	Routers int
}

// Sync makes everything as it should be for some routers. It must not be called concurrently. What fails for one router doesn't keep it from
// the objects of the others.
func (k *Keeper) Sync(ctx context.Context, routers []Router) (Result, error) {
	if k.transits == nil {
		if err := k.recall(ctx); err != nil {
			return Result{}, err
		}
	}
	changed, chosen := k.choose(ctx, routers)
	res := Result{Routers: len(k.transits)}
	if res.Routers == 0 && k.clean {
		return res, chosen
	}
	changed = changed || k.dirty
	written, err := k.sync(ctx, changed)
	if !changed {
		res.Repaired = written
	}
	k.clean, k.dirty = err == nil && res.Routers == 0, err != nil
	if err != nil {
		return res, errors.Join(chosen, err) // no router may rely on the node
	}
	errs := []error{chosen}
	for _, r := range routers {
		if _, there := k.transits[r.Link]; !there {
			continue
		}
		told, err := k.tell(ctx, r)
		if err != nil {
			errs = append(errs, fmt.Errorf("tell the router %s: %w", r.Address, err))
		}
		if told > 0 {
			faultpoint.At(faultpoint.TransitTold)
		}
		if !changed && !k.untold[r.Link] {
			res.Repaired += told
		}
		k.untold[r.Link] = err != nil
	}
	return res, errors.Join(errs...)
}

// recall reads which transit addresses routers have.
func (k *Keeper) recall(ctx context.Context) error {
	transits := map[int]transit{}
	for _, f := range families {
		routes, err := k.cfg.Handle.Routes(ctx, f, k.cfg.PodTable, dataplane.ProtocolTransit)
		if err != nil {
			return fmt.Errorf("read the routes of transit addresses: %w", err)
		}
		for _, r := range routes {
			n, ok := dataplane.TransitNumber(r.Dst.Addr())
			if !ok || !r.Gateway.IsValid() {
				continue
			}
			t := transits[r.Link]
			t.number, t.own = n, ipam.AddressOf(append(t.own.Addrs(), r.Gateway)...)
			transits[r.Link] = t
		}
	}
	k.transits = transits
	return nil
}

// choose gives each router a transit address that no other has, and takes those of links that are gone. It says whether anything has changed.
// A router whose link can't be looked up keeps its address, or gets one later.
func (k *Keeper) choose(ctx context.Context, routers []Router) (changed bool, err error) {
	var errs []error
	next := map[int]transit{}
	for link, t := range k.transits {
		there, err := k.exists(ctx, link)
		errs = append(errs, err)
		if there || err != nil {
			next[link] = t
		}
	}
	for _, r := range routers {
		t, known := next[r.Link]
		if !known {
			there, err := k.exists(ctx, r.Link)
			if there {
				t.number, err = free(r.Link, next)
			}
			errs = append(errs, err)
			if !there || err != nil {
				continue // its DEL comes, or another link
			}
		}
		t.own = r.Address
		next[r.Link] = t
	}
	maps.DeleteFunc(k.untold, func(link int, untold bool) bool { return !untold || next[link] == (transit{}) })
	changed = !maps.Equal(next, k.transits)
	k.transits = next
	return changed, errors.Join(errs...)
}

// exists says whether there is the link of a router.
func (k *Keeper) exists(ctx context.Context, link int) (bool, error) {
	_, err := k.cfg.Handle.LinkByIndex(ctx, link)
	if err == nil || errors.Is(err, rtnl.ErrNotExist) {
		return err == nil, nil
	}
	return false, fmt.Errorf("look up the link %d of a router: %w", link, err)
}

// free returns a number that no other router has. It derives it from the link's index, which the kernel seldom gives twice: so a router doesn't
// get the connections of a former one.
func free(link int, taken map[int]transit) (int, error) {
	used := map[int]bool{}
	for _, t := range taken {
		used[t.number] = true
	}
	for i := range dataplane.Transits {
		if n := 1 + (link+i)%dataplane.Transits; !used[n] {
			return n, nil
		}
	}
	return 0, fmt.Errorf("there is no transit address for the router of link %d: routers of the node have all %d", link, dataplane.Transits)
}

var families = []dataplane.Family{dataplane.IPv4, dataplane.IPv6}

// sync makes the table and the routes, and returns how many objects were missing. changed says that others are wanted than before.
func (k *Keeper) sync(ctx context.Context, changed bool) (written int, err error) {
	var want ruleset.Masquerade
	var routes []dataplane.Route
	for _, link := range slices.Sorted(maps.Keys(k.transits)) {
		t := k.transits[link]
		for _, own := range t.own.Addrs() {
			f := dataplane.FamilyOf(own)
			addr := dataplane.TransitAddr(f, t.number)
			single := netip.PrefixFrom(addr, addr.BitLen())
			want.Transits = append(want.Transits, ruleset.Transit{Link: link, Addr: addr})
			routes = append(routes, dataplane.Route{
				Table: k.cfg.PodTable, Dst: single, Link: link, Gateway: own, OnLink: true, Protocol: dataplane.ProtocolTransit,
			})
		}
	}
	tabled, err := k.cfg.Table.Sync(ctx, want.Ruleset())
	written = tabled.Added + tabled.Replaced
	if err != nil {
		return written, err
	}
	changed = changed || tabled.Changed() // an earlier life may have left something
	if changed {
		faultpoint.At(faultpoint.TransitTabled)
	}
	routed, err := k.routes.Sync(ctx, routes)
	if changed {
		faultpoint.At(faultpoint.TransitRouted)
	}
	return written + routed.Added + routed.Replaced, err
}
