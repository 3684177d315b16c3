package egress

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/echo"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/nexthop"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
)

// Kernel is the Network of the machine. In a client it has
//
//	rules 1700-2100, tables 117 and 118     see plan.ClientStateOf
//	fou4_..., fou6_...                      one tunnel to each Service of an Egress, or router
//	nexthop objects, rules 1850, tables     of Egresses that are direct; see groups.go
//	coil_ipip4, coil_ipip6, UDP port        what routers send; by the links packets get lost, too
//	nftables table coil                     who may send by tunnels, and what leaves by none
//
// All of it is closed first: no moment lets a packet to a destination out by another way than
// its tunnel, once the rules are there. A tunnel to a new peer is made before the routes change
// to it, and the old one is removed after.
//
// What a program in the pod may take away of that, the node keeps, too: see Host.
type Kernel struct {
	protocol int
	tunnels  Tunnels
	filters  Filters
	host     Host
}

// Host is the node's side of clients' links: what comes from there for a destination is dropped; see
// package podnet.
type Host interface {
	// HostLink returns the index of the node's end of a pod's link; podnet.ErrNoHostLink if it has none.
	HostLink(ctx context.Context, id podnet.ID, ns *netns.NS, address ipam.Address) (int, error)
	// ClientGuard returns the guard that a client has, GuardClient gives it another one.
	ClientGuard(ctx context.Context, link int) (dataplane.ClientGuard, error)
	GuardClient(ctx context.Context, link int, g dataplane.ClientGuard) (dataplane.Result, error)
	// CheckClientGuard says whether a client has the guard.
	CheckClientGuard(ctx context.Context, link int, g dataplane.ClientGuard) error
}

// Tunnels makes the tunnels of one network namespace; see FoU.
type Tunnels interface {
	// Make makes and changes tunnels, and what receives packets; it removes nothing. It
	// returns the links to those peers that it succeeded for.
	Make(ctx context.Context, ns *netns.NS, h *rtnl.Handle, port uint16, want []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, dataplane.Result, error)
	// Prune removes all that isn't kept, sinks but for some families.
	Prune(ctx context.Context, ns *netns.NS, h *rtnl.Handle, port uint16, keep []dataplane.Tunnel, sinks ...dataplane.Family) (dataplane.Result, error)
	// Check says what isn't as Make makes it, and returns the links that there are.
	Check(ctx context.Context, ns *netns.NS, h *rtnl.Handle, port uint16, want []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, error)
	// MakeSinks makes the links by which packets of some families get lost, and returns those that it
	// succeeded for.
	MakeSinks(ctx context.Context, h *rtnl.Handle, mtu int, families ...dataplane.Family) (map[dataplane.Family]int, error)
	// Sink returns the link by which packets of a family get lost, once it is made, or there are tunnels.
	Sink(ctx context.Context, h *rtnl.Handle, f dataplane.Family) (int, error)
}

// Filters are the rulesets of nftables in network namespaces; see package nft.
type Filters interface {
	// Sync makes a ruleset what it should be, none if nil. It counts what it changed.
	Sync(ctx context.Context, ns *netns.NS, r *ruleset.Client) (dataplane.Result, error)
	// Check says what of a ruleset isn't as Sync makes it.
	Check(ctx context.Context, ns *netns.NS, r ruleset.Client) error
}

// NewKernel returns the Network whose routes and rules have the protocol. Without a Host the node keeps
// nothing.
func NewKernel(protocol int, t Tunnels, f Filters, h Host) *Kernel {
	return &Kernel{protocol: protocol, tunnels: t, filters: f, host: h}
}

// priorities are those of the rules in a client.
func priorities() []int {
	all := []int{dataplane.PriorityOriginating, dataplane.PriorityLinkLocal, dataplane.PriorityNarrow, dataplane.PriorityWide}
	for i := range dataplane.PrivateRanges {
		all = append(all, dataplane.PriorityPrivate+i)
	}
	return all
}

// Exists implements Network.
func (k *Kernel) Exists(at store.Netns) (bool, error) {
	ns, err := open(at)
	if errors.Is(err, ErrGone) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, ns.Close()
}

