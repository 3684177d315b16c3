package clientnet

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/store"
)

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

// liberal lets a router take packets of TCP whatever window they are in. While an address moves, clients send by the router of before and are
// answered by the next one: each sees one direction, and would take the other's packets for ones of no connection
// (Documentation/networking/nf_conntrack-sysctl.rst).
var liberal = group{{Key: "net/netfilter/nf_conntrack_tcp_be_liberal", Value: "1"}}

// Router sets the kernel parameters that the program of a router has no right to; link is the router's link to the node. One with floating
// addresses gets one more, which isn't counted: there is none before the kernel tracks connections.
func (n *Network) Router(ctx context.Context, at store.Netns, link string, floating bool) (out Outcome, err error) {
	err = visit(ctx, at, func(ns *netns.NS) error {
		err := set(ns, &out, routerSettings(link)...)
		if floating {
			var uncounted Outcome
			err = errors.Join(err, set(ns, &uncounted, liberal))
		}
		return err
	})
	return out, err
}

// set sets parameters. A parameter that the kernel doesn't have, for want of an address family
// or of several next hops, isn't needed.
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

// CheckRouter returns an error for each parameter of a router that isn't as Router made it.
// Nothing is changed.
func (n *Network) CheckRouter(ctx context.Context, at store.Netns, link string) error {
	return visit(ctx, at, func(ns *netns.NS) error { return compare(ns, routerSettings(link)...) })
}

// compare returns an error for each parameter that has another value. A parameter that the
// kernel doesn't have is none.
func compare(ns *netns.NS, groups ...group) error {
	var errs []error
	for _, g := range groups {
		for _, s := range g {
			value, err := sysctl.Get(ns, s.Key)
			switch {
			case errors.Is(err, sysctl.ErrNotExist):
			case err != nil:
				errs = append(errs, err)
			case value != s.Value:
				errs = append(errs, fmt.Errorf("kernel parameter %s is %s, not %s", s.Key, value, s.Value))
			}
		}
	}
	return errors.Join(errs...)
}

// Parameters of how flows are spread over next hops, and their values
// (Documentation/networking/ip-sysctl.rst).
const (
	policyIPv4 = "net/ipv4/fib_multipath_hash_policy"
	policyIPv6 = "net/ipv6/fib_multipath_hash_policy"
	fieldsIPv6 = "net/ipv6/fib_multipath_hash_fields"
	seed       = "net/ipv4/fib_multipath_hash_seed"

	byAddresses = "0"
	byPorts     = "1"
	byFields    = "3"
	// whereTo are the fields destination, protocol and port of the destination.
	whereTo = "38"
)

var spreadByPorts = []group{{{Key: policyIPv4, Value: byPorts}}, {{Key: policyIPv6, Value: byPorts}}}

// spreadOf returns how the flows of a client are spread. Over routers they are spread only by
// fields that the kernel knows when a TCP connection looks its route up the first time. The
// connection uses that route until routes change, and then looks up with all fields. If the second
// route led elsewhere, the connection would end. The first lookup of IPv6 lacks the address and
// the port of the source (tcp_v6_connect()). That of IPv4 has, since Linux 6.16, a random number
// for the port (FLOWI_FLAG_ANY_SPORT).
func spreadOf(state client.State) []group {
	if len(state.Groups) == 0 {
		return spreadByPorts
	}
	policy := byAddresses
	var name unix.Utsname
	if err := unix.Uname(&name); err == nil {
		policy = policyOf(unix.ByteSliceToString(name.Release[:]))
	}
	own := sysctl.Setting{Key: seed, Value: strconv.FormatUint(uint64(state.Groups[0].Seed()), 10)}
	return []group{
		{{Key: policyIPv4, Value: policy}},
		{{Key: fieldsIPv6, Value: whereTo}, {Key: policyIPv6, Value: byFields}},
		{own}, // since 6.11; before, only the groups' own order tells clients apart
	}
}

// policyOf returns the policy of IPv4 for a release of the kernel.
func policyOf(release string) string {
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil || major > 6 || major == 6 && minor >= 16 {
		return byAddresses
	}
	return byPorts
}
