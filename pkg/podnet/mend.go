package podnet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
)

// Mended counts the objects that MendLinks restored on the host's ends of links.
type Mended struct {
	// Links were down or lacked alias, alternative name, group or MAC
	// address.
	Links int
	// Addresses are gateways.
	Addresses int
	// Parameters are links whose kernel parameters weren't as they should be.
	Parameters int
	// Learned are routes and addresses of the host that pods made by router advertisements.
	Learned int
	// Resized are links that got another MTU, as when that of the uplink changed.
	Resized int
}

// Plus returns the sum of two.
func (m Mended) Plus(o Mended) Mended {
	return Mended{
		m.Links + o.Links, m.Addresses + o.Addresses, m.Parameters + o.Parameters, m.Learned + o.Learned, m.Resized + o.Resized,
	}
}

// MendLinks restores the host's ends of the pods' links after changes by others. Links are
// looked up by their indexes: another program may have taken every name. A link that has no
// mark of the pod any more is left alone, and so is one that is being removed. It goes on after
// a failure. Routes that were lost with the state of a link are for Sync to add.
func (n *Network) MendLinks(ctx context.Context, want func(context.Context) ([]Wired, error)) (Mended, error) {
	var total Mended
	links, err := n.handle.Veths(ctx)
	if err != nil {
		return total, fmt.Errorf("mend links: %w", err)
	}
	all, err := n.handle.Addrs(ctx)
	if err != nil {
		return total, fmt.Errorf("mend links: %w", err)
	}
	addrs := map[int][]netip.Addr{}
	for _, a := range all {
		addrs[a.Link] = append(addrs[a.Link], a.Prefix.Addr())
	}
	byIndex := make(map[int]rtnl.Link, len(links))
	for _, l := range links {
		byIndex[l.Index] = l
	}
	// After the kernel, so that a link which is being made now has no record yet.
	pods, err := want(ctx)
	if err != nil {
		return total, fmt.Errorf("mend links: %w", err)
	}
	var errs []error
	for _, p := range pods {
		l, ok := byIndex[p.HostIfIndex]
		if !ok || !recognised(l, p) {
			continue
		}
		mended, err := n.mendLink(ctx, p, l, addrs[l.Index])
		total = total.Plus(mended)
		if err != nil && !errors.Is(err, rtnl.ErrNotExist) { // gone meanwhile
			errs = append(errs, fmt.Errorf("mend link %s: %w", l, err))
		}
	}
	// Only now, as the links accept no more.
	total.Learned, err = n.unlearn(ctx, links, all)
	if err != nil {
		errs = append(errs, fmt.Errorf("mend links: %w", err))
	}
	return total, errors.Join(errs...)
}

// recognised says whether a link is the host's end of a pod's, though it may have lost some
// of its marks, and isn't being removed.
func recognised(l rtnl.Link, p Wired) bool {
	if beingRemoved(l) {
		return false
	}
	if _, owner, ok := parseAlias(l.Alias); ok {
		return owner == p.ID
	}
	return l.Name == linkName(p.ID) || l.Name == calicoName(p.Namespace, p.Name) || slices.Contains(l.AltNames, altName(p.ID))
}

func beingRemoved(l rtnl.Link) bool { return l.Group&rtnl.RemovedMask == dataplane.LinkGroupRemoved }

