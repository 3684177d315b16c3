package clientnet

import (
	"context"
	"errors"
	"fmt"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
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

// Router sets the kernel parameters that the program of a router has no right to; link is the router's link to the node.
func (n *Network) Router(ctx context.Context, at store.Netns, link string) (out Outcome, err error) {
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

// CheckRouter says what of a router isn't as Router made it. Nothing is changed.
func (n *Network) CheckRouter(ctx context.Context, at store.Netns, link string) error {
	return visit(ctx, at, func(ns *netns.NS) error { return compare(ns, routerSettings(link)...) })
}

// compare says which parameters have another value; those that set leaves out may.
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
