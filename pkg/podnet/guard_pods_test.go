package podnet_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// eachGuard runs a test with and without the guard.
func eachGuard(t *testing.T, test func(t *testing.T, n node, guard bool)) {
	for _, guard := range []bool{false, true} {
		t.Run(fmt.Sprintf("guard %t", guard), func(t *testing.T) {
			n := newGuarded(t, func(o *podnet.Options) { o.SourceGuard = guard })
			_ = testkit.Must(n.Guard(t.Context()))(t)
			test(t, n, guard)
		})
	}
}

// noneDropped says that the guard had nothing to do.
func (n node) noneDropped(t *testing.T) {
	t.Helper()
	for family, packets := range testkit.Must(n.Dropped(t.Context()))(t)[ruleset.Forged] {
		if packets > 0 {
			t.Errorf("the guard dropped %d packets of %s", packets, family)
		}
	}
}

// exchange sends bytes from one namespace to an address of another by TCP, and has them come back.
func exchange(from, to *netnstest.NS, at netip.AddrPort, size int) error {
	var listener net.Listener
	err := to.Do(func() (err error) {
		listener, err = net.Listen("tcp", at.String())
		return err
	})
	if err != nil {
		return err
	}
	defer listener.Close()
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return // the other one says why
		}
		defer conn.Close()
		_, _ = io.Copy(conn, conn)
	}()
	var conn net.Conn
	err = from.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp", at.String(), testkit.Timeout(5*time.Second))
		return err
	})
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(testkit.Timeout(5 * time.Second))); err != nil {
		return err
	}
	sent := bytes.Repeat([]byte("coil"), size/4)
	go func() { _, _ = conn.Write(sent) }()
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(conn, got); err != nil {
		return fmt.Errorf("%s: %w", at, err)
	}
	if !bytes.Equal(sent, got) {
		return fmt.Errorf("%s: other bytes came back", at)
	}
	return nil
}

// Traffic between nodes and pods goes on: kubelet's probes, a DNS cache of the node at a
// link-local address, fragments, and errors of ICMP in both directions.
func TestGuardLetsPodsWork(t *testing.T) {
	eachGuard(t, func(t *testing.T, n node, _ bool) {
		cache := netip.MustParseAddr("169.254.20.10")
		n.host.IP(t, "address", "add", cache.String()+"/32", "dev", "lo")
		p1, pod1 := newPod(t, 1, true, true)
		p2, pod2 := newPod(t, 2, true, true)
		n.mustAttach(t, p1)
		n.mustAttach(t, p2)
		for _, a := range p1.Address.Addrs() {
			if err := exchange(n.host, pod1, netip.AddrPortFrom(a, 8080), 4); err != nil {
				t.Errorf("kubelet probes the pod: %v", err)
			}
			if err := exchange(pod2, pod1, netip.AddrPortFrom(a, 8080), 100_000); err != nil {
				t.Errorf("pod to pod: %v", err)
			}
		}
		if err := exchange(pod1, n.host, netip.AddrPortFrom(cache, 53), 100_000); err != nil {
			t.Errorf("DNS over TCP: %v", err)
		}
		for _, c := range []struct {
			from, to *netnstest.NS
			dst      netip.Addr
		}{
			{pod1, n.host, cache}, {pod1, pod2, p2.Address.IPv4}, {pod1, pod2, p2.Address.IPv6}, {n.host, pod1, p1.Address.IPv4}, {n.host, pod1, p1.Address.IPv6},
		} {
			// 5000 bytes are four fragments, both ways.
			if err := datagram(c.from, c.to, netip.AddrPortFrom(c.dst, 53), 5000); err != nil {
				t.Errorf("fragments to %s: %v", c.dst, err)
			}
			if err := refused(c.from, netip.AddrPortFrom(c.dst, 9)); err != nil {
				t.Errorf("an error of ICMP about %s: %v", c.dst, err)
			}
		}
		n.noneDropped(t)
	})
}

