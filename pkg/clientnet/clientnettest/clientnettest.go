// Package clientnettest makes a pod for tests of what Coil has in the network namespace of a client: one with veths in
// place of tunnels, for which this machine's kernel may have no module.
//
// It must not know what is tested.
package clientnettest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// Links are veths in place of tunnels: they implement clientnet.Tunnels.
type Links struct {
	// Broken are the peers to which no tunnel can be made.
	Broken map[netip.Addr]bool
	// Sinking, if not nil, is called when a sink is asked for.
	Sinking func()
	// Leaky lets no sink be made.
	Leaky bool

	tb testing.TB
	ns *netnstest.NS
}

// Make implements clientnet.Tunnels.
func (s *Links) Make(ctx context.Context, _ *netns.NS, h *rtnl.Handle, _ uint16, want []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, dataplane.Result, error) {
	links := map[netip.Addr]dataplane.TunnelLink{}
	var result dataplane.Result
	var errs []error
	for _, w := range want {
		if s.Broken[w.Remote] {
			errs = append(errs, fmt.Errorf("tunnel %s is broken", w))
			continue
		}
		name := dataplane.TunnelName(w.Remote, 0)
		if _, err := h.IndexByName(name); err != nil {
			s.ns.IP(s.tb, "link", "add", name, "type", "veth", "peer", "name", "x"+name[4:])
			s.ns.IP(s.tb, "link", "set", "x"+name[4:], "up")
			s.ns.IP(s.tb, "link", "set", name, "up", "addrgenmode", "none")
			result.Added++
		}
		index, err := h.IndexByName(name)
		errs = append(errs, err)
		links[w.Remote] = dataplane.TunnelLink{Index: index, Name: name}
	}
	if _, err := s.MakeSinks(ctx, h, 0, client.FamiliesOf(want)...); err != nil {
		errs = append(errs, err)
	}
	return links, result, errors.Join(errs...)
}

// SinkNames are the names of FoU's sinks.
var SinkNames = map[dataplane.Family]string{dataplane.IPv4: dataplane.ReceiverIPv4, dataplane.IPv6: dataplane.ReceiverIPv6}

// MakeSinks implements clientnet.Tunnels: at their other ends nobody takes anything.
func (s *Links) MakeSinks(ctx context.Context, h *rtnl.Handle, mtu int, families ...dataplane.Family) (map[dataplane.Family]int, error) {
	sinks := map[dataplane.Family]int{}
	for _, f := range families {
		if s.Leaky {
			return sinks, errors.New("no sink")
		}
		name := SinkNames[f]
		if _, err := h.IndexByName(name); err != nil {
			s.ns.IP(s.tb, "link", "add", name, "type", "veth", "peer", "name", "x"+name)
		}
		l, err := h.LinkByName(ctx, name)
		if err != nil {
			return sinks, err
		}
		if !l.Up {
			for _, end := range []string{"x" + name, name} {
				s.ns.IP(s.tb, "link", "set", end, "addrgenmode", "none", "arp", "off", "up")
			}
		}
		if mtu != 0 {
			s.ns.IP(s.tb, "link", "set", name, "mtu", fmt.Sprint(mtu))
		}
		sinks[f] = l.Index
	}
	return sinks, nil
}

// Sink implements clientnet.Tunnels.
func (s *Links) Sink(ctx context.Context, h *rtnl.Handle, f dataplane.Family) (int, error) {
	if s.Sinking != nil {
		s.Sinking()
	}
	l, err := h.LinkByName(ctx, SinkNames[f])
	return l.Index, err
}

// Prune implements clientnet.Tunnels.
func (s *Links) Prune(ctx context.Context, _ *netns.NS, h *rtnl.Handle, _ uint16, keep []dataplane.Tunnel, sinks ...dataplane.Family) (dataplane.Result, error) {
	var result dataplane.Result
	veths, err := h.Veths(ctx)
	for _, l := range veths {
		for f, name := range SinkNames {
			if l.Name == name && len(keep) == 0 && !slices.Contains(sinks, f) {
				err = errors.Join(err, h.Do(ctx, rtnl.DelLink(l.Index)))
			}
		}
		kept := slices.ContainsFunc(keep, func(k dataplane.Tunnel) bool { return dataplane.TunnelName(k.Remote, 0) == l.Name })
		if (strings.HasPrefix(l.Name, "fou4_") || strings.HasPrefix(l.Name, "fou6_")) && !kept {
			result.Deleted++
			err = errors.Join(err, h.Do(ctx, rtnl.DelLink(l.Index)))
		}
	}
	return result, err
}

// Check implements clientnet.Tunnels.
func (s *Links) Check(ctx context.Context, _ *netns.NS, h *rtnl.Handle, _ uint16, want []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, error) {
	links := map[netip.Addr]dataplane.TunnelLink{}
	var errs []error
	for _, w := range want {
		l, err := h.LinkByName(ctx, dataplane.TunnelName(w.Remote, 0))
		errs = append(errs, err)
		if err == nil {
			links[w.Remote] = dataplane.TunnelLink{Index: l.Index, Name: l.Name}
		}
	}
	return links, errors.Join(errs...)
}

