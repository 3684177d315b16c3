package podnet

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
)

// Attach makes the link between pod and host, unless it is prepared, and everything
// that is on it:
//
//	pod    eth0      the pod's addresses, /32 and /128
//	                 IPv6: the link-local address of its MAC address
//	                 routes: 169.254.1.1 dev eth0, default via 169.254.1.1,
//	                 default via fe80::1
//	host   vethX     169.254.1.1/32, fe80::1/64, alias, altname, group
//	                 forwarding on, rp_filter loose, arp_filter on, no router
//	                 advertisements
//	                 routes to the pod's addresses in the pod table
//
// The pod's end is up and complete before the host's end gives it a carrier, so that the kernel
// makes no address of its own and nothing is tentative. It notices the carrier in the
// background, a fraction of a millisecond later, long before anything runs in the pod. On an
// error, nothing is left behind, nor of the prepared link. Remains of an earlier, unfinished
// Attach of the same container are removed first; a foreign link that is in the way is an error
// that names it. netns.ErrNotExist when the pod is gone.
func (n *Network) Attach(ctx context.Context, p Pod, prepared *Link) (Attachment, error) {
	a, err := n.attach(ctx, p, prepared)
	if err != nil {
		return Attachment{}, fmt.Errorf("attach %s: %w", p.Key(), err)
	}
	return a, nil
}

func (n *Network) attach(ctx context.Context, p Pod, prepared *Link) (Attachment, error) {
	if prepared != nil {
		defer prepared.end()
	}
	if err := n.validate(p); err != nil {
		if prepared != nil {
			err = errors.Join(err, prepared.undo(context.WithoutCancel(ctx), prepared.veth))
		}
		return Attachment{}, err
	}
	if prepared != nil {
		prepared.pod = p
		a, err := prepared.wire(ctx, prepared.veth)
		if err == nil || ctx.Err() != nil {
			return a, err
		}
		// Most faults are mended below.
	}
	w, err := n.begin(p)
	if err != nil {
		return Attachment{}, err
	}
	defer w.end()
	a, err := w.make(ctx)
	if errors.Is(err, rtnl.ErrNoFamily) && p.Address.IPv6.IsValid() {
		w.enableIPv6 = true
		a, err = w.make(ctx)
	}
	if errors.Is(err, rtnl.ErrExist) {
		if err = w.clear(ctx, err); err == nil {
			a, err = w.make(ctx)
		}
	}
	return a, err
}

// validate returns an error if this host can't attach a pod.
func (n *Network) validate(p Pod) error {
	if err := p.validate(); err != nil {
		return err
	}
	if !p.Address.IPv6.IsValid() {
		return nil
	}
	if !n.ipv6 {
		return errors.New("the node's kernel has IPv6 switched off")
	}
	if mtu := n.mtuOf(p); mtu < minIPv6MTU {
		return fmt.Errorf("MTU %d is too small", mtu)
	}
	return nil
}

// begin opens the pod's network namespace; end closes it.
func (n *Network) begin(p Pod) (w wiring, err error) {
	ns, err := netns.Open(p.Netns)
	if err != nil {
		return w, err
	}
	defer func() {
		if err != nil {
			ns.Close()
		}
	}()
	if ns.Inode() == n.host.Inode() {
		return w, fmt.Errorf("%s is the host's own network namespace", ns)
	}
	inside, err := rtnl.NewOfPod(ns)
	if err != nil {
		return w, err
	}
	return wiring{Network: n, pod: p, ns: ns, inside: inside}, nil
}

func (w wiring) end() {
	w.inside.Close()
	w.ns.Close()
}

// wiring is one Attach.
type wiring struct {
	*Network
	pod    Pod
	ns     *netns.NS
	inside *rtnl.Handle
	// enableIPv6 switches IPv6 on for both ends, since one of the namespaces has it
	// switched off by default.
	enableIPv6 bool
}

// make makes everything, or nothing.
func (w wiring) make(ctx context.Context) (Attachment, error) {
	veth, err := w.link(ctx)
	if err != nil {
		return Attachment{}, err
	}
	return w.wire(ctx, veth)
}

