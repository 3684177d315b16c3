package podnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Check compares a pod with the work of Attach; the error joins all differences. Nothing is
// changed, and nothing is dumped. A field of the attachment that is empty isn't known, as after
// a pod was found by List, and isn't compared.
func (n *Network) Check(ctx context.Context, p Pod, a Attachment) error {
	var errs []error
	if err := n.checkHost(ctx, p, a); err != nil {
		errs = append(errs, fmt.Errorf("on the host: %w", err))
	}
	if err := n.checkPod(ctx, p, a); err != nil {
		errs = append(errs, fmt.Errorf("in the pod: %w", err))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("check %s: %w", p.Key(), err)
	}
	return nil
}

func (n *Network) checkHost(ctx context.Context, p Pod, a Attachment) error {
	l, err := n.handle.LinkByIndex(ctx, a.HostIfIndex)
	if err != nil {
		return fmt.Errorf("link %s: %w", a.HostIfName, err)
	}
	var c checklist
	c.expect(l.Name == a.HostIfName, "link %s is named %s", a.HostIfName, l.Name)
	c.link(l)
	c.expect(a.HostMAC == "" || l.MAC.String() == a.HostMAC, "MAC address of %s is %s, not %s", l.Name, l.MAC, a.HostMAC)
	mtu := n.mtuOf(p)
	c.expect(l.MTU == mtu, "MTU of %s is %d, not %d", l.Name, l.MTU, mtu)
	c.expect(l.Alias == p.alias(), "alias is %q, not %q", l.Alias, p.alias())
	c.expect(dataplane.OfPods(l.Group), "group is %#x, not %#x", l.Group, uint32(dataplane.LinkGroup))
	c.expect(slices.Contains(l.AltNames, altName(p.ID)), "alternative name %s is missing", altName(p.ID))
	for _, gw := range a.gateways(p).Addrs() {
		c.address(ctx, n.handle, l.Index, gw)
	}
	for _, want := range n.hostRoutes(p.Address, p.NodeAddrs, l.Index) {
		r, err := n.handle.RouteTo(ctx, want.Dst.Addr(), 0)
		if err != nil {
			c.add(fmt.Errorf("route to %s: %w", want.Dst.Addr(), err))
			continue
		}
		// Whether the source can be the node's address is Sync's to know.
		want.Source = r.Source
		c.expect(r.Exact && r.Route == want, "%s is reached by %s, not by %s", want.Dst.Addr(), r, want)
	}
	return errors.Join(c...)
}

func (n *Network) checkPod(ctx context.Context, p Pod, a Attachment) error {
	w, err := n.begin(p)
	if err != nil {
		return err
	}
	defer w.end()
	if a.NetnsInode != 0 && w.ns.Inode() != a.NetnsInode {
		return fmt.Errorf("%s is another network namespace: inode %d, not %d", w.ns, w.ns.Inode(), a.NetnsInode)
	}
	l, err := w.inside.LinkByName(ctx, p.IfName)
	if err != nil {
		return err
	}
	var c checklist
	c.link(l)
	// A chained plugin may have made the MTU smaller, and changed the MAC address.
	mtu := n.mtuOf(p)
	c.expect(l.MTU <= mtu, "MTU of %s is %d, more than %d", l.Name, l.MTU, mtu)
	c.expect(l.Peer == a.HostIfIndex, "the other end of the link has index %d on the host, not %d", l.Peer, a.HostIfIndex)
	addrs := p.Address.Addrs()
	if mac, err := net.ParseMAC(a.PodMAC); err == nil && p.Address.IPv6.IsValid() {
		addrs = append(addrs, linkLocal(mac))
	}
	for _, addr := range addrs {
		c.address(ctx, w.inside, l.Index, addr)
	}
	for _, want := range podRoutes(a.gateways(p), l.Index) {
		r, err := w.inside.RouteTo(ctx, probe(want.Dst), l.Index)
		if err != nil {
			c.add(fmt.Errorf("route to %s: %w", want.Dst, err))
			continue
		}
		// Later plugins may have changed more than this.
		c.expect(r.Dst == want.Dst && r.Link == want.Link && r.Gateway == want.Gateway, "%s is reached by %s, not by %s", want.Dst, r, want)
	}
	return errors.Join(c...)
}

// gateways returns the gateways that Attach gave a pod. Coil 2.x gave its pods others, and nobody knows the MAC addresses
// that it gave them.
func (a Attachment) gateways(p Pod) ipam.Address {
	if a.PodMAC == "" {
		return ipam.Address{}
	}
	return gatewaysFor(p.Address)
}

// probe is an address by which a route can be looked up: for the default routes
// one that is link-local but not on the link, since egress rules send all other
// destinations elsewhere first.
func probe(dst netip.Prefix) netip.Addr {
	switch {
	case dst.IsSingleIP():
		return dst.Addr()
	case dst.Addr().Is4():
		return netip.MustParseAddr("169.254.1.0")
	default:
		return netip.MustParseAddr("fe80:0:0:1::1")
	}
}

// checklist collects differences.
type checklist []error

func (c *checklist) add(err error) { *c = append(*c, err) }

func (c *checklist) expect(ok bool, format string, args ...any) {
	if !ok {
		c.add(fmt.Errorf(format, args...))
	}
}

// link checks the state that both ends have in common.
func (c *checklist) link(l rtnl.Link) {
	c.expect(l.Kind == "veth", "link %s is not a veth", l)
	c.expect(l.Up, "link %s is down", l.Name)
}

// address checks that a link has an address. The kernel can be asked for single addresses of IPv6 only.
func (c *checklist) address(ctx context.Context, h *rtnl.Handle, link int, a netip.Addr) {
	var exists, tentative bool
	var err error
	if a.Is6() {
		exists, tentative, err = h.IPv6Addr(ctx, link, a)
	} else {
		exists, err = isLocal(ctx, h, a, link)
	}
	if err != nil {
		c.add(fmt.Errorf("address %s: %w", a, err))
		return
	}
	c.expect(exists, "address %s is missing", a)
	c.expect(!tentative, "address %s is tentative", a)
}
