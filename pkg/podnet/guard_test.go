package podnet_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// newGuarded returns a node that routes as nodes do: there is a way out, and no way to addresses of its
// block that no pod has. Without a way out, rp_filter would drop what the guard is there for.
func newGuarded(t *testing.T, change ...func(*podnet.Options)) node {
	t.Helper()
	n := newNode(t, change...)
	n.host.IP(t, "link", "set", "uplink-peer", "up")
	n.host.IP(t, "route", "add", "default", "via", "192.0.2.254", "dev", "uplink")
	n.host.IP(t, "-6", "route", "add", "default", "via", "2001:db8::ffff", "dev", "uplink")
	n.host.IP(t, "route", "add", "unreachable", "10.64.0.0/24", "table", "120", "proto", "30")
	n.host.IP(t, "-6", "route", "add", "unreachable", "fd64::/64", "table", "120", "proto", "30")
	return n
}

// speaks says whether another pod gets a datagram that a pod sends from an address.
func speaks(t *testing.T, pod, other *netnstest.NS, source, to netip.Addr) bool {
	t.Helper()
	var receiver, sender *net.UDPConn
	testkit.Check(t, other.Do(func() (err error) {
		receiver, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 4711)))
		return err
	}))
	defer receiver.Close()
	testkit.Check(t, pod.Do(func() (err error) {
		sender, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(source, 0)))
		return err
	}))
	defer sender.Close()
	_ = testkit.Must(sender.WriteTo([]byte("coil"), receiver.LocalAddr()))(t)
	testkit.Check(t, receiver.SetReadDeadline(time.Now().Add(testkit.Timeout(300*time.Millisecond))))
	_, from, err := receiver.ReadFromUDPAddrPort(make([]byte, 16))
	return err == nil && from.Addr().Unmap() == source
}

// addToLoopback adds an address that can be used at once: the kernel ends the duplicate address detection of an IPv6 address in the background, even on lo.
func addToLoopback(t *testing.T, ns *netnstest.NS, a netip.Addr) {
	t.Helper()
	args := []string{"address", "add", netip.PrefixFrom(a, a.BitLen()).String(), "dev", "lo"}
	if a.Is6() {
		args = append(args, "nodad")
	}
	ns.IP(t, args...)
}

// For a while a router may send from addresses that have moved away from it, and no other pod may.
func TestStragglers(t *testing.T) {
	n := newGuarded(t)
	p1, router := newPod(t, 1, true, true)
	p2, other := newPod(t, 2, true, true)
	p3, to := newPod(t, 3, true, true)
	a := n.mustAttach(t, p1)
	n.mustAttach(t, p2)
	n.mustAttach(t, p3)
	testkit.Must(n.Guard(t.Context()))(t)
	// A node answers no ARP request from an address that isn't routed to the link: neighbours are known before.
	for _, pod := range []*netnstest.NS{router, other} {
		mustPing(t, pod, p3.Address.IPv4)
		mustPing(t, pod, p3.Address.IPv6)
	}
	moved := map[netip.Addr]netip.Addr{netip.MustParseAddr("203.0.113.1"): p3.Address.IPv4, netip.MustParseAddr("2001:db8:9::1"): p3.Address.IPv6}
	for from := range moved {
		for _, pod := range []*netnstest.NS{router, other} {
			addToLoopback(t, pod, from)
		}
	}
	speakers := func() string {
		var all []string
		for from, dst := range moved {
			for name, pod := range map[string]*netnstest.NS{"router": router, "other": other} {
				if speaks(t, pod, to, from, dst) {
					all = append(all, fmt.Sprintf(" the %s speaks for %s", name, from))
				}
			}
		}
		slices.Sort(all)
		return strings.Join(all, "")
	}
	if got := speakers(); got != "" {
		t.Errorf("before:%s", got)
	}
	testkit.Check(t, n.Straggle(t.Context(), a.HostIfIndex, slices.Collect(maps.Keys(moved))...))
	if got := testkit.Must(n.Guard(t.Context()))(t); got != (dataplane.Result{}) {
		t.Errorf("Guard did %+v", got)
	}
	if got := speakers(); got != " the router speaks for 2001:db8:9::1 the router speaks for 203.0.113.1" {
		t.Errorf("for a while:%s", got)
	}
	testkit.Eventually(t, 3*ruleset.Straggling, "it ends", func() error {
		if got := speakers(); got != "" {
			return errors.New(got)
		}
		return nil
	})
}