// datagram sends one of so many bytes, and has it come back.
func datagram(from, to *netnstest.NS, at netip.AddrPort, size int) error {
	var server, client net.PacketConn
	err := to.Do(func() (err error) {
		server, err = net.ListenPacket("udp", at.String())
		return err
	})
	if err != nil {
		return err
	}
	defer server.Close()
	err = from.Do(func() (err error) {
		client, err = net.ListenPacket("udp", "")
		return err
	})
	if err != nil {
		return err
	}
	defer client.Close()
	deadline := time.Now().Add(testkit.Timeout(5 * time.Second))
	if err := errors.Join(server.SetDeadline(deadline), client.SetDeadline(deadline)); err != nil {
		return err
	}
	buf := make([]byte, size+1)
	if _, err := client.WriteTo(buf[:size], net.UDPAddrFromAddrPort(at)); err != nil {
		return err
	}
	got, peer, err := server.ReadFrom(buf)
	if err == nil {
		_, err = server.WriteTo(buf[:got], peer)
	}
	if err == nil {
		got, _, err = client.ReadFrom(buf)
	}
	if err == nil && got != size {
		err = fmt.Errorf("%d bytes came back, not %d", got, size)
	}
	return err
}

// refused sends a datagram where nobody listens, and waits for the error that tells so.
func refused(from *netnstest.NS, at netip.AddrPort) error {
	var conn net.Conn
	err := from.Do(func() (err error) {
		conn, err = net.Dial("udp", at.String())
		return err
	})
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(testkit.Timeout(5 * time.Second))); err != nil {
		return err
	}
	if _, err := conn.Write([]byte("coil")); err != nil {
		return err
	}
	if _, err := conn.Read(make([]byte, 4)); !errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("the error is %w", err)
	}
	return nil
}

// A virtual machine that is bridged to the pod's link, and has its addresses and MAC address, is the pod.
func TestGuardOfBridgedMachine(t *testing.T) {
	foreign := netip.MustParseAddr("203.0.113.1")
	eachGuard(t, func(t *testing.T, n node, guard bool) {
		p1, pod1 := newPod(t, 1, true, true)
		p2, pod2 := newPod(t, 2, true, true)
		a := n.mustAttach(t, p1)
		n.mustAttach(t, p2)
		machine := netnstest.New(t)
		_ = testkit.Must(pod1.Run("sh", "-ec", fmt.Sprintf(`
			ip address flush dev eth0
			ip link set eth0 down address 02:00:00:00:00:77
			ip link add bridge type bridge
			ip link add tap type veth peer name eth0 netns %s address %s
			ip link set eth0 master bridge up
			ip link set tap master bridge up
			ip link set bridge up`, machine.Path, a.PodMAC)))(t)
		_ = testkit.Must(machine.Run("sh", "-ec", fmt.Sprintf(`
			ip link set eth0 up
			ip address add %s/32 dev eth0
			ip -6 address add %s/128 dev eth0 nodad
			ip address add %s/32 dev eth0
			ip route add 169.254.1.1 dev eth0 scope link
			ip route add default via 169.254.1.1 dev eth0 src %[1]s
			ip -6 route add default via fe80::1 dev eth0`, p1.Address.IPv4, p1.Address.IPv6, foreign)))(t)
		for _, dst := range append(p2.Address.Addrs(), nodeAddrs.Addrs()...) {
			testkit.Eventually(t, 10*time.Second, "the machine reaches "+dst.String(), func() error {
				return machine.Ping(dst, testkit.Timeout(pingTimeout))
			})
		}
		for _, own := range p1.Address.Addrs() {
			mustPing(t, n.host, own)
			mustPing(t, pod2, own)
		}
		n.noneDropped(t)
		if got := speaks(t, machine, pod2, foreign, p2.Address.IPv4); got == guard {
			t.Errorf("the machine's packet from another address arrives: %t", got)
		}
	})
}