// link makes the link and nothing on it, or nothing.
func (w wiring) link(ctx context.Context) (rtnl.Veth, error) {
	veth := rtnl.Veth{
		Name:      w.pod.IfName,
		MAC:       randomMAC(),
		Up:        true,
		PeerName:  linkName(w.pod.ID),
		PeerMAC:   randomMAC(),
		PeerGroup: dataplane.LinkGroup,
		PeerNetns: w.host.Fd(),
		MTU:       w.mtuOf(w.pod),
	}
	err := w.inside.Do(ctx, rtnl.AddVeth(veth))
	if refused := (*rtnl.Error)(nil); err != nil && !errors.As(err, &refused) {
		// Whether it was made is unknown.
		err = errors.Join(err, w.undo(context.WithoutCancel(ctx), veth))
	}
	if err != nil {
		return rtnl.Veth{}, err
	}
	faultpoint.At(faultpoint.AddVeth)
	return veth, nil
}

// wire completes a link, or removes it.
func (w wiring) wire(ctx context.Context, veth rtnl.Veth) (a Attachment, err error) {
	committed := false
	defer func() {
		if !committed {
			err = errors.Join(err, w.undo(context.WithoutCancel(ctx), veth))
		}
	}()
	if err := w.wirePod(ctx, veth.MAC); err != nil {
		return Attachment{}, err
	}
	faultpoint.At(faultpoint.AddPodWired)
	index, err := w.handle.IndexByName(veth.PeerName)
	if err != nil {
		return Attachment{}, err
	}
	if err := w.wireHost(ctx, index); err != nil {
		return Attachment{}, err
	}
	faultpoint.At(faultpoint.AddHostWired)
	committed = true
	return Attachment{
		HostIfName:  w.hostName(),
		HostIfIndex: index,
		NetnsInode:  w.ns.Inode(),
		HostMAC:     veth.PeerMAC.String(),
		PodMAC:      veth.MAC.String(),
	}, nil
}

// undo removes the link that link made. The kernel removes addresses and routes with it.
func (w wiring) undo(ctx context.Context, veth rtnl.Veth) error {
	l, err := w.inside.LinkByName(ctx, veth.Name)
	if err == nil && l.MAC.String() == veth.MAC.String() {
		err = w.inside.Do(ctx, rtnl.DelLink(l.Index))
	}
	if err != nil && !errors.Is(err, rtnl.ErrNotExist) {
		return fmt.Errorf("undo: %w", err)
	}
	return nil
}

// wirePod sets up the pod's end, which is up but has no carrier yet.
func (w wiring) wirePod(ctx context.Context, mac net.HardwareAddr) error {
	index, err := w.inside.IndexByName(w.pod.IfName)
	if err != nil {
		return err
	}
	addr := w.pod.Address
	var reqs []rtnl.Request
	if w.ipv6 && (w.inherits || !addr.IPv6.IsValid()) {
		reqs = append(reqs, rtnl.SetLink(index, rtnl.LinkChange{NoAutoAddress: true}))
	}
	if addr.IPv6.IsValid() {
		if err := w.setIPv6(w.ns, w.pod.IfName); err != nil {
			return err
		}
		// The kernel would make this very address when the carrier comes, and finds
		// it there. It would make another one only in a namespace that was created
		// with parameters which aren't the defaults.
		reqs = append(reqs, rtnl.AddAddr(index, netip.PrefixFrom(linkLocal(mac), 64), dataplane.LinkScope))
	}
	for _, a := range addr.Addrs() {
		reqs = append(reqs, rtnl.AddAddr(index, single(a), dataplane.Universe))
	}
	reqs = append(reqs, rtnl.Requests(podRoutes(gatewaysFor(addr), index), rtnl.AddRoute)...)
	return w.inside.Do(ctx, reqs...)
}