// What a straggler sends keeps its source though rules of others translate all, and isn't dropped by those that know no connection in the
// middle, unless connections are to be tracked for such rules.
func TestStragglersAndRulesOfOthers(t *testing.T) {
	for _, tracked := range []bool{false, true} {
		t.Run(fmt.Sprintf("tracked %t", tracked), func(t *testing.T) {
			n := newGuarded(t, func(o *podnet.Options) { o.StragglersTracked = tracked })
			p1, router := newPod(t, 1, true, true)
			p2, to := newPod(t, 2, true, true)
			a := n.mustAttach(t, p1)
			n.mustAttach(t, p2)
			testkit.Must(n.Guard(t.Context()))(t)
			for _, command := range []string{
				"add table inet others", "add chain inet others post { type nat hook postrouting priority 100; }", "add rule inet others post masquerade",
				"add chain inet others forward { type filter hook forward priority 0; }", "add rule inet others forward ct state invalid drop",
			} {
				testkit.Must(n.host.Run("nft", command))(t)
			}
			testkit.Check(t, n.host.Lab().Sysctl("netfilter/nf_conntrack_tcp_loose=0"))
			arrived := testkit.Must(to.Lab().NewCapture("eth0", func(p netlab.Packet) bool { return p.Protocol == unix.IPPROTO_TCP }))(t)
			for from, dst := range map[netip.Addr]netip.Addr{netip.MustParseAddr("203.0.113.1"): p2.Address.IPv4, netip.MustParseAddr("2001:db8:9::1"): p2.Address.IPv6} {
				mustPing(t, router, dst) // neighbours are known
				gateway := podnet.Gateways.IPv4
				if from.Is6() {
					gateway = podnet.Gateways.IPv6
				}
				addToLoopback(t, router, from)
				router.IP(t, "route", "add", dst.String(), "via", gateway.String(), "dev", "eth0", "src", from.String())
				testkit.Check(t, n.Straggle(t.Context(), a.HostIfIndex, from))
				if !speaks(t, router, to, from, dst) {
					t.Errorf("the pod doesn't speak for %s", from)
				}
				const ack = 0x10
				raw := testkit.Must(router.Lab().NewRaw(from, dst, unix.IPPROTO_TCP, 16))(t)
				testkit.Check(t, raw.Send(netlab.TCPHeader(40000, 443, 1, 1, ack)))
				raw.Close()
				// What comes after it has passed.
				if !speaks(t, router, to, from, dst) {
					t.Errorf("the pod doesn't speak for %s any more", from)
				}
				came := len(arrived.All(func(p netlab.Packet) bool { return p.Src == from })) > 0
				if came == tracked {
					t.Errorf("a packet of an old connection from %s has arrived: %t", from, came)
				}
			}
			missed, err := arrived.Close()
			if testkit.Check(t, err); missed > 0 {
				t.Errorf("%d packets weren't seen", missed)
			}
		})
	}
}

// A pod speaks for itself, neither for its node nor for other pods.
func TestSourceGuard(t *testing.T) {
	n := newGuarded(t)
	p1, pod1 := newPod(t, 1, true, true)
	p2, pod2 := newPod(t, 2, true, true)
	p3, _ := newPod(t, 3, true, true)
	for _, p := range []podnet.Pod{p1, p2, p3} {
		n.mustAttach(t, p)
	}
	forged := []netip.Addr{
		nodeAddrs.IPv6, // the kernel itself refuses that of IPv4
		p3.Address.IPv4, p3.Address.IPv6,
		netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("2001:db8:9::1"),
	}
	for _, a := range forged {
		args := []string{"address", "add", netip.PrefixFrom(a, a.BitLen()).String(), "dev", "eth0"}
		if a.Is6() {
			args = append(args, "nodad", "preferred_lft", "0") // not chosen unless asked for
		}
		pod1.IP(t, args...)
	}
	to := func(a netip.Addr) netip.Addr {
		if a.Is6() {
			return p2.Address.IPv6
		}
		return p2.Address.IPv4
	}
	for _, own := range p1.Address.Addrs() {
		mustPing(t, pod1, to(own))
	}
	for _, a := range forged {
		if !speaks(t, pod1, pod2, a, to(a)) {
			t.Errorf("control: without the guard, nothing came from %s", a)
		}
	}
	for _, want := range []dataplane.Result{{Added: 1}, {}} {
		if got := testkit.Must(n.Guard(t.Context()))(t); got != want {
			t.Errorf("Guard did %+v, not %+v", got, want)
		}
	}
	for _, a := range forged {
		if speaks(t, pod1, pod2, a, to(a)) {
			t.Errorf("a pod speaks for %s", a)
		}
	}
	dropped := testkit.Must(n.Dropped(t.Context()))(t)[ruleset.Forged]
	if dropped[dataplane.IPv4] != 2 || dropped[dataplane.IPv6] != 3 {
		t.Errorf("dropped %v", dropped)
	}
	for _, a := range p1.Address.Addrs() {
		if !speaks(t, pod1, pod2, a, to(a)) {
			t.Errorf("nothing came from the pod's own address %s", a)
		}
		mustPing(t, pod2, a)
	}
	for _, a := range p2.Address.Addrs() {
		mustPing(t, n.host, a)
	}
	for _, a := range nodeAddrs.Addrs() {
		mustPing(t, pod2, a)
	}
	// A pod that comes later needs nothing more, and its kernel may ask who has an address.
	p4, pod4 := newPod(t, 4, true, true)
	n.mustAttach(t, p4)
	mustPing(t, pod4, p2.Address.IPv4)
	mustPing(t, pod4, p2.Address.IPv6)
	pod4.IP(t, "address", "add", "fd64::4:4/128", "dev", "eth0")
	testkit.Eventually(t, 10*time.Second, "duplicate address detection ends", func() error {
		if out := pod4.IP(t, "-6", "address", "show", "dev", "eth0"); strings.Contains(out, "tentative") || strings.Contains(out, "dadfailed") {
			return errors.New(out)
		}
		return nil
	})
	if after := testkit.Must(n.Dropped(t.Context()))(t)[ruleset.Forged]; after[dataplane.IPv6] != dropped[dataplane.IPv6] || after[dataplane.IPv4] != dropped[dataplane.IPv4] {
		t.Errorf("dropped %v, before it was %v", after, dropped)
	}
}

