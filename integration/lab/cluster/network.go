package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"

	"github.com/coil-net/coil/integration/lab/machine"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// Family is an IP address family.
type Family int

// Families, with the numbers of their protocols' versions.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// String implements fmt.Stringer.
func (f Family) String() string { return "IPv" + strconv.Itoa(int(f)) }

// plan has the ranges of one family. All clusters use the same ones: their fabrics are isolated.
type plan struct {
	fabric  netip.Prefix // with the bridge's own address
	service netip.Prefix
	pods    netip.Prefix // of the reference plugins; the node's number is its next octet or group
	all     netip.Prefix
}

var plans = map[Family]plan{
	IPv4: {
		fabric:  netip.MustParsePrefix("172.30.0.1/24"),
		service: netip.MustParsePrefix("10.96.0.0/16"),
		pods:    netip.MustParsePrefix("10.244.0.0/16"),
		all:     netip.MustParsePrefix("0.0.0.0/0"),
	},
	IPv6: {
		fabric:  netip.MustParsePrefix("fd00:172:30::1/64"),
		service: netip.MustParsePrefix("fd00:10:96::/112"),
		pods:    netip.MustParsePrefix("fd00:10:244::/48"),
		all:     netip.MustParsePrefix("::/0"),
	},
}

// firstNode is the last octet, in decimal, of the first node's address in both families.
const firstNode = 10

func (f Family) bridge() netip.Prefix { return plans[f].fabric }

// node returns the address of the node with this index and the length of the fabric's prefix.
func (f Family) node(index int) netip.Prefix {
	p := plans[f].fabric
	s := p.Addr().String()
	s = s[:len(s)-1] + strconv.Itoa(firstNode+index) // fd00:172:30::10 reads as 172.30.0.10
	return netip.PrefixFrom(netip.MustParseAddr(s), p.Bits())
}

// podSubnet returns the range of the reference plugins on the node with this index.
func (f Family) podSubnet(index int) netip.Prefix {
	b := plans[f].pods.Addr().AsSlice()
	bits := plans[f].pods.Bits() + 8
	if f == IPv6 {
		bits += 8
	}
	b[bits/8-1] = byte(index)
	a, _ := netip.AddrFromSlice(b) // the length is right
	return netip.PrefixFrom(a, bits)
}

func (c *Cluster) families() []Family {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.Families
}

// wireFabric makes the bridge inside the fabric's network namespace.
func (c *Cluster) wireFabric(ctx context.Context, i machine.Init) error {
	var addrs []netip.Prefix
	for _, f := range c.families() {
		addrs = append(addrs, f.bridge())
	}
	if err := ip(ctx, i, append([]string{"link set lo up"}, netlab.AddBridge("br0", addrs...)...)...); err != nil {
		return err
	}
	if r := c.remote(); r != nil {
		return r.takeLink(ctx, i)
	}
	return nil
}

// wireNode connects a node's network namespace with the bridge. The pair of links is made with
// both ends in their places, so nothing appears in the host's namespace; it goes with the node.
func (c *Cluster) wireNode(ctx context.Context, fabric, i machine.Init, index int) error {
	port := "node" + strconv.Itoa(index)
	add := []string{
		fmt.Sprintf("link add %s type veth peer name eth0 address %s netns %d", port, hardware(index), i.PID),
		"link set " + port + " master br0 up",
	}
	if err := ip(ctx, fabric, add...); err != nil {
		// The kernel removes the links of a node that was switched off a moment later. It
		// may be faster than this, which then fails.
		_ = ip(ctx, fabric, "link del "+port)
		if err := ip(ctx, fabric, add...); err != nil {
			return err
		}
	}
	lines := []string{"link set lo up", "link set eth0 up"}
	for _, f := range c.families() {
		lines = append(lines,
			netlab.AddAddr(f.node(index), "eth0"),
			fmt.Sprintf("route add %s via %s", plans[f].all, f.bridge().Addr()),
		)
	}
	if c.referenceCNI() {
		for _, f := range c.families() {
			for other := range c.Nodes() {
				if other != index {
					lines = append(lines, fmt.Sprintf("route add %s via %s", f.podSubnet(other), f.node(other).Addr()))
				}
			}
		}
	}
	return ip(ctx, i, lines...)
}

// hardware is the MAC of a node's network card. It is the same after a power cut: the neighbours
// send what they have for the node to the address that they know, for seconds.
func hardware(index int) string {
	return fmt.Sprintf("02:00:00:00:%02x:%02x", byte(index>>8), byte(index))
}

// ip runs iproute2 in the network namespace of a machine.
func ip(ctx context.Context, i machine.Init, lines ...string) error {
	return inNetns(i, func(ns *netlab.NS) error { return ns.IP(ctx, lines...) })
}

// inNetns calls do with the network namespace of a machine.
func inNetns(i machine.Init, do func(*netlab.NS) error) error {
	ns, err := netlab.Open(fmt.Sprintf("/proc/%d/ns/net", i.PID))
	if err != nil {
		return err
	}
	defer ns.Close()
	return do(ns)
}