// podRoutes are the routes in a pod to its gateways and by them.
func podRoutes(gw ipam.Address, index int) []dataplane.Route {
	route := dataplane.Route{Table: unix.RT_TABLE_MAIN, Protocol: unix.RTPROT_BOOT, Link: index}
	var routes []dataplane.Route
	if gw.IPv4.IsValid() {
		onLink, byDefault := route, route
		onLink.Dst, onLink.Scope = single(gw.IPv4), dataplane.LinkScope
		byDefault.Dst, byDefault.Gateway = netip.PrefixFrom(netip.IPv4Unspecified(), 0), gw.IPv4
		routes = append(routes, onLink, byDefault)
	}
	if gw.IPv6.IsValid() {
		route.Dst, route.Gateway = netip.PrefixFrom(netip.IPv6Unspecified(), 0), gw.IPv6
		routes = append(routes, route)
	}
	return routes
}

// wireHost labels the host's end, brings it up, and routes to the pod.
func (w wiring) wireHost(ctx context.Context, index int) error {
	label := rtnl.LinkChange{
		Alias: w.pod.alias(), NoAutoAddress: w.ipv6, Forwarding: true,
		// The host's own value counts only if it is greater: so this is the one in effect.
		RPFilter: rtnl.LooseRPFilter,
		// A pod that sends from addresses of other links asks in their names, too. Other requests in the name
		// of others get no answer, and so no entry in the table of neighbours that all of the node shares.
		ARPFilter: new(w.opts.guards(w.pod)),
	}
	if w.pod.Unguarded {
		label.Group = w.pod.group() // it was made when that wasn't known
	}
	addr := w.pod.Address
	if w.ipv6 {
		// No other parameter keeps a pod from being the node's router: a link that doesn't forward, for
		// whatever reason, accepts advertisements by default. Netlink can't set it.
		err := w.setIPv6(w.host, linkName(w.pod.ID))
		// Below IPv6's least MTU, a link has no IPv6.
		if err != nil && (addr.IPv6.IsValid() || !errors.Is(err, sysctl.ErrNotExist)) {
			return err
		}
	}
	if name := w.hostName(); name != linkName(w.pod.ID) {
		label.Name = name
	}
	reqs := []rtnl.Request{
		// First the name by which the link is found, whatever happens next.
		rtnl.AddAltName(index, altName(w.pod.ID)),
		rtnl.SetLink(index, label),
		// The kernel makes no IPv6 address now, since the label came before.
		rtnl.SetLink(index, rtnl.LinkChange{Up: true}),
	}
	for _, gw := range gatewaysFor(addr).Addrs() {
		reqs = append(reqs, rtnl.AddAddr(index, gatewayPrefix(gw), dataplane.LinkScope))
	}
	first := len(reqs)
	routes := w.hostRoutes(addr, w.pod.NodeAddrs, index)
	results := w.handle.Each(ctx, append(reqs, rtnl.Requests(routes, rtnl.AddRoute)...)...)
	// A source that isn't an address of the host is invalid, and is then left out.
	for i, r := range routes {
		if r.Source.IsValid() && errors.Is(results[first+i], rtnl.ErrInvalid) {
			r.Source = netip.Addr{}
			results[first+i] = w.handle.Do(ctx, rtnl.AddRoute(r))
		}
	}
	return errors.Join(results...)
}

// hostRoutes are the routes to a pod in the pod table.
func (n *Network) hostRoutes(addr, source ipam.Address, index int) []dataplane.Route {
	var routes []dataplane.Route
	for _, a := range addr.Addrs() {
		r := dataplane.Route{
			Table:    n.opts.PodTable,
			Dst:      single(a),
			Link:     index,
			Source:   source.IPv4,
			Scope:    dataplane.LinkScope,
			Protocol: n.opts.Protocol,
		}
		if a.Is6() {
			r.Source = source.IPv6
		}
		routes = append(routes, r.Canonical())
	}
	return routes
}

// setIPv6 makes an end accept no router advertisements, and switches IPv6 on if needed.
func (w wiring) setIPv6(ns *netns.NS, link string) error {
	settings := []sysctl.Setting{ipv6Setting(link, "accept_ra", "0")}
	if w.enableIPv6 {
		settings = append(settings, ipv6Setting(link, "disable_ipv6", "0"))
	}
	_, err := sysctl.Set(ns, settings...)
	return err
}

