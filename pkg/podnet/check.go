package podnet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/inspection"
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
	c, err := n.compareHost(ctx, p, a)
	return errors.Join(append(c.errs(), err)...)
}

// compareHost compares the host's side of a pod. The error says that its link can't be read.
func (n *Network) compareHost(ctx context.Context, p Pod, a Attachment) (checklist, error) {
	l, err := n.handle.LinkByIndex(ctx, a.HostIfIndex)
	if err != nil {
		return nil, fmt.Errorf("link %s: %w", a.HostIfName, err)
	}
	var c checklist
	c.expect(inspection.Veth, "name of link "+fmt.Sprint(l.Index), a.HostIfName, l.Name, "link %s is named %s", a.HostIfName, l.Name)
	c.link(inspection.Veth, l)
	c.expect(inspection.Veth, "MAC address of "+l.Name, cmp.Or(a.HostMAC, l.MAC.String()), l.MAC.String(), "MAC address of %s is %s, not %s", l.Name, l.MAC, a.HostMAC)
	mtu := n.mtuOf(p)
	c.expect(inspection.Veth, "MTU of "+l.Name, mtu, l.MTU, "MTU of %s is %d, not %d", l.Name, l.MTU, mtu)
	c.expect(inspection.Veth, "alias of "+l.Name, p.alias(), l.Alias, "alias is %q, not %q", l.Alias, p.alias())
	group := uint32(dataplane.LinkGroup)
	if dataplane.OfPods(l.Group) {
		group = l.Group
	}
	c.expect(inspection.Veth, "group of "+l.Name, fmt.Sprintf("%#x", group), fmt.Sprintf("%#x", l.Group), "group is %#x, not %#x", l.Group, group)
	named := slices.Contains(l.AltNames, altName(p.ID))
	c.add(comparison(inspection.Veth, "alternative name of "+l.Name, altName(p.ID), strings.Join(l.AltNames, " "), named), "alternative name %s is missing", altName(p.ID))
	for _, gw := range a.gateways(p).Addrs() {
		c.address(ctx, inspection.Veth, n.handle, l, gw)
	}
	for _, want := range n.hostRoutes(p.Address, p.NodeAddrs, l.Index) {
		object := fmt.Sprintf("way to %s", want.Dst.Addr())
		r, err := n.handle.RouteTo(ctx, want.Dst.Addr(), 0)
		if err != nil {
			c.fail(inspection.Ways, object, want.String(), fmt.Errorf("route to %s: %w", want.Dst.Addr(), err))
			continue
		}
		// Whether the source can be the node's address is Sync's to know.
		want.Source = r.Source
		same := comparison(inspection.Ways, object, want.String(), r.Route.String(), r.Exact && r.Route == want)
		c.add(same, "%s is reached by %s, not by %s", want.Dst.Addr(), r, want)
	}
	return c, nil
}

func (n *Network) checkPod(ctx context.Context, p Pod, a Attachment) error {
	c, err := n.comparePod(ctx, p, a)
	return errors.Join(append(c.errs(), err)...)
}