// mendLink restores one link.
func (n *Network) mendLink(ctx context.Context, p Wired, l rtnl.Link, addrs []netip.Addr) (m Mended, err error) {
	p.learn(l)
	if mtu := n.mtuOf(p.Pod); l.MTU != mtu {
		resized, err := n.resize(ctx, p.Pod, l, mtu)
		if err != nil {
			return m, err
		}
		if resized {
			m.Resized = 1
			// Across IPv6's least MTU, the kernel takes its parameters or makes them anew.
			if l, err = n.handle.LinkByIndex(ctx, l.Index); err != nil {
				return m, err
			}
		}
	}
	gateways := gatewaysFor(p.Address).Addrs()
	if foreignGateways(gateways, addrs) {
		gateways = nil
	}
	if settings := sysctlsOf(p, l); len(settings) > 0 {
		if _, err := sysctl.Set(n.host, settings...); errors.Is(err, sysctl.ErrNotExist) {
			return m, fmt.Errorf("link %s: %w", l, rtnl.ErrNotExist)
		} else if err != nil {
			return m, err
		}
		m.Parameters = 1
	}
	change := rtnl.LinkChange{Up: !l.Up}
	if l.Alias != p.alias() {
		change.Alias = p.alias()
	}
	if mac, err := net.ParseMAC(p.HostMAC); err == nil && l.MAC.String() != mac.String() {
		change.MAC = mac
	}
	needsName := !slices.Contains(l.AltNames, altName(p.ID))
	if change.Up || change.Alias != "" || change.MAC != nil || needsName || l.Group != p.group() {
		m.Links = 1
	}
	n.mendParameters(&change, p.Pod, l, gateways != nil)
	if change.Forwarding || change.RPFilter != 0 || change.ARPFilter != nil || change.NoAutoAddress {
		m.Parameters = 1
	}
	if m.Links+m.Parameters > 0 {
		if err := n.relabel(ctx, p, l, change); err != nil {
			return Mended{}, err
		}
		if m.Resized > 0 {
			m.Parameters = 0 // nobody else changed them
		}
	}
	var reqs []rtnl.Request
	for _, gw := range gateways {
		// The kernel takes IPv6 addresses away when a link goes down, and brings back none.
		if !slices.Contains(addrs, gw) {
			reqs = append(reqs, rtnl.AddAddr(l.Index, gatewayPrefix(gw), dataplane.LinkScope))
		}
	}
	m.Addresses, err = n.handle.Apply(ctx, rtnl.ErrExist, reqs...)
	return m, err
}

// mendParameters adds to a change the parameters of a link that netlink sets, and that aren't as they should be. ours says that the link has Coil's gateways.
func (n *Network) mendParameters(change *rtnl.LinkChange, p Pod, l rtnl.Link, ours bool) {
	change.Forwarding = !l.Forwarding
	if l.RPFilter != rtnl.LooseRPFilter {
		change.RPFilter = rtnl.LooseRPFilter
	}
	if guarded := n.opts.guards(p); l.ARPFilter != guarded {
		change.ARPFilter = new(guarded)
	}
	change.NoAutoAddress = ours && l.HasIPv6 && !l.NoAutoAddress
}

// relabel changes a link, and gives it the group and the alternative name of a pod's, unless it is being removed by now.
func (n *Network) relabel(ctx context.Context, p Wired, l rtnl.Link, c rtnl.LinkChange) error {
	n.groups.Lock()
	defer n.groups.Unlock()
	now, err := n.handle.LinkByIndex(ctx, l.Index)
	if err != nil {
		return err
	}
	if !recognised(now, p) {
		return fmt.Errorf("link %s: %w", now, rtnl.ErrNotExist)
	}
	if now.Group != p.group() {
		c.Group = p.group()
	}
	reqs := []rtnl.Request{rtnl.SetLink(l.Index, c)}
	if !slices.Contains(now.AltNames, altName(p.ID)) {
		reqs = append(reqs, rtnl.AddAltName(l.Index, altName(p.ID)))
	}
	return n.handle.Do(ctx, reqs...)
}

// sysctlsOf are the parameters of a link that have to be restored and can't be set by netlink.
func sysctlsOf(p Wired, l rtnl.Link) []sysctl.Setting {
	var settings []sysctl.Setting
	if l.HasIPv6 && l.AcceptRA != 0 {
		settings = append(settings, ipv6Setting(l.Name, "accept_ra", "0"))
	}
	if l.HasIPv6 && !l.ForwardingIPv6 {
		settings = append(settings, ipv6Setting(l.Name, "forwarding", "1"))
	}
	if l.DisableIPv6 && p.Address.IPv6.IsValid() {
		settings = append(settings, ipv6Setting(l.Name, "disable_ipv6", "0"))
	}
	return settings
}

// foreignGateways says that the addresses of a host's end are those that Coil 2.x gave it: the
// node's own and the one of its MAC address. Its pod was told of these, so that others beside
// them would be of no use.
func foreignGateways(ours, have []netip.Addr) bool {
	return len(have) > 0 && !slices.ContainsFunc(have, func(a netip.Addr) bool { return slices.Contains(ours, a) })
}

// gatewayPrefix is the prefix with which the host's end has a gateway.
func gatewayPrefix(gw netip.Addr) netip.Prefix {
	if gw.Is6() {
		return netip.PrefixFrom(gw, 64)
	}
	return single(gw)
}