// Pod is a pod with a link, eth0, by which everything is reached.
type Pod struct {
	T *testing.T
	// NS is its network namespace, and Handle changes it.
	NS     *netnstest.NS
	Handle *rtnl.Handle
	Links  *Links
	// Eth0 is the index of its link.
	Eth0 int
	// Client is the pod as a client that uses no Egress.
	Client client.Client
}

// NewPod returns a pod that is gone when the test is over. Its link's other end is in its own namespace; see Outside.
func NewPod(t *testing.T) *Pod {
	ns := netnstest.New(t)
	for _, args := range []string{
		"link add eth0 type veth peer name outside", "link set eth0 mtu 1400", "link set outside up", "link set eth0 up",
		"addr add 10.1.0.5/32 dev eth0", "addr add fd01::5/128 dev eth0 nodad",
		"route add 169.254.1.1 dev eth0", "route add default via 169.254.1.1 dev eth0", "-6 route add default dev eth0",
	} {
		ns.IP(t, strings.Fields(args)...)
	}
	h, err := rtnl.New(ns.NS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	p := &Pod{T: t, NS: ns, Handle: h, Links: &Links{Broken: map[netip.Addr]bool{}, tb: t, ns: ns}}
	if p.Eth0, err = h.IndexByName("eth0"); err != nil {
		t.Fatal(err)
	}
	p.Client = client.Client{
		Address: ipam.Address{IPv4: netip.MustParseAddr("10.1.0.5"), IPv6: netip.MustParseAddr("fd01::5")},
		Link:    "eth0", Port: 5555, Protocol: dataplane.ProtocolNode,
	}
	return p
}

// At is where the pod is.
func (p *Pod) At() store.Netns { return store.Netns{Path: p.NS.Path, Inode: p.NS.Inode()} }

// Way is where a packet to an address goes: "eth0", "tunnel", "nowhere".
func (p *Pod) Way(dst string) string {
	p.T.Helper()
	out, err := p.NS.Run("ip", "route", "get", dst)
	switch {
	case err != nil && (strings.Contains(err.Error(), "No route to host") || strings.Contains(err.Error(), "unreachable")):
		return "nowhere"
	case err != nil:
		p.T.Fatal(err)
	case strings.Contains(out, "unreachable"):
		return "nowhere"
	case strings.Contains(out, "dev eth0"):
		return "eth0"
	case strings.Contains(out, "dev fou"):
		for _, own := range p.Client.Address.Addrs() {
			if strings.Contains(out, "src "+own.String()) {
				return "tunnel"
			}
		}
	}
	p.T.Fatalf("route to %s: %s", dst, out)
	return ""
}

// Escapes says whether a packet to an address leaves by eth0.
func (p *Pod) Escapes(dst string) bool {
	p.T.Helper()
	r, err := p.Handle.RouteTo(p.T.Context(), netip.MustParseAddr(dst), 0)
	if err != nil && !errors.Is(err, rtnl.ErrNotExist) {
		p.T.Fatal(err)
	}
	return err == nil && r.Link == p.Eth0
}

// WantWays wants that packets to some addresses go these ways; see Way.
func (p *Pod) WantWays(ways map[string]string) {
	p.T.Helper()
	for dst, want := range ways {
		if got := p.Way(dst); got != want {
			p.T.Errorf("%s goes by %s, want %s", dst, got, want)
		}
	}
}

// Outside moves the other end of the pod's link into a namespace of its own, which has some addresses, and which answers
// each question of ARP, as behind Calico (proxy_arp).
func (p *Pod) Outside(addrs ...string) *netnstest.NS {
	p.T.Helper()
	out := netnstest.New(p.T)
	p.NS.IP(p.T, "link", "set", "outside", "netns", out.Path)
	for _, args := range []string{"link set outside addrgenmode none", "link set lo up", "link set outside up", "addr add 169.254.1.1/32 dev outside", "addr add fe80::1/64 dev outside nodad",
		"route add 10.1.0.5 dev outside", "-6 route add fd01::5 dev outside"} {
		out.IP(p.T, strings.Fields(args)...)
	}
	testkit.Must(out.Run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.conf.outside.proxy_arp=1", "net.ipv4.neigh.outside.proxy_delay=0",
		"net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.outside.rp_filter=0"))(p.T)
	for _, a := range addrs {
		out.IP(p.T, "addr", "add", a, "dev", "lo", "nodad") // no socket is bound to an address that is tentative
	}
	for _, args := range []string{"link set lo up", "link set eth0 up", "route replace 169.254.1.1 dev eth0", "route replace default via 169.254.1.1 dev eth0", "-6 route replace default via fe80::1 dev eth0"} {
		p.NS.IP(p.T, strings.Fields(args)...)
	}
	return out
}

// Gateway returns an Egress whose Service has addresses that end in peer, or none if peer is 0.
func Gateway(name string, peer int, destinations ...string) client.Egress {
	e := client.Egress{Name: name}
	for _, d := range destinations {
		e.Destinations = append(e.Destinations, netip.MustParsePrefix(d))
	}
	if peer > 0 {
		e.Peers = ipam.Address{
			IPv4: netip.AddrFrom4([4]byte{10, 96, 0, byte(peer)}), IPv6: netip.MustParseAddr(fmt.Sprintf("fd96::%d", peer)),
		}
	}
	return e
}
