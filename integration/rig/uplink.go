package rig

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// Family is an address family.
type Family int

// The families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// uplink is a node's link to the others in one family.
type uplink struct {
	own    netip.Prefix // the node's address, with its network's length
	router netip.Addr
}

// uplinkOf says what the addresses are of the node with this number.
func (o NodeOptions) uplinkOf(number int, family Family) uplink {
	host := number + 1
	switch {
	case family == IPv4 && o.Segment:
		n := netip.AddrFrom4([4]byte{10, 254, byte(number), 0})
		return uplink{netip.PrefixFrom(n.Next().Next(), 24), n.Next()}
	case family == IPv4:
		return uplink{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, byte(host >> 8), byte(host)}), 16), netip.MustParseAddr("10.255.0.1")}
	case o.Segment:
		n := netip.MustParseAddr(fmt.Sprintf("fd00:254:%x::", number))
		return uplink{netip.PrefixFrom(n.Next().Next(), 64), n.Next()}
	default:
		return uplink{netip.PrefixFrom(netip.MustParseAddr(fmt.Sprintf("fd00:255::%x", host)), 64), netip.MustParseAddr("fd00:255::1")}
	}
}

// uplinks are the node's in the order of its families.
func (n *Node) uplinks() []uplink {
	var all []uplink
	for _, f := range n.opts.Families {
		all = append(all, n.opts.uplinkOf(n.number, f))
	}
	return all
}

// RouterAddr is the router's address in the node's network; it is invalid in a family
// that the node doesn't have.
func (n *Node) RouterAddr(f Family) netip.Addr {
	for _, u := range n.uplinks() {
		if u.own.Addr().Is4() == (f == IPv4) {
			return u.router
		}
	}
	return netip.Addr{}
}

// fabric is the network between the nodes: a bridge in a namespace of its own, which
// is the nodes' router too, and that of the nodes that have a segment of their own.
type fabric struct{ *netlab.NS }

func newFabric(ctx context.Context) (*fabric, error) {
	ns, err := netlab.New()
	if err != nil {
		return nil, err
	}
	bridge := netlab.AddBridge("br0", netip.MustParsePrefix("10.255.0.1/16"), netip.MustParsePrefix("fd00:255::1/64"))
	if err := errors.Join(ns.IP(ctx, bridge...), ns.Forward()); err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return &fabric{ns}, nil
}

// owner is the kind of machine that a link belongs to. Machines of each kind are numbered.
type owner byte

const (
	nodeLink owner = iota + 1
	hostLink
)

// raise are the commands that bring up the link eth0 of a machine, with a MAC address that it keeps through a power cut. With a new one,
// neighbours would send IPv6 packets to the former MAC address for up to a minute: a machine that forwards sends neighbour solicitations from its
// link-local address, and neighbours learn the MAC address of no other address from these.
func raise(o owner, number int) []string {
	return []string{fmt.Sprintf("link set eth0 address 02:00:00:%02x:%02x:%02x", o, number>>8&0xff, number&0xff), "link set eth0 up"}
}

// connect gives a node's namespace the link eth0: to the bridge, or to the router
// alone.
func (f *fabric) connect(ctx context.Context, n *Node) error {
	port := fmt.Sprintf("port%d", n.number)
	here := []string{fmt.Sprintf("link add %s type veth peer name eth0 netns %s", port, n.ns.Path())}
	there := raise(nodeLink, n.number)
	if !n.opts.Segment {
		here = append(here, fmt.Sprintf("link set %s master br0", port))
	}
	for _, u := range n.uplinks() {
		if n.opts.Segment {
			here = append(here, netlab.AddAddr(netip.PrefixFrom(u.router, u.own.Bits()), port))
		}
		there = append(there, netlab.AddAddr(u.own, "eth0"), fmt.Sprintf("route add default via %s", u.router))
	}
	if err := f.IP(ctx, append(here, fmt.Sprintf("link set %s up", port))...); err != nil {
		return err
	}
	return n.ns.IP(ctx, there...)
}

// RouterNetnsPath leads to the network namespace of the router between the nodes, for
// nsenter --net.
func (r *Rig) RouterNetnsPath() string { return r.fabric.Path() }

// DialOutside connects from the router between the nodes to an IP address.
func (r *Rig) DialOutside(ctx context.Context, network, address string) (net.Conn, error) {
	return r.fabric.Dial(ctx, network, address)
}

// RunRouter runs a program in the router's network namespace and returns its output.
func (r *Rig) RunRouter(ctx context.Context, name string, args ...string) (string, error) {
	return r.fabric.Run(ctx, name, args...)
}

// NewHost makes a host on the nodes' network, outside of the cluster: a namespace with the link eth0. Its number is in its addresses; nodes
// have low ones.
func (r *Rig) NewHost(ctx context.Context, number byte) (*netlab.NS, error) {
	host, err := netlab.New()
	if err != nil {
		return nil, err
	}
	link := fmt.Sprintf("host%d", number)
	err = r.fabric.IP(ctx, fmt.Sprintf("link add %s type veth peer name eth0 netns %s", link, host.Path()), fmt.Sprintf("link set %s master br0", link), fmt.Sprintf("link set %s up", link))
	if err == nil {
		v4, v6 := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, 200, number}), 16), netip.MustParsePrefix(fmt.Sprintf("fd00:255::c8:%x/64", number))
		err = host.IP(ctx, append(raise(hostLink, int(number)), netlab.AddAddr(v4, "eth0"), netlab.AddAddr(v6, "eth0"))...)
	}
	if err != nil {
		return nil, errors.Join(err, host.Close())
	}
	return host, nil
}

// Divide cuts nodes of different groups off each other, in place of what it did before by that name. Without groups these nodes
// reach each other again. Hosts and the router reach all nodes.
func (r *Rig) Divide(ctx context.Context, name string, groups ...[]*Node) error {
	table := "bridge divided-" + name
	rules := []string{"add table " + table, "delete table " + table}
	if len(groups) > 0 {
		rules = append(rules, "add table "+table, "add chain "+table+" forward { type filter hook forward priority 0; }")
	}
	for i, from := range groups {
		for j, to := range groups {
			for _, x := range from {
				for _, y := range to {
					if i != j {
						rules = append(rules, fmt.Sprintf("add rule %s forward iifname port%d oifname port%d drop", table, x.number, y.number))
					}
				}
			}
		}
	}
	_, err := r.fabric.Run(ctx, "nft", strings.Join(rules, "; "))
	return err
}

// PingOutside begins to ping an address from the router between the nodes.
func (r *Rig) PingOutside(to netip.Addr) (*netlab.Pinger, error) {
	return r.fabric.Pings("outside", to)
}