// Ask asks routers by the tunnels of a client; see package kernel/echo.
func (k *Kernel) Ask(ctx context.Context, at store.Netns, wait time.Duration, questions []echo.Question) (answers []echo.Answer, err error) {
	err = visit(ctx, at, func(ns *netns.NS) (err error) {
		answers, err = echo.Ask(ctx, ns, wait, questions)
		return err
	})
	return answers, err
}

// Client implements Network.
func (k *Kernel) Client(ctx context.Context, at store.Netns, c plan.Client) (out Outcome, err error) {
	err = k.inside(ctx, at, func(in client) error {
		if len(c.Egresses) == 0 {
			out, err = in.clear(ctx, c.Port)
		} else if c, err = in.linked(ctx, c); err == nil {
			out, err = in.make(ctx, plan.ClientStateOf(c), c)
		}
		return err
	})
	return out, err
}

// linked returns a client with what its link is.
func (in client) linked(ctx context.Context, c plan.Client) (plan.Client, error) {
	link, err := in.handle.LinkByName(ctx, c.Link)
	c.Index, c.MTU = link.Index, link.MTU
	return c, err
}

// make makes all that there should be. It goes on after a failure: what is missing then
// leaves destinations unreachable.
func (in client) make(ctx context.Context, state plan.ClientState, c plan.Client) (Outcome, error) {
	out := Outcome{State: state}
	var errs []error
	errs = append(errs, set(in.ns, &out, settingsOf(c.Link, spreadOf(state))...))
	// Before the tunnels to routers that it lets send, before the links that take what these send, and
	// before routes.
	errs = append(errs, in.filter(ctx, &out, state.Filter))
	// With the MTU of the link that answers take in the end.
	sinks, err := in.tunnels.MakeSinks(ctx, in.handle, c.MTU, state.Sinks()...)
	errs = append(errs, err)
	closed, err := in.routes.Ensure(ctx, state.Closed(sinks))
	errs = append(errs, err)
	faultpoint.At(faultpoint.EgressClosed)
	changed := c.Stale || closed.Changed() || err != nil
	out.Rules, err = in.rules.Sync(ctx, state.Rules)
	errs = append(errs, err)
	if changed {
		errs = append(errs, in.renew(ctx, c))
	}
	faultpoint.At(faultpoint.EgressRuled)
	links, tunnels, err := in.tunnels.Make(ctx, in.ns, in.handle, c.Port, state.Tunnels)
	complete := err == nil
	errs = append(errs, err)
	indexes := map[netip.Addr]int{}
	var accepting group
	for peer, l := range links {
		accepting = append(accepting, accept(l.Name))
		indexes[peer] = l.Index
	}
	errs = append(errs, set(in.ns, &out, accepting))
	faultpoint.At(faultpoint.EgressTunnelled)
	groups, err := in.group(ctx, state, indexes, complete, &out)
	errs = append(errs, err)
	grouped := err == nil
	faultpoint.At(faultpoint.EgressGrouped)
	out.Routes, out.Tunnels, out.Links = closed, tunnels, indexes
	if !complete {
		// Tunnels that couldn't even be looked at may well work. A range that isn't the cluster's any
		// more is for the tunnels, though; what leads to their ends is a single address.
		opened, err := in.routes.EnsureBut(ctx, state.By(indexes, sinks), func(r dataplane.Route) bool {
			return r.Type == dataplane.Throw && !r.Dst.IsSingleIP()
		})
		out.Routes = out.Routes.Plus(opened)
		return out, errors.Join(append(errs, err, in.renew(ctx, c))...)
	}
	opened, err := in.routes.Sync(ctx, state.By(indexes, sinks))
	errs = append(errs, err)
	if opened.Changed() || err != nil {
		errs = append(errs, in.renew(ctx, c))
	}
	faultpoint.At(faultpoint.EgressOpened)
	if grouped {
		former, err := in.nexthops.Prune(ctx, groups)
		out.Nexthops = out.Nexthops.Plus(former)
		errs = append(errs, err)
	}
	pruned, err := in.tunnels.Prune(ctx, in.ns, in.handle, c.Port, state.Tunnels, state.Sinks()...)
	errs = append(errs, err)
	out.Routes, out.Tunnels = out.Routes.Plus(opened), out.Tunnels.Plus(pruned)
	return out, errors.Join(errs...)
}

