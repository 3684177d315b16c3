package podnet_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

func mustMend(t *testing.T, n node, pods ...podnet.Wired) podnet.Mended {
	t.Helper()
	m, err := n.MendLinks(t.Context(), wired(pods...))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// sysctlOf reads a parameter.
func sysctlOf(t *testing.T, ns *netnstest.NS, key string) string {
	t.Helper()
	out, err := ns.Run("cat", "/proc/sys/net/"+key)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func setSysctl(t *testing.T, ns *netnstest.NS, key, value string) {
	t.Helper()
	if _, err := ns.Run("sh", "-c", "echo "+value+" > /proc/sys/net/"+key); err != nil {
		t.Fatal(err)
	}
}

// Whatever others take from the host's end of a link comes back, and nothing else changes.
func TestMendLinks(t *testing.T) {
	n := newNode(t)
	p, pod := newPod(t, 1, true, true)
	a := n.mustAttach(t, p)
	w := podnet.Wired{Pod: p, HostIfIndex: a.HostIfIndex, HostMAC: a.HostMAC}
	if m := mustMend(t, n, w); m != (podnet.Mended{}) {
		t.Fatalf("mended %+v right after the pod was attached", m)
	}
	other, _ := newPod(t, 2, true, true)
	b := n.mustAttach(t, other)
	v := podnet.Wired{Pod: other, HostIfIndex: b.HostIfIndex, HostMAC: b.HostMAC}
	before := state(t, n.host)
	conf := func(family, key string) string { return family + "/conf/" + a.HostIfName + "/" + key }
	index := fmt.Sprint(a.HostIfIndex)
	for _, c := range []struct {
		name  string
		spoil func()
		want  podnet.Mended
		// silent changes don't make the link unsound.
		silent bool
		lost   []netip.Addr
	}{
		{"alias", func() { n.host.IP(t, "link", "set", a.HostIfName, "alias", "") }, podnet.Mended{Links: 1}, false, nil},
		{"alias of another program", func() { n.host.IP(t, "link", "set", a.HostIfName, "alias", "mine") }, podnet.Mended{Links: 1}, false, nil},
		{"group", func() { n.host.IP(t, "link", "set", a.HostIfName, "group", "default") }, podnet.Mended{Links: 1}, false, nil},
		{"alternative name", func() {
			n.host.IP(t, "link", "property", "del", "dev", a.HostIfName, "altname", "coil-"+p.ContainerID+"-eth0")
		}, podnet.Mended{Links: 1}, false, nil},
		{"all marks but the name", func() {
			n.host.IP(t, "link", "property", "del", "dev", a.HostIfName, "altname", "coil-"+p.ContainerID+"-eth0")
			n.host.IP(t, "link", "set", a.HostIfName, "alias", "")
			n.host.IP(t, "link", "set", a.HostIfName, "group", "default")
		}, podnet.Mended{Links: 1}, true, nil},
		{"MAC address", func() { n.host.IP(t, "link", "set", a.HostIfName, "address", "02:00:00:00:00:99") }, podnet.Mended{Links: 1}, true, nil},
		{"down", func() { n.host.IP(t, "link", "set", a.HostIfName, "down") }, podnet.Mended{Links: 1, Addresses: 1}, false, nil},
		{"IPv4 gateway", func() { n.host.IP(t, "address", "del", "169.254.1.1/32", "dev", a.HostIfName) },
			podnet.Mended{Addresses: 1}, false, []netip.Addr{podnet.Gateways.IPv4}},
		{"IPv6 gateway", func() { n.host.IP(t, "address", "del", "fe80::1/64", "dev", a.HostIfName) },
			podnet.Mended{Addresses: 1}, false, []netip.Addr{podnet.Gateways.IPv6}},
		{"all addresses", func() { n.host.IP(t, "address", "flush", "dev", a.HostIfName) },
			podnet.Mended{Addresses: 2}, false, []netip.Addr{podnet.Gateways.IPv6}},
		{"strict rp_filter", func() { setSysctl(t, n.host, conf("ipv4", "rp_filter"), "1") }, podnet.Mended{Parameters: 1}, false, nil},
		{"forwarding", func() { setSysctl(t, n.host, conf("ipv4", "forwarding"), "0") }, podnet.Mended{Parameters: 1}, false, nil},
		{"router advertisements", func() { setSysctl(t, n.host, conf("ipv6", "accept_ra"), "2") }, podnet.Mended{Parameters: 1}, false, nil},
		{"router advertisements unless it forwards", func() { setSysctl(t, n.host, conf("ipv6", "accept_ra"), "1") },
			podnet.Mended{Parameters: 1}, false, nil},
		{"forwarding of IPv6", func() { setSysctl(t, n.host, conf("ipv6", "forwarding"), "0") }, podnet.Mended{Parameters: 1}, false, nil},
		{"ARP filter", func() { setSysctl(t, n.host, conf("ipv4", "arp_filter"), "0") }, podnet.Mended{Parameters: 1}, true, nil},
		{"address generation", func() { n.host.IP(t, "link", "set", a.HostIfName, "addrgenmode", "eui64") },
			podnet.Mended{Parameters: 1}, true, nil},
		{"IPv6 switched off", func() { setSysctl(t, n.host, conf("ipv6", "disable_ipv6"), "1") },
			podnet.Mended{Parameters: 1, Addresses: 1}, false, []netip.Addr{podnet.Gateways.IPv6}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.spoil()
			sound, err := n.Sound(t.Context(), a.HostIfIndex, c.lost...)
			if err != nil || sound != c.silent {
				t.Errorf("index %s sound: %t, %v", index, sound, err)
			}
			if m := mustMend(t, n, w, v); m != c.want {
				t.Errorf("mended %+v, not %+v", m, c.want)
			}
			if m := mustMend(t, n, w, v); m != (podnet.Mended{}) {
				t.Errorf("mended %+v again", m)
			}
			if _, err := n.Sync(t.Context(), wired(w, v)); err != nil {
				t.Fatal(err)
			}
			settle(t, n.host, a.HostIfName, podnet.Gateways.IPv6, p)
			settle(t, pod, "eth0", p.Address.IPv6, p)
			if diff := cmp.Diff(lines(before), lines(state(t, n.host))); diff != "" {
				t.Errorf("not restored (-before +after):\n%s", diff)
			}
			if err := n.Check(t.Context(), p, a); err != nil {
				t.Error(err)
			}
			if sound, err := n.Sound(t.Context(), a.HostIfIndex); err != nil || !sound {
				t.Errorf("sound: %t, %v", sound, err)
			}
			for _, to := range p.Address.Addrs() {
				mustPing(t, n.host, to)
			}
		})
	}
	if got := sysctlOf(t, n.host, conf("ipv4", "rp_filter")); got != "2" {
		t.Errorf("rp_filter is %s", got)
	}
}

// A link at a recorded index that isn't the pod's, or is being removed, is left alone.
func TestMendLinksLeavesOthersAlone(t *testing.T) {
	n := newNode(t)
	p, _ := newPod(t, 1, true, true)
	a := n.mustAttach(t, p)
	other, _ := newPod(t, 2, true, true)
	b := n.mustAttach(t, other)
	n.host.IP(t, "link", "set", a.HostIfName, "group", fmt.Sprint(0x70000001))
	n.host.IP(t, "link", "set", a.HostIfName, "down")
	before := state(t, n.host)
	var index int
	if _, err := fmt.Sscan(strings.SplitN(n.host.IP(t, "-o", "link", "show", "uplink"), ":", 2)[0], &index); err != nil {
		t.Fatal(err)
	}
	m := mustMend(t, n,
		podnet.Wired{Pod: p, HostIfIndex: a.HostIfIndex},     // being removed
		podnet.Wired{Pod: p, HostIfIndex: b.HostIfIndex},     // another pod's
		podnet.Wired{Pod: p, HostIfIndex: index},             // not a pod's
		podnet.Wired{Pod: p, HostIfIndex: 99999},             // gone
		podnet.Wired{Pod: p},                                 // being attached
		podnet.Wired{Pod: other, HostIfIndex: b.HostIfIndex}, // all right
	)
	if m != (podnet.Mended{}) {
		t.Errorf("mended %+v", m)
	}
	if diff := cmp.Diff(before, state(t, n.host)); diff != "" {
		t.Errorf("changed (-before +after):\n%s", diff)
	}
	for _, i := range []int{a.HostIfIndex, index, 99999} {
		if sound, err := n.Sound(t.Context(), i, podnet.Gateways.IPv4); err != nil || !sound {
			t.Errorf("index %d sound: %t, %v", i, sound, err)
		}
	}
}

// The gateways of a pod that Coil 2.x wired are others, and it knows no others.
func TestMendLinksOfCoil2(t *testing.T) {
	n := newNode(t)
	p, _ := newPod(t, 1, true, true)
	a := n.mustAttach(t, p)
	n.host.IP(t, "address", "flush", "dev", a.HostIfName)
	n.host.IP(t, "link", "set", a.HostIfName, "addrgenmode", "eui64")
	n.host.IP(t, "address", "add", "192.0.2.1/32", "dev", a.HostIfName)
	before := state(t, n.host)
	if m := mustMend(t, n, podnet.Wired{Pod: p, HostIfIndex: a.HostIfIndex}); m != (podnet.Mended{}) {
		t.Errorf("mended %+v", m)
	}
	if diff := cmp.Diff(before, state(t, n.host)); diff != "" {
		t.Errorf("changed (-before +after):\n%s", diff)
	}
}

// A pod must not become the host's router, and its packets must arrive whatever the host
// says about all links.
func TestHostEndParameters(t *testing.T) {
	for _, filter := range []string{"0", "1", "2"} {
		t.Run("rp_filter "+filter, func(t *testing.T) {
			n := newNode(t, func(o *podnet.Options) { o.SourceGuard = false })
			setSysctl(t, n.host, "ipv4/conf/all/rp_filter", filter)
			setSysctl(t, n.host, "ipv4/conf/default/rp_filter", filter)
			setSysctl(t, n.host, "ipv6/conf/default/accept_ra", "2")
			if _, err := n.Forward(t.Context()); err != nil {
				t.Fatal(err)
			}
			p, pod := newPod(t, 1, true, true)
			a := n.mustAttach(t, p)
			if got := sysctlOf(t, n.host, "ipv4/conf/"+a.HostIfName+"/rp_filter"); got != "2" {
				t.Errorf("rp_filter is %s", got)
			}
			if got := sysctlOf(t, n.host, "ipv6/conf/"+a.HostIfName+"/accept_ra"); got != "0" {
				t.Errorf("accept_ra is %s", got)
			}
			// The answer to another link's address leaves by this one.
			pod.IP(t, "link", "add", "second", "type", "veth", "peer", "second-peer")
			pod.IP(t, "link", "set", "second", "up")
			pod.IP(t, "address", "add", "192.0.2.77/32", "dev", "second")
			arrives(t, pod, n.host, netip.MustParseAddrPort("192.0.2.77:0"), nodeAddrs.IPv4)
		})
	}
}

// arrives expects that a datagram from an address of one namespace reaches an address of
// another.
func arrives(t *testing.T, from, to *netnstest.NS, source netip.AddrPort, dst netip.Addr) {
	t.Helper()
	var receiver, sender *net.UDPConn
	if err := errors.Join(
		to.Do(func() (err error) {
			receiver, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(dst, 0)))
			return err
		}),
		from.Do(func() (err error) {
			sender, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(source))
			return err
		})); err != nil {
		t.Fatal(err)
	}
	defer receiver.Close()
	defer sender.Close()
	if _, err := sender.WriteTo([]byte("coil"), receiver.LocalAddr()); err != nil {
		t.Fatal(err)
	}
	if err := receiver.SetReadDeadline(time.Now().Add(testkit.Timeout(2 * time.Second))); err != nil {
		t.Fatal(err)
	}
	if _, got, err := receiver.ReadFromUDPAddrPort(make([]byte, 16)); err != nil || got.Addr().Unmap() != source.Addr() {
		t.Errorf("from %s: %v", got, err)
	}
}