// A pod with a link of another plugin sends from that one's address by it alone; answers that leave by
// Coil's link are dropped, unless the pod routes by their source, as the plugin sbr lets it. The pod's
// own address is let in by either.
func TestGuardOfSecondLink(t *testing.T) {
	second := netip.MustParseAddr("192.168.7.2")
	eachGuard(t, func(t *testing.T, n node, guard bool) {
		p1, pod1 := newPod(t, 1, true, true)
		p2, pod2 := newPod(t, 2, true, true)
		n.mustAttach(t, p1)
		n.mustAttach(t, p2)
		_ = testkit.Must(n.host.Run("sh", "-ec", fmt.Sprintf(`
			ip link add other type veth peer name net1 netns %s
			ip link set other up
			sysctl -q -w net.ipv4.conf.other.rp_filter=2
			ip address add 192.168.7.1/24 dev other`, pod1.Path)))(t)
		_ = testkit.Must(pod1.Run("sh", "-ec", `
			ip link set net1 up
			ip address add 192.168.7.2/24 dev net1`))(t)
		awaitUp(t, n.host, "other")
		awaitUp(t, pod1, "net1")
		mustPing(t, pod1, netip.MustParseAddr("192.168.7.1"))
		if got := speaks(t, pod1, pod2, second, p2.Address.IPv4); got == guard {
			t.Errorf("the other link's address by Coil's link: %t", got)
		}
		_ = testkit.Must(pod1.Run("sh", "-ec", `
			ip rule add from 192.168.7.2 lookup 100
			ip route add default via 192.168.7.1 dev net1 table 100`))(t)
		if !speaks(t, pod1, pod2, second, p2.Address.IPv4) {
			t.Error("the other link's address by that link: nothing came")
		}
		pod1.IP(t, "route", "add", p2.Address.IPv4.String(), "via", "192.168.7.1", "dev", "net1")
		if !speaks(t, pod1, pod2, p1.Address.IPv4, p2.Address.IPv4) {
			t.Error("the pod's address by the other link: nothing came")
		}
	})
}

