package podnet_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// addUplink gives the node another link.
func addUplink(t *testing.T, n node, name string, mtu int, commands ...string) {
	t.Helper()
	n.host.IP(t, "link", "add", name, "mtu", fmt.Sprint(mtu), "type", "veth", "peer", "name", name+"-peer", "mtu", fmt.Sprint(mtu))
	n.host.IP(t, "link", "set", name, "up")
	n.host.IP(t, "link", "set", name+"-peer", "up")
	for _, c := range commands {
		n.host.IP(t, strings.Fields(c)...)
	}
}

func TestDetectMTU(t *testing.T) {
	for _, c := range []struct {
		name string
		make func(t *testing.T, n node)
		set  int // by the Options
		want int
	}{
		{"node's address", func(*testing.T, node) {}, 0, 1500},
		{"smaller", func(t *testing.T, n node) { n.host.IP(t, "link", "set", "uplink", "mtu", "1400") }, 0, 1400},
		{"jumbo frames", func(t *testing.T, n node) { n.host.IP(t, "link", "set", "uplink", "mtu", "9000") }, 0, 9000},
		{"option", func(t *testing.T, n node) { n.host.IP(t, "link", "set", "uplink", "mtu", "1400") }, 1450, 1450},
		{"another default route", func(t *testing.T, n node) {
			addUplink(t, n, "backup", 1420, "address add 198.51.100.1/24 dev backup", "route add default via 198.51.100.2 metric 900")
		}, 0, 1420},
		{"another default route of IPv6", func(t *testing.T, n node) {
			addUplink(t, n, "six", 1430, "-6 route add default dev six metric 77")
		}, 0, 1430},
		{"several next hops", func(t *testing.T, n node) {
			addUplink(t, n, "left", 1440, "address add 198.51.100.1/24 dev left")
			addUplink(t, n, "right", 1410, "address add 203.0.113.1/24 dev right",
				"route add default nexthop via 198.51.100.2 dev left nexthop via 203.0.113.2 dev right")
		}, 0, 1410},
		{"node's address on lo", func(t *testing.T, n node) {
			n.host.IP(t, "address", "del", "192.0.2.1/24", "dev", "uplink")
			n.host.IP(t, "address", "del", "2001:db8::1/64", "dev", "uplink")
			n.host.IP(t, "address", "add", "192.0.2.1/32", "dev", "lo")
			addUplink(t, n, "routed", 2000, "address add 198.51.100.1/24 dev routed", "route add default via 198.51.100.2")
		}, 0, 2000},
		{"link that is not an uplink", func(t *testing.T, n node) {
			addUplink(t, n, "storage", 1300, "address add 198.51.100.1/24 dev storage", "route add unreachable default metric 9999")
		}, 0, 1500},
		{"no uplink", func(t *testing.T, n node) { n.host.IP(t, "link", "del", "uplink") }, 0, 1500},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t, func(o *podnet.Options) { o.MTU = c.set })
			c.make(t, n)
			mtu, changed, err := n.DetectMTU(t.Context(), nodeAddrs)
			if mtu != c.want || err != nil || changed != (c.want != 1500 && c.set == 0) {
				t.Fatalf("MTU %d, changed %t, %v; want %d", mtu, changed, err, c.want)
			}
			if again, changed, err := n.DetectMTU(t.Context(), nodeAddrs); again != c.want || changed || err != nil {
				t.Errorf("the second time %d, changed %t, %v", again, changed, err)
			}
			p, pod := newPod(t, 1, true, true)
			a := n.mustAttach(t, p)
			mustHaveMTU(t, n.host, a.HostIfName, c.want)
			mustHaveMTU(t, pod, p.IfName, c.want)
			if err := n.Check(t.Context(), p, a); err != nil {
				t.Error(err)
			}
		})
	}
}

func mustHaveMTU(t *testing.T, ns *netnstest.NS, link string, want int) {
	t.Helper()
	if out := ns.IP(t, "link", "show", link); !strings.Contains(out, fmt.Sprintf(" mtu %d ", want)) {
		t.Errorf("MTU is not %d: %s", want, out)
	}
}

