package rig

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/coil-net/coil/pkg/kernel/sysctl"
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

// connect gives a node's namespace the link eth0: to the bridge, or to the router
// alone.
func (f *fabric) connect(ctx context.Context, n *Node) error {
	port := fmt.Sprintf("port%d", n.number)
	here := fmt.Sprintf("link add %s type veth peer name eth0 netns %s\n", port, n.ns.path())
	there := "link set eth0 up\n"
	if !n.opts.Segment {
		here += fmt.Sprintf("link set %s master br0\n", port)
	}
	for _, u := range n.uplinks() {
		if n.opts.Segment {
			here += fmt.Sprintf("addr add %s dev %s %s\n", netip.PrefixFrom(u.router, u.own.Bits()), port, noDAD(u.router))
		}
		there += fmt.Sprintf("addr add %s dev eth0 %s\nroute add default via %s\n", u.own, noDAD(u.router), u.router)
	}
	here += fmt.Sprintf("link set %s up\n", port)
	if _, err := f.run(ctx, here, "ip", "-batch", "-"); err != nil {
		return err
	}
	_, err := n.ns.run(ctx, there, "ip", "-batch", "-")
	return err
}

func noDAD(a netip.Addr) string {
	if a.Is4() {
		return ""
	}
	return "nodad"
}

// forward makes the fabric route.
func (f *fabric) forward() error {
	for _, key := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		if _, err := sysctl.Set(f.NS, sysctl.Setting{Key: key, Value: "1"}); err != nil {
			return fmt.Errorf("make the router forward: %w", err)
		}
	}
	return nil
}

// RouterNetnsPath leads to the network namespace of the router between the nodes, for
// nsenter --net.
func (r *Rig) RouterNetnsPath() string { return r.fabric.path() }

// DialOutside connects from the router between the nodes to an IP address.
func (r *Rig) DialOutside(ctx context.Context, network, address string) (net.Conn, error) {
	return r.fabric.dial(ctx, network, address)
}

// RunRouter runs a program in the router's network namespace and returns its output.
func (r *Rig) RunRouter(ctx context.Context, name string, args ...string) (string, error) {
	return r.fabric.run(ctx, "", name, args...)
}