// A pod's messages about the addresses of others teach its node nothing, neither about other links nor
// about the pod's own; without the guard, those of ARP do.
func TestGuardKeepsNeighboursRight(t *testing.T) {
	eachGuard(t, func(t *testing.T, n node, guard bool) {
		p1, pod1 := newPod(t, 1, true, true)
		p2, _ := newPod(t, 2, true, true)
		a := n.mustAttach(t, p1)
		n.mustAttach(t, p2)
		router4, router6 := netip.MustParseAddr("192.0.2.254"), netip.MustParseAddr("2001:db8::ffff")
		n.host.IP(t, "neighbour", "replace", router4.String(), "lladdr", "02:00:00:00:00:01", "nud", "stale", "dev", "uplink")
		n.host.IP(t, "neighbour", "replace", router6.String(), "lladdr", "02:00:00:00:00:01", "nud", "stale", "dev", "uplink")
		for _, dst := range p2.Address.Addrs() {
			mustPing(t, n.host, dst)
		}
		host := testkit.Must(net.ParseMAC(a.HostMAC))(t)
		var frames [][]byte
		for _, victim := range []netip.Addr{p2.Address.IPv4, router4, nodeAddrs.IPv4} {
			frames = append(frames,
				ethernet(host, unix.ETH_P_ARP, arp(1, victim, podnet.Gateways.IPv4)),
				ethernet(host, unix.ETH_P_ARP, arp(1, victim, victim)),
				ethernet(host, unix.ETH_P_ARP, arp(2, victim, podnet.Gateways.IPv4)),
			)
		}
		send := func(p packet) { frames = append(frames, ethernet(p.hardware(host), p.kind(), p.bytes(0))) }
		for _, victim := range []netip.Addr{p2.Address.IPv6, router6, nodeAddrs.IPv6} {
			send(neighbour(victim, solicited(podnet.Gateways.IPv6), solicitation, sourceMAC, podnet.Gateways.IPv6))
			send(neighbour(victim, podnet.Gateways.IPv6, advertisement, targetMAC, victim))
			send(neighbour(linkLocal6, podnet.Gateways.IPv6, advertisement, targetMAC, victim))
			send(neighbour(linkLocal6, netip.MustParseAddr("ff02::1"), advertisement, targetMAC, victim))
		}
		// The last one is about the pod's own address, and is learned.
		frames = append(frames, ethernet(host, unix.ETH_P_ARP, arp(1, p1.Address.IPv4, podnet.Gateways.IPv4)))
		send(neighbour(p1.Address.IPv6, solicited(podnet.Gateways.IPv6), solicitation, sourceMAC, podnet.Gateways.IPv6))
		inject(t, pod1, frames...)
		var table string
		testkit.Eventually(t, 5*time.Second, "the node learns the last one", func() error {
			table = n.host.IP(t, "neighbour", "show")
			for _, own := range p1.Address.Addrs() {
				if !strings.Contains(table, own.String()+" dev "+a.HostIfName+" lladdr "+forger.String()) {
					return fmt.Errorf("%s isn't in:\n%s", own, table)
				}
			}
			return nil
		})
		learned := 0
		for _, line := range strings.Split(table, "\n") {
			if !strings.Contains(line, forger.String()) {
				continue
			}
			if !strings.Contains(line, " dev "+a.HostIfName+" ") {
				t.Errorf("the pod changed what the node knows of another link: %s", line)
			}
			address := netip.MustParseAddr(strings.Fields(line)[0])
			if address != p1.Address.IPv4 && address != p1.Address.IPv6 && address != linkLocal6 {
				learned++
			}
		}
		if (learned > 0) == guard {
			t.Errorf("%d addresses of others were learned:\n%s", learned, table)
		}
		for _, dst := range p2.Address.Addrs() {
			mustPing(t, n.host, dst)
		}
	})
}

// Limits of the plugin bandwidth lead what a pod sends round by an ifb, behind which it comes in by the pod's
// link again: the guard sees it.
func TestGuardBehindIFB(t *testing.T) {
	foreign := netip.MustParseAddr("203.0.113.1")
	eachGuard(t, func(t *testing.T, n node, guard bool) {
		p1, pod1 := newPod(t, 1, true, true)
		p2, pod2 := newPod(t, 2, true, true)
		a := n.mustAttach(t, p1)
		n.mustAttach(t, p2)
		_ = testkit.Must(n.host.Run("sh", "-ec", fmt.Sprintf(`
			ip link add bwp type ifb
			ip link set bwp up
			tc qdisc add dev bwp root tbf rate 20mbit burst 1mbit latency 50ms
			tc qdisc add dev %[1]s ingress
			tc filter add dev %[1]s parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev bwp`, a.HostIfName)))(t)
		for _, dst := range p2.Address.Addrs() {
			mustPing(t, pod1, dst)
			mustPing(t, pod2, addressOfFamily(p1, dst))
		}
		n.noneDropped(t)
		pod1.IP(t, "address", "add", foreign.String()+"/32", "dev", "eth0")
		if got := speaks(t, pod1, pod2, foreign, p2.Address.IPv4); got == guard {
			t.Errorf("the packet from another address arrives: %t", got)
		}
		if out := testkit.Must(n.host.Run("tc", "-s", "qdisc", "show", "dev", "bwp"))(t); strings.Contains(out, "Sent 0 bytes") {
			t.Errorf("nothing went by the ifb: %s", out)
		}
	})
}

// addressOfFamily is the pod's of the family of another.
func addressOfFamily(p podnet.Pod, other netip.Addr) netip.Addr {
	if other.Is4() {
		return p.Address.IPv4
	}
	return p.Address.IPv6
}