// renew makes sockets look their routes up again. IPv4 does that after each change, IPv6 only when
// the table changes from which the route is, or rules change (ip6_dst_check, fib6_rules_flush_cache):
// a socket that is connected by the main table would never see that ours has a route now. The rule
// that comes and goes does what another one does already; one that is left goes with the next sync.
func (in client) renew(ctx context.Context, c plan.Client) error {
	if !c.Address.IPv6.IsValid() {
		return nil
	}
	return in.rules.Touch(ctx, dataplane.Rule{
		Family: dataplane.IPv6, Priority: dataplane.PriorityNarrow, Mark: dataplane.MarkOriginating, Table: dataplane.TableNarrow, Protocol: c.Protocol,
	})
}

// clear removes what make has made, but for the parameters. The ruleset goes first: it loses what
// would leave where no route leads into a tunnel any more. Routes go before rules: without those for
// private ranges others would take these.
func (in client) clear(ctx context.Context, port uint16) (out Outcome, err error) {
	errs := []error{in.filter(ctx, &out, nil)}
	out.Routes, err = in.routes.Sync(ctx, nil)
	errs = append(errs, err)
	faultpoint.At(faultpoint.EgressRouteless)
	out.Rules, err = in.rules.Sync(ctx, nil)
	errs = append(errs, err)
	out.Pins, err = in.pins.Sync(ctx, nil)
	errs = append(errs, err)
	out.Nexthops, err = in.nexthops.Prune(ctx, nexthop.Set{})
	errs = append(errs, err)
	out.Tunnels, err = in.tunnels.Prune(ctx, in.ns, in.handle, port, nil)
	return out, errors.Join(append(errs, err)...)
}

// sinks returns the links by which packets of some families get lost. What is missing is left out, and
// an error.
func (in client) sinks(ctx context.Context, families ...dataplane.Family) (map[dataplane.Family]int, error) {
	sinks := map[dataplane.Family]int{}
	var errs []error
	for _, f := range families {
		link, err := in.tunnels.Sink(ctx, in.handle, f)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		sinks[f] = link
	}
	return sinks, errors.Join(errs...)
}

func (in client) filter(ctx context.Context, out *Outcome, r *ruleset.Client) error {
	result, err := in.filters.Sync(ctx, in.ns, r)
	out.Others += result.Added + result.Replaced + result.Deleted
	return err
}

// accept lets packets in by a link whatever way their source would be reached: answers come
// from where only tunnels lead, and connections from outside by the link to the node.
func accept(link string) sysctl.Setting {
	return sysctl.Setting{Key: "net/ipv4/conf/" + link + "/rp_filter", Value: "0"}
}

// group are parameters that a kernel has all of, or none.
type group []sysctl.Setting

// settingsOf returns the kernel parameters of a client: link is the name of its link to the node, and spread are the
// parameters by which flows are spread over several next hops.
func settingsOf(link string, spread []group) []group {
	return append([]group{{accept("all"), accept("default"), accept(link)}}, spread...)
}

// routerSettings returns the kernel parameters of a router; link is the name of its link to the node.
func routerSettings(link string) []group {
	return append(settingsOf(link, spreadByPorts),
		group{{Key: "net/ipv4/conf/all/forwarding", Value: "1"}},
		group{{Key: "net/ipv6/conf/all/forwarding", Value: "1"}})
}

// Router implements Network.
func (k *Kernel) Router(ctx context.Context, at store.Netns, link string) (out Outcome, err error) {
	err = visit(ctx, at, func(ns *netns.NS) error { return set(ns, &out, routerSettings(link)...) })
	return out, err
}

// set sets parameters. Those that the kernel doesn't have, for want of an address family or of
// several next hops, aren't needed.
func set(ns *netns.NS, out *Outcome, groups ...group) error {
	var errs []error
	for _, g := range groups {
		changed, err := sysctl.Set(ns, g...)
		if !errors.Is(err, sysctl.ErrNotExist) {
			errs = append(errs, err)
		}
		if changed {
			out.Others++
		}
	}
	return errors.Join(errs...)
}