// A pod of a namespace that may send from any address does, from its first packet on; so does one that
// runs when the namespace is given leave, and no longer when it isn't.
func TestUnguarded(t *testing.T) {
	n := newGuarded(t)
	_ = testkit.Must(n.Guard(t.Context()))(t)
	foreign := netip.MustParseAddr("203.0.113.1")
	p1, pod1 := newPod(t, 1, true, true)
	p2, pod2 := newPod(t, 2, true, true)
	p1.Unguarded = true
	a1 := n.mustAttach(t, p1)
	n.mustAttach(t, p2)
	pod1.IP(t, "address", "add", "203.0.113.1/32", "dev", "eth0")
	for _, unguarded := range []bool{true, false, true} {
		p1.Unguarded = unguarded
		want := func(context.Context) ([]podnet.Wired, error) {
			return []podnet.Wired{{Pod: p1, HostIfIndex: a1.HostIfIndex, HostMAC: a1.HostMAC}}, nil
		}
		_ = testkit.Must(n.MendLinks(t.Context(), want))(t)
		if got := testkit.Must(n.MendLinks(t.Context(), want))(t); got != (podnet.Mended{}) {
			t.Errorf("unguarded %t: mended again: %+v", unguarded, got)
		}
		if got := speaks(t, pod1, pod2, foreign, p2.Address.IPv4); got != unguarded {
			t.Errorf("unguarded %t: the pod's packet from another address arrives: %t", unguarded, got)
		}
		if err := n.Check(t.Context(), p1, a1); err != nil {
			t.Errorf("unguarded %t: %v", unguarded, err)
		}
		mustPing(t, pod1, p2.Address.IPv4)
	}
	// The record was lost: nobody knows the namespace.
	p1.Namespace, p1.Name, p1.Unguarded = "", "", false
	lost := func(context.Context) ([]podnet.Wired, error) {
		return []podnet.Wired{{Pod: p1, HostIfIndex: a1.HostIfIndex}}, nil
	}
	if got := testkit.Must(n.MendLinks(t.Context(), lost))(t); got != (podnet.Mended{}) {
		t.Errorf("of a pod without a namespace, this was mended: %+v", got)
	}
	if found := testkit.Must(n.List(t.Context()))(t); len(found) != 2 || found[0].Unlabelled || found[1].Unlabelled {
		t.Errorf("found %v", found)
	}
	if err := n.Remove(t.Context(), p1.ID, a1.HostIfIndex); err != nil {
		t.Error(err)
	}
}