// comparePod compares what is in the pod. The error says that its link can't be read.
func (n *Network) comparePod(ctx context.Context, p Pod, a Attachment) (checklist, error) {
	w, err := n.begin(p)
	if err != nil {
		return nil, err
	}
	defer w.end()
	if a.NetnsInode != 0 && w.ns.Inode() != a.NetnsInode {
		return nil, fmt.Errorf("%s is another network namespace: inode %d, not %d", w.ns, w.ns.Inode(), a.NetnsInode)
	}
	l, err := w.inside.LinkByName(ctx, p.IfName)
	if err != nil {
		return nil, err
	}
	var c checklist
	c.link(inspection.Inside, l)
	// A chained plugin may have made the MTU smaller, and changed the MAC address.
	mtu := n.mtuOf(p)
	c.add(comparison(inspection.Inside, "MTU of "+l.Name, fmt.Sprint("at most ", mtu), fmt.Sprint(l.MTU), l.MTU <= mtu), "MTU of %s is %d, more than %d", l.Name, l.MTU, mtu)
	c.expect(inspection.Inside, "index of the host's end", a.HostIfIndex, l.Peer, "the other end of the link has index %d on the host, not %d", l.Peer, a.HostIfIndex)
	addrs := p.Address.Addrs()
	if mac, err := net.ParseMAC(a.PodMAC); err == nil && p.Address.IPv6.IsValid() {
		addrs = append(addrs, linkLocal(mac))
	}
	for _, addr := range addrs {
		c.address(ctx, inspection.Inside, w.inside, l, addr)
	}
	for _, want := range podRoutes(a.gateways(p), l.Index) {
		object := fmt.Sprintf("route to %s", want.Dst)
		r, err := w.inside.RouteTo(ctx, probe(want.Dst), l.Index)
		if err != nil {
			c.fail(inspection.Inside, object, want.String(), fmt.Errorf("route to %s: %w", want.Dst, err))
			continue
		}
		// Later plugins may have changed more than this.
		same := r.Dst == want.Dst && r.Link == want.Link && r.Gateway == want.Gateway
		c.add(comparison(inspection.Inside, object, want.String(), r.Route.String(), same), "%s is reached by %s, not by %s", want.Dst, r, want)
	}
	return c, nil
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

// checklist collects comparisons.
type checklist []compared

// compared is a comparison, and what Check says if it doesn't agree.
type compared struct {
	inspection.Comparison
	err error
}

// comparison is one of an object that may agree without being the same.
func comparison(topic inspection.Topic, object, want, have string, ok bool) inspection.Comparison {
	return inspection.Comparison{Topic: topic, Object: object, Want: want, Have: have, OK: ok}
}

// errs are the differences, and why something isn't known.
func (c checklist) errs() (all []error) {
	for _, one := range c {
		all = append(all, one.err)
	}
	return all
}

// add adds a comparison. The error is made of the format if it doesn't agree.
func (c *checklist) add(one inspection.Comparison, format string, args ...any) {
	var err error
	if !one.OK {
		err = fmt.Errorf(format, args...)
	}
	*c = append(*c, compared{one, err})
}

// expect compares two values by their texts.
func (c *checklist) expect(topic inspection.Topic, object string, want, have any, format string, args ...any) {
	w, h := fmt.Sprint(want), fmt.Sprint(have)
	c.add(comparison(topic, object, w, h, w == h), format, args...)
}

// fail adds an object that can't be read, or that isn't there.
func (c *checklist) fail(topic inspection.Topic, object, want string, err error) {
	one := comparison(topic, object, want, "", false)
	switch refused := (*rtnl.Error)(nil); {
	case errors.Is(err, rtnl.ErrNotExist):
	case topic == inspection.Ways && errors.As(err, &refused) && (refused.Errno == unix.EINVAL || refused.Errno == unix.EACCES):
		one.Have = "none: a rule or a route drops such packets" // of the type blackhole or prohibit
	default:
		one.Unknown = err.Error()
	}
	*c = append(*c, compared{one, err})
}

// link checks the state that both ends have in common.
func (c *checklist) link(topic inspection.Topic, l rtnl.Link) {
	c.expect(topic, "kind of "+l.Name, "veth", l.Kind, "link %s is not a veth", l)
	state := map[bool]string{true: "up", false: "down"}
	c.expect(topic, "state of "+l.Name, state[true], state[l.Up], "link %s is down", l.Name)
}

// address checks that a link has an address. The kernel can be asked for single addresses of IPv6 only.
func (c *checklist) address(ctx context.Context, topic inspection.Topic, h *rtnl.Handle, l rtnl.Link, a netip.Addr) {
	var exists, tentative bool
	var err error
	if a.Is6() {
		exists, tentative, err = h.IPv6Addr(ctx, l.Index, a)
	} else {
		exists, err = isLocal(ctx, h, a, l.Index)
	}
	object := "address of " + l.Name
	switch {
	case err != nil:
		c.fail(topic, object, a.String(), fmt.Errorf("address %s: %w", a, err))
	case !exists:
		c.add(comparison(topic, object, a.String(), "", false), "address %s is missing", a)
	case tentative:
		c.add(comparison(topic, object, a.String(), a.String()+" tentative", false), "address %s is tentative", a)
	default:
		c.add(comparison(topic, object, a.String(), a.String(), true), "")
	}
}