// Pods that run follow the uplink, in both directions, but for a smaller MTU that was set in
// the pod; IPv6 isn't taken from them.
func TestRunningPodsFollowTheMTU(t *testing.T) {
	n := newNode(t)
	n.host.IP(t, "link", "set", "uplink", "mtu", "9000")
	addUplink(t, n, "wan", 1500, "address add 198.51.100.1/24 dev wan", "route add default via 198.51.100.2")
	if _, _, err := n.DetectMTU(t.Context(), nodeAddrs); err != nil {
		t.Fatal(err)
	}
	type running struct {
		podnet.Wired
		a    podnet.Attachment
		ns   *netnstest.NS
		ipv6 bool
	}
	var pods []running
	var all []podnet.Wired
	for i, ipv6 := range []bool{false, true, true} {
		p, ns := newPod(t, i+1, true, ipv6)
		a := n.mustAttach(t, p)
		w := podnet.Wired{Pod: p, HostIfIndex: a.HostIfIndex, HostMAC: a.HostMAC}
		pods, all = append(pods, running{w, a, ns, ipv6}), append(all, w)
	}
	tuned := pods[2]
	tuned.ns.IP(t, "link", "set", tuned.IfName, "mtu", "1290")
	for _, mtu := range []int{1400, 1200, 1500, 9000} {
		n.host.IP(t, "link", "set", "wan", "mtu", fmt.Sprint(mtu))
		l, err := n.Handle().LinkByName(t.Context(), "wan")
		if err != nil || !n.UplinkChanged(l) {
			t.Errorf("change of the uplink %s is not seen: %v", l, err)
		}
		if _, changed, err := n.DetectMTU(t.Context(), nodeAddrs); !changed || err != nil {
			t.Fatalf("changed %t, %v", changed, err)
		}
		if n.UplinkChanged(l) {
			t.Error("the change of the uplink is seen again")
		}
		if m := mustMend(t, n, all...); m != (podnet.Mended{Resized: 3}) {
			t.Errorf("mended %+v, want 3 links resized", m)
		}
		if m := mustMend(t, n, all...); m != (podnet.Mended{}) {
			t.Errorf("mended %+v, although nothing was wrong", m)
		}
		for _, r := range pods {
			want := mtu
			if r.ipv6 {
				want = max(mtu, 1280)
			}
			mustHaveMTU(t, n.host, r.a.HostIfName, want)
			if r.ns == tuned.ns && mtu == 1400 {
				want = 1290 // then it has to shrink, and is like the others
			}
			if err := n.Check(t.Context(), r.Pod, r.a); err != nil {
				t.Error(err)
			}
			mustHaveMTU(t, r.ns, r.IfName, want)
			for _, to := range r.Address.Addrs() {
				mustPing(t, n.host, to)
			}
		}
	}
}

// A packet that is too large for the uplink and may not be fragmented is answered, so that
// the pod's kernel learns the MTU of the path.
func TestTooLargePacketsAreAnswered(t *testing.T) {
	n := newNode(t, func(o *podnet.Options) { o.MTU = 1500 })
	p, pod := newPod(t, 1, true, true)
	n.mustAttach(t, p)
	addUplink(t, n, "narrow", 1400, "address add 198.51.100.1/24 dev narrow", "address add 2001:db8:1::1/64 dev narrow nodad",
		"neighbour add 198.51.100.9 lladdr 02:00:00:00:00:09 dev narrow", "neighbour add 2001:db8:1::9 lladdr 02:00:00:00:00:09 dev narrow")
	for _, to := range []string{"198.51.100.9", "2001:db8:1::9"} {
		t.Run(to, func(t *testing.T) {
			mtu := pathMTU(t, pod, netip.MustParseAddr(to), 1450)
			if mtu != 1400 {
				t.Errorf("the pod believes the path to take %d bytes, want 1400", mtu)
			}
		})
	}
}

// pathMTU sends datagrams that may not be fragmented until the kernel knows that they are
// too large, and returns the MTU of the path.
func pathMTU(t *testing.T, from *netnstest.NS, to netip.Addr, size int) (mtu int) {
	t.Helper()
	family, level, discover, want, known := unix.AF_INET, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO, unix.IP_MTU
	var sa unix.Sockaddr = &unix.SockaddrInet4{Port: 9, Addr: [4]byte(to.AsSlice())}
	if to.Is6() {
		family, level, discover, want, known = unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO, unix.IPV6_MTU
		sa = &unix.SockaddrInet6{Port: 9, Addr: to.As16()}
	}
	fd := -1
	if err := from.Do(func() (err error) {
		fd, err = unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := errors.Join(unix.SetsockoptInt(fd, level, discover, want), unix.Connect(fd, sa)); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 5*time.Second, "the path's MTU is known", func() error {
		if err := unix.Send(fd, make([]byte, size), 0); !errors.Is(err, unix.EMSGSIZE) {
			return fmt.Errorf("a datagram of %d bytes was sent: %v", size, err)
		}
		var err error
		mtu, err = unix.GetsockoptInt(fd, level, known)
		return err
	})
	return mtu
}