// While links are mended without end, those that are removed go all the same.
func TestMendLinksDuringRemoval(t *testing.T) {
	n := newNode(t)
	ctx := t.Context()
	var pods []podnet.Wired
	for i := range 8 {
		p, _ := newPod(t, i+1, true, false)
		pods = append(pods, podnet.Wired{Pod: p})
	}
	for range 5 {
		var targets []podnet.Target
		for i := range pods {
			pods[i].HostIfIndex = n.mustAttachOnly(t, pods[i].Pod).HostIfIndex
			targets = append(targets, podnet.Target{ID: pods[i].ID, HostIfIndex: pods[i].HostIfIndex})
		}
		mending, cancelMending := context.WithCancel(ctx)
		done := make(chan struct{})
		go func() {
			defer close(done)
			for mending.Err() == nil {
				if _, err := n.MendLinks(t.Context(), wired(pods...)); err != nil {
					t.Error(err)
				}
			}
		}()
		for i, err := range n.RemoveAll(ctx, targets...) {
			if err != nil {
				t.Errorf("%s: %v", targets[i].Key(), err)
			}
		}
		cancelMending()
		<-done
		if found, err := n.List(ctx); err != nil || len(found) != 0 {
			t.Fatalf("left: %v, %v", found, err)
		}
	}
}