// The removal of the guard is noticed, and it comes back; switched off, it goes, and nothing else.
func TestSourceGuardIsWatched(t *testing.T) {
	n := newNode(t)
	told := make(chan struct{}, 100)
	done := make(chan error, 1)
	watch := testkit.Must(n.WatchGuard())(t)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		done <- watch.Run(ctx, time.Millisecond, func() {
			select {
			case told <- struct{}{}:
			default:
			}
		})
	}()
	defer func() {
		cancel()
		testkit.Check(t, <-done)
		testkit.Check(t, watch.Close())
	}()
	_ = testkit.Must(n.Guard(t.Context()))(t)
	for _, remove := range []string{"flush ruleset", "delete table inet coil", "flush chain inet coil prerouting", "add table inet coil { flags dormant; }"} {
		for len(told) > 0 {
			<-told
		}
		_ = testkit.Must(n.host.Run("nft", remove))(t)
		select {
		case <-told:
		case <-time.After(testkit.Timeout(5 * time.Second)):
			t.Errorf("%s: nobody was told", remove)
		}
		if got := testkit.Must(n.Guard(t.Context()))(t); !got.Changed() {
			t.Errorf("%s: Guard did nothing", remove)
		}
		if got := testkit.Must(n.Guard(t.Context()))(t); got.Changed() {
			t.Errorf("%s: Guard was at it again: %+v", remove, got)
		}
		if out := testkit.Must(n.host.Run("nft", "list", "ruleset"))(t); !strings.Contains(out, "fib saddr . iif oif missing jump forged") || strings.Contains(out, "dormant") {
			t.Errorf("%s: not restored: %s", remove, out)
		}
	}
	_ = testkit.Must(n.host.Run("nft", "add table inet other"))(t)
	off := testkit.Must(podnet.New(podnet.Options{PodTable: 116, RulePriority: 2000, Protocol: 30, Netns: n.host.Path}))(t)
	defer func() { testkit.Check(t, off.Close()) }()
	for range 2 {
		_ = testkit.Must(off.Guard(t.Context()))(t)
		if out := testkit.Must(n.host.Run("nft", "list", "tables"))(t); strings.TrimSpace(out) != "table inet other" {
			t.Errorf("tables: %s", out)
		}
	}
}

// CHECK finds out whether a pod can send from any address, or can't though it may; what others have in
// nftables doesn't matter to it.
func TestCheckGuard(t *testing.T) {
	n := newNode(t)
	p, _ := newPod(t, 1, true, true)
	a := n.mustAttach(t, p)
	leave, _ := newPod(t, 2, true, true)
	leave.Unguarded = true
	b := n.mustAttach(t, leave)
	off := testkit.Must(podnet.New(podnet.Options{PodTable: 116, RulePriority: 2000, Protocol: 30, Netns: n.host.Path}))(t)
	defer func() { testkit.Check(t, off.Close()) }()
	group := func(link string, g uint32) []string {
		return []string{"ip", "link", "set", link, "group", fmt.Sprint(g)}
	}
	for _, c := range []struct {
		name   string
		before []string
		want   string // of the guarded pod; empty is no error
		leave  string // of the pod that has leave
	}{
		{name: "nothing was done yet", want: "table coil of nftables is missing"},
		{name: "as it should be", before: []string{}},
		{name: "as it should be, asked again", before: []string{"true"}},
		{name: "a table of others", before: []string{"nft", "add table inet other"}},
		{name: "without the table", before: []string{"nft", "delete table inet coil"}, want: "table coil of nftables is missing"},
		{name: "without any", before: []string{"nft", "flush ruleset"}, want: "table coil of nftables is missing"},
		{name: "without the rule", before: []string{"nft", "flush chain inet coil prerouting"}, want: "rule prerouting 000"},
		{name: "with a rule before it", before: []string{"nft", "insert rule inet coil prerouting accept"}, want: "rule prerouting 001"},
		{name: "with an exception", before: []string{"nft", "insert rule inet coil forged ip saddr 203.0.113.1 return"}, want: "rule forged"},
		{name: "asleep", before: []string{"nft", "add table inet coil { flags dormant; }"}, want: "dormant"},
		{name: "with leave", before: group(a.HostIfName, dataplane.LinkGroupUnguarded), want: "group of " + a.HostIfName},
		{name: "without leave", before: group(b.HostIfName, dataplane.LinkGroup), leave: "group of " + b.HostIfName},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.before != nil {
				_ = testkit.Must(n.Guard(t.Context()))(t)
			}
			if len(c.before) > 0 {
				_ = testkit.Must(n.host.Run(c.before[0], c.before[1:]...))(t)
			}
			for _, who := range []struct {
				pod  podnet.Pod
				made podnet.Attachment
				want string
			}{{p, a, c.want}, {leave, b, c.leave}} {
				err := n.CheckGuard(t.Context(), who.pod, who.made)
				if who.want == "" && err != nil {
					t.Errorf("%s: %v", who.pod.Name, err)
				}
				if who.want != "" && (err == nil || !strings.Contains(err.Error(), who.want)) {
					t.Errorf("%s: error %v, want one with %q", who.pod.Name, err, who.want)
				}
				testkit.Check(t, n.Check(t.Context(), who.pod, who.made), off.CheckGuard(t.Context(), who.pod, who.made))
			}
			_ = testkit.Must(n.MendLinks(t.Context(), func(context.Context) ([]podnet.Wired, error) {
				return []podnet.Wired{{Pod: p, HostIfIndex: a.HostIfIndex}, {Pod: leave, HostIfIndex: b.HostIfIndex}}, nil
			}))(t)
		})
	}
}