// ipv6Setting sets a parameter of IPv6 of a link, or of all links or the default of new ones.
func ipv6Setting(link, parameter, value string) sysctl.Setting {
	return sysctl.Setting{Key: "net/ipv6/conf/" + link + "/" + parameter, Value: value}
}

// hostName is the final name of the host's end.
func (w wiring) hostName() string {
	if w.opts.CompatCalico {
		return calicoName(w.pod.Namespace, w.pod.Name)
	}
	return linkName(w.pod.ID)
}

// clear makes room after make failed because an object exists, or returns the error with the name of that object.
func (w wiring) clear(ctx context.Context, failed error) error {
	stale, err := w.find(ctx, w.pod.ID, 0)
	if err == nil {
		return w.remove(ctx, stale)
	}
	if !errors.Is(err, rtnl.ErrNotExist) {
		return errors.Join(failed, err)
	}
	if w.opts.CompatCalico {
		moved, err := w.moveAside(ctx)
		if moved || err != nil {
			return err
		}
	}
	return w.nameObstacles(ctx, failed)
}

// moveAside frees the name that the host's end should get, if the link of another
// sandbox of the same pod has it: that sandbox may still be alive, so that its
// link isn't removed.
func (w wiring) moveAside(ctx context.Context) (bool, error) {
	l, err := w.handle.LinkByName(ctx, w.hostName())
	if errors.Is(err, rtnl.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	_, other, ok := parseAlias(l.Alias)
	if !ok || other == w.pod.ID {
		return false, nil
	}
	// Linux renames a link that is up since 6.2.
	if err := w.handle.Do(ctx, rtnl.SetLink(l.Index, rtnl.LinkChange{Name: linkName(other)})); err != nil {
		return false, fmt.Errorf("another sandbox of the pod has the link %s, until it is removed: %w", l, err)
	}
	return true, nil
}

// nameObstacles adds the names of the objects in the way to the error.
func (w wiring) nameObstacles(ctx context.Context, failed error) error {
	errs := []error{failed}
	say := func(where string, l rtnl.Link, err error) {
		if err == nil {
			errs = append(errs, fmt.Errorf("%s there is already %s", where, l))
		} else if !errors.Is(err, rtnl.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	l, err := w.inside.LinkByName(ctx, w.pod.IfName)
	say("in the pod", l, err)
	for _, name := range slices.Compact([]string{linkName(w.pod.ID), w.hostName()}) {
		l, err = w.handle.LinkByName(ctx, name)
		say("on the host", l, err)
	}
	l, err = w.handle.LinkByAltName(ctx, altName(w.pod.ID))
	say("on the host", l, err)
	for _, a := range w.pod.Address.Addrs() {
		r, err := w.handle.RouteTo(ctx, a, 0)
		if err == nil && r.Table == w.opts.PodTable {
			errs = append(errs, fmt.Errorf("on the host there is already route %s", r))
		}
	}
	return errors.Join(errs...)
}

// gatewaysFor returns the gateways of the families that an address has.
func gatewaysFor(addr ipam.Address) ipam.Address {
	var gw ipam.Address
	if addr.IPv4.IsValid() {
		gw.IPv4 = Gateways.IPv4
	}
	if addr.IPv6.IsValid() {
		gw.IPv6 = Gateways.IPv6
	}
	return gw
}

// single is the prefix of just one address.
func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// randomMAC returns a locally administered unicast address.
func randomMAC() net.HardwareAddr {
	mac := make(net.HardwareAddr, 6)
	rand.Read(mac) // never returns an error
	mac[0] = mac[0]&^0x01 | 0x02
	return mac
}

// linkLocal is the link-local address that the kernel makes of a MAC address
// (RFC 4291, appendix A).
func linkLocal(mac net.HardwareAddr) netip.Addr {
	return netip.AddrFrom16([16]byte{
		0: 0xfe, 1: 0x80,
		8: mac[0] ^ 0x02, 9: mac[1], 10: mac[2], 11: 0xff, 12: 0xfe, 13: mac[3], 14: mac[4], 15: mac[5],
	})
}
