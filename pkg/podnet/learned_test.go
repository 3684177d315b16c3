package podnet_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// Options of a router advertisement (RFC 4861, section 4.6.2).
const (
	onLink     = 0x80
	autonomous = 0x40
)

// advertise sends a router advertisement from a pod: that it is a default router for half an hour,
// and a prefix with flags if that is valid.
func advertise(t *testing.T, pod *netnstest.NS, prefix netip.Prefix, flags byte) {
	t.Helper()
	const routerAdvertisement, prefixInformation, forever = 134, 3, 1<<32 - 1
	ra := make([]byte, 16)
	ra[0], ra[4] = routerAdvertisement, 64
	binary.BigEndian.PutUint16(ra[6:], 1800)
	if prefix.IsValid() {
		ra = append(ra, prefixInformation, 4, byte(prefix.Bits()), flags)
		ra = binary.BigEndian.AppendUint32(ra, forever)
		ra = binary.BigEndian.AppendUint32(ra, forever)
		ra = append(ra, 0, 0, 0, 0)
		ra = append(ra, prefix.Addr().AsSlice()...)
	}
	testkit.Check(t, pod.Do(func() error {
		c, err := net.ListenPacket("ip6:ipv6-icmp", "::")
		if err != nil {
			return err
		}
		defer c.Close()
		eth0, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		p := ipv6.NewPacketConn(c)
		all := &net.IPAddr{IP: net.IPv6linklocalallnodes, Zone: "eth0"}
		if err := p.SetMulticastHopLimit(255); err != nil {
			return err
		}
		_, err = p.WriteTo(ra, &ipv6.ControlMessage{IfIndex: eth0.Index, HopLimit: 255}, all)
		return err
	}))
}

// hostOf is an address of the host that a pod reaches.
func hostOf(p podnet.Pod) netip.Addr {
	if p.Address.IPv6.IsValid() {
		return nodeAddrs.IPv6
	}
	return nodeAddrs.IPv4
}

// learned are the host's routes and addresses of a link that aren't link-local.
func learned(t *testing.T, n node, link string) (all []string) {
	t.Helper()
	out := n.host.IP(t, "-6", "route", "show", "dev", link) + "\n" + n.host.IP(t, "-6", "-o", "address", "show", "dev", link)
	for l := range strings.Lines(out) {
		if !strings.Contains(l, "fe80::") || strings.Contains(l, "via") {
			if l = strings.TrimSpace(l); l != "" {
				all = append(all, l)
			}
		}
	}
	return all
}

var (
	elsewhere = netip.MustParsePrefix("2001:db8::53/128")
	autoconf  = netip.MustParsePrefix("2001:db8:5::/64")
)

// Router advertisements of a pod say nothing to the host, whatever the host's parameters say.
func TestPodsAreNoRouters(t *testing.T) {
	off := func(key string) func(t *testing.T, n node) {
		return func(t *testing.T, n node) { setSysctl(t, n.host, "ipv6/conf/"+key, "0") }
	}
	for _, c := range []struct {
		name          string
		ipv4          bool
		before, after func(t *testing.T, n node)
	}{
		{name: "forwarding off", after: off("all/forwarding")},
		{name: "forwarding off for new links", before: off("default/forwarding")},
		{name: "forwarding off for new links, pod of IPv4", ipv4: true, before: off("default/forwarding")},
		{name: "advertisements always accepted", before: func(t *testing.T, n node) { setSysctl(t, n.host, "ipv6/conf/default/accept_ra", "2") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			if c.before != nil {
				c.before(t, n)
			}
			p, pod := newPod(t, 1, c.ipv4, !c.ipv4)
			a := n.mustAttach(t, p)
			if c.ipv4 {
				pod.IP(t, "address", "add", "fe80::99/64", "dev", "eth0", "nodad")
			}
			if c.after != nil {
				c.after(t, n)
			}
			advertise(t, pod, netip.Prefix{}, 0)
			advertise(t, pod, elsewhere, onLink)
			advertise(t, pod, autoconf, onLink|autonomous)
			mustPing(t, pod, hostOf(p)) // what was sent before has arrived
			if got := learned(t, n, a.HostIfName); len(got) > 0 {
				t.Errorf("learned %q", got)
			}
		})
	}
}