// Sound says whether the link of an index, if it is the host's end of a pod's, has all
// its marks and is up. lost are addresses that it lost. A link that is gone is sound.
func (n *Network) Sound(ctx context.Context, index int, lost ...netip.Addr) (bool, error) {
	l, err := n.handle.LinkByIndex(ctx, index)
	if errors.Is(err, rtnl.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	gateway := func(a netip.Addr) bool { return slices.Contains(Gateways.Addrs(), a) }
	return Sound(l) && !(slices.ContainsFunc(lost, gateway) && hasMark(l) && !beingRemoved(l)), nil
}

// Sound says whether a link, if it is the host's end of a pod's, has all its marks and
// is up, as far as it tells by itself. One that is being made or removed is sound.
func Sound(l rtnl.Link) bool {
	if beingMade(l) || beingRemoved(l) || !hasMark(l) {
		return true
	}
	_, id, ok := parseAlias(l.Alias)
	return ok && labelled(l, id) && l.Up && l.Forwarding && l.RPFilter == rtnl.LooseRPFilter && soundIPv6(l)
}

// soundIPv6 says whether the parameters of IPv6 are as they should be.
func soundIPv6(l rtnl.Link) bool {
	return !l.HasIPv6 || !l.DisableIPv6 && l.ForwardingIPv6 && l.AcceptRA == 0
}

// hasMark says whether a link may be the host's end of a pod's.
func hasMark(l rtnl.Link) bool {
	_, _, ok := parseAlias(l.Alias)
	return ok || dataplane.OfPods(l.Group) || slices.ContainsFunc(l.AltNames, isAltName)
}

// labelled says whether a link has the group and the alternative name of an attachment; links
// of Coil 2.x have the alias only.
func labelled(l rtnl.Link, id attachment.ID) bool {
	return dataplane.OfPods(l.Group) && slices.Contains(l.AltNames, altName(id))
}

// Label gives the link of an attachment that Coil 2.x made the group and the alternative
// name by which others are found. Packets notice nothing.
func (n *Network) Label(ctx context.Context, f Found) error {
	l, err := n.find(ctx, f.ID, f.HostIfIndex)
	if err == nil {
		p := Wired{Pod: Pod{ID: f.ID}}
		p.learn(l)
		err = n.relabel(ctx, p, l, rtnl.LinkChange{})
	}
	if err != nil {
		return fmt.Errorf("label %s: %w", f, err)
	}
	return nil
}

// unlearn removes from the host the objects that pods made by router advertisements, as of a time when their
// links accepted them, and counts them: default routers, prefixes on the link and addresses. links
// are the host's veths, addrs all its addresses.
func (n *Network) unlearn(ctx context.Context, links []rtnl.Link, addrs []rtnl.Addr) (int, error) {
	pods := map[int]bool{}
	for _, l := range links {
		pods[l.Index] = ours(l)
	}
	var reqs []rtnl.Request
	own := map[rtnl.Addr]bool{}
	for _, a := range addrs {
		if !pods[a.Link] || !a.Prefix.Addr().Is6() {
			continue
		}
		if a.Dynamic {
			reqs = append(reqs, rtnl.DelAddr(a.Link, a.Prefix))
		} else {
			own[rtnl.Addr{Link: a.Link, Prefix: a.Prefix.Masked()}] = true
		}
	}
	for _, protocol := range []int{unix.RTPROT_RA, unix.RTPROT_KERNEL} {
		routes, err := n.handle.Routes(ctx, dataplane.IPv6, unix.RT_TABLE_MAIN, protocol)
		if err != nil {
			return 0, err
		}
		for _, r := range routes {
			if !pods[r.Link] || protocol == unix.RTPROT_KERNEL && (linkLocalRoute(r.Dst) || own[rtnl.Addr{Link: r.Link, Prefix: r.Dst}]) {
				continue
			}
			reqs = append(reqs, rtnl.DelFoundRoute(r))
		}
	}
	return n.handle.Apply(ctx, rtnl.ErrNotExist, reqs...)
}

// linkLocalRoute says whether a route is that of link-local addresses, which each link may have.
func linkLocalRoute(dst netip.Prefix) bool {
	return dst.Bits() >= 10 && dst.Addr().IsLinkLocalUnicast()
}

// Owns says whether the link of an index is the host's end of a pod's.
func (n *Network) Owns(ctx context.Context, index int) (bool, error) {
	l, err := n.handle.LinkByIndex(ctx, index)
	if errors.Is(err, rtnl.ErrNotExist) {
		return false, nil
	}
	return ours(l), err
}

// ours says whether a link is, or was until its removal began, the host's end of a pod's.
func ours(l rtnl.Link) bool { return hasMark(l) || beingRemoved(l) }