// Routes and addresses that pods taught the host while their links accepted advertisements, as those of earlier
// versions do, are removed, though forwarding is restored first; and nothing of others is.
func TestMendLinksUnlearns(t *testing.T) {
	n := newNode(t)
	p, pod := newPod(t, 1, false, true)
	a := n.mustAttach(t, p)
	own := "2001:db8:1::1/128" // as Coil 2.x gives the host's end the node's address
	n.host.IP(t, "address", "add", own, "dev", a.HostIfName, "nodad")
	// The uplink gets no other address: it would come a second later, when it was detected to be no duplicate.
	for _, end := range []string{"uplink", "uplink-peer"} {
		n.host.IP(t, "link", "set", end, "addrgenmode", "none", "up")
	}
	n.host.IP(t, "-6", "route", "add", "default", "via", "2001:db8::ffff", "dev", "uplink", "proto", "ra", "metric", "2000")
	before := lines(state(t, n.host))
	setSysctl(t, n.host, "ipv6/conf/all/forwarding", "0")
	setSysctl(t, n.host, "ipv6/conf/"+a.HostIfName+"/accept_ra", "1")
	advertise(t, pod, netip.Prefix{}, 0)
	advertise(t, pod, elsewhere, onLink)
	advertise(t, pod, autoconf, onLink|autonomous)
	mustPing(t, pod, hostOf(p)) // what was sent before has arrived
	taught := learned(t, n, a.HostIfName)
	for _, want := range []string{"default via fe80::", "2001:db8::53 ", "2001:db8:5::/64 ", "inet6 2001:db8:5:"} {
		if !strings.Contains(strings.Join(taught, "\n"), want) {
			t.Fatalf("control: the link accepts advertisements, and %q isn't in %q", want, taught)
		}
	}
	if _, err := n.Forward(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := sysctlOf(t, n.host, "ipv6/conf/"+a.HostIfName+"/accept_ra"); got == "2" {
		t.Error("Forward takes the pod for an uplink")
	}
	w := podnet.Wired{Pod: p, HostIfIndex: a.HostIfIndex, HostMAC: a.HostMAC}
	if m := mustMend(t, n, w); m.Learned == 0 || m.Parameters != 1 {
		t.Errorf("mended %+v", m)
	}
	testkit.Eventually(t, 5*time.Second, "the host is as before", func() error {
		if diff := diffLines(before, lines(state(t, n.host))); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
	if m := mustMend(t, n, w); m != (podnet.Mended{}) {
		t.Errorf("mended %+v again", m)
	}
}

// diffLines compares what is there, whatever remains of lifetimes.
func diffLines(before, after []string) string {
	for _, l := range after {
		if strings.Contains(l, "2001:db8:5:") || strings.Contains(l, "2001:db8::53") || strings.Contains(l, "proto ra") && !strings.Contains(l, "uplink") {
			return "left: " + l
		}
	}
	if len(before) != len(after) {
		return fmt.Sprintf("%d lines, not %d:\n%s", len(after), len(before), strings.Join(after, "\n"))
	}
	return ""
}

// ARP requests of a pod in the name of others leave nothing in the node's table of neighbours.
func TestForgedARP(t *testing.T) {
	const forged = 50
	n := newNode(t)
	n.host.IP(t, "link", "set", "uplink-peer", "up")
	n.host.IP(t, "route", "add", "default", "via", "192.0.2.254", "dev", "uplink")
	p, pod := newPod(t, 1, true, false)
	a := n.mustAttach(t, p)
	entries := func() int {
		forgeARP(t, pod, forged)
		mustPing(t, pod, nodeAddrs.IPv4)
		return strings.Count(n.host.IP(t, "neighbor", "show", "dev", a.HostIfName), "203.0.113.")
	}
	if got := entries(); got > 0 {
		t.Errorf("%d forged senders have an entry", got)
	}
	mustPing(t, n.host, p.Address.IPv4)
	setSysctl(t, n.host, "ipv4/conf/"+a.HostIfName+"/arp_filter", "0")
	if got := entries(); got != forged {
		t.Errorf("control: without arp_filter, %d of %d forged senders have an entry", got, forged)
	}
	if m := mustMend(t, n, podnet.Wired{Pod: p, HostIfIndex: a.HostIfIndex, HostMAC: a.HostMAC}); m != (podnet.Mended{Parameters: 1}) {
		t.Errorf("mended %+v", m)
	}
}

// forgeARP asks for the gateway's MAC address in the name of addresses that are nobody's.
func forgeARP(t *testing.T, pod *netnstest.NS, count int) {
	t.Helper()
	bigEndian := func(v uint16) uint16 { return v<<8 | v>>8 }
	testkit.Check(t, pod.Do(func() error {
		eth0, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM, int(bigEndian(unix.ETH_P_ARP)))
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		to := &unix.SockaddrLinklayer{
			Protocol: bigEndian(unix.ETH_P_ARP), Ifindex: eth0.Index, Halen: 6, Addr: [8]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff},
		}
		for i := range count {
			request := append([]byte{0, 1, 8, 0, 6, 4, 0, 1}, eth0.HardwareAddr...)
			request = append(request, 203, 0, 113, byte(i+1), 0, 0, 0, 0, 0, 0)
			if err := unix.Sendto(fd, append(request, podnet.Gateways.IPv4.AsSlice()...), 0, to); err != nil {
				return err
			}
		}
		return nil
	}))
}

// Routes of IPv6 that can't be read keep nobody from forwarding IPv4.
func TestForwardWithoutRoutesOfIPv6(t *testing.T) {
	n := newNode(t)
	setSysctl(t, n.host, "ipv4/ip_forward", "0")
	setSysctl(t, n.host, "ipv6/conf/all/forwarding", "0")
	broken := errors.New("no buffer space")
	r := recorder{fail: func(int, string) error { return broken }}
	changed, err := n.Forward(r.context(t.Context()))
	if !changed || !errors.Is(err, broken) {
		t.Errorf("changed %t, %v", changed, err)
	}
	if got := sysctlOf(t, n.host, "ipv4/ip_forward"); got != "1" {
		t.Errorf("ip_forward is %s", got)
	}
	// It could forget routes that uplinks need.
	if got := sysctlOf(t, n.host, "ipv6/conf/all/forwarding"); got != "0" {
		t.Errorf("forwarding of IPv6 is %s", got)
	}
	setSysctl(t, n.host, "ipv6/conf/all/forwarding", "1")
	setSysctl(t, n.host, "ipv6/conf/default/forwarding", "0")
	if changed, err := n.Forward(t.Context()); err != nil || !changed {
		t.Errorf("changed %t, %v", changed, err)
	}
	if got := sysctlOf(t, n.host, "ipv6/conf/default/forwarding"); got != "1" {
		t.Errorf("forwarding of new links is %s", got)
	}
}
