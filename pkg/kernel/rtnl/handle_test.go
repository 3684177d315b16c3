package rtnl_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

func newHandle(t *testing.T) (*rtnl.Handle, *netnstest.NS) {
	t.Helper()
	ns := netnstest.New(t)
	h, err := rtnl.New(ns.NS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return h, ns
}

func addVeth(ns *netnstest.NS, name string) rtnl.Request {
	return rtnl.AddVeth(rtnl.Veth{
		Name: name, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1},
		PeerName: name + "p", PeerMAC: net.HardwareAddr{2, 0, 0, 0, 0, 2}, PeerGroup: 7, PeerNetns: ns.Fd(), MTU: 1400,
	})
}

// A veth pair has one queue at each end: the kernel has none to remove, for which it would wait.
func TestVethQueues(t *testing.T) {
	h, ns := newHandle(t)
	if err := h.Do(t.Context(), addVeth(ns, "v")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"v", "vp"} {
		if out := ns.IP(t, "-details", "link", "show", name); !strings.Contains(out, " numtxqueues 1 numrxqueues 1 ") {
			t.Errorf("%s has other queues:\n%s", name, out)
		}
	}
}

func TestLinks(t *testing.T) {
	h, ns := newHandle(t)
	ctx := t.Context()
	if err := h.Do(ctx, addVeth(ns, "v")); err != nil {
		t.Fatal(err)
	}
	if err := h.Do(ctx, addVeth(ns, "v")); !errors.Is(err, rtnl.ErrExist) {
		t.Errorf("second: %v", err)
	}
	index, err := h.IndexByName("vp")
	if err != nil {
		t.Fatal(err)
	}
	altName := "a-rather-long-alternative-name"
	err = h.Do(ctx, rtnl.AddAltName(index, altName), rtnl.SetLink(index, rtnl.LinkChange{Alias: "an alias", Up: true, NoAutoAddress: true, Name: "w"}))
	if err != nil {
		t.Fatal(err)
	}
	other, err := h.IndexByName("v")
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("%+v", struct {
		Index, Peer, MTU            int
		Name, Alias, Kind, MAC, Alt string
		Group                       uint32
		Up, Elsewhere               bool
	}{index, other, 1400, "w", "an alias", "veth", "02:00:00:00:00:02", "[" + altName + "]", 7, true, false})
	for how, get := range map[string]func() (rtnl.Link, error){
		"index":            func() (rtnl.Link, error) { return h.LinkByIndex(ctx, index) },
		"name":             func() (rtnl.Link, error) { return h.LinkByName(ctx, "w") },
		"alternative name": func() (rtnl.Link, error) { return h.LinkByAltName(ctx, altName) },
	} {
		l, err := get()
		got := fmt.Sprintf("%+v", struct {
			Index, Peer, MTU            int
			Name, Alias, Kind, MAC, Alt string
			Group                       uint32
			Up, Elsewhere               bool
		}{l.Index, l.Peer, l.MTU, l.Name, l.Alias, l.Kind, l.MAC.String(), fmt.Sprint(l.AltNames), l.Group, l.Up, l.PeerElsewhere})
		if err != nil || got != want {
			t.Errorf("by %s: %s, not %s, %v", how, got, want, err)
		}
	}
	ns.IP(t, "link", "add", "bridge0", "type", "bridge")
	if veths, err := h.Veths(ctx); err != nil || len(veths) != 2 {
		t.Errorf("veths: %v, %v", veths, err)
	}
	if err := h.Do(ctx, rtnl.DelLink(index)); err != nil {
		t.Fatal(err)
	}
	for how, err := range map[string]error{
		"delete": h.Do(ctx, rtnl.DelLink(index)),
		"set":    h.Do(ctx, rtnl.SetLink(index, rtnl.LinkChange{Up: true})),
	} {
		if !errors.Is(err, rtnl.ErrNotExist) {
			t.Errorf("%s a link that is gone: %v", how, err)
		}
	}
	if _, err := h.IndexByName("w"); !errors.Is(err, rtnl.ErrNotExist) {
		t.Errorf("index of a link that is gone: %v", err)
	}
	if _, err := h.IndexByName("a-name-that-is-too-long"); !errors.Is(err, rtnl.ErrInvalid) {
		t.Errorf("index of an impossible name: %v", err)
	}
	for _, get := range []func() (rtnl.Link, error){
		func() (rtnl.Link, error) { return h.LinkByIndex(ctx, index) },
		func() (rtnl.Link, error) { return h.LinkByName(ctx, "w") },
		func() (rtnl.Link, error) { return h.LinkByAltName(ctx, altName) },
	} {
		if l, err := get(); !errors.Is(err, rtnl.ErrNotExist) {
			t.Errorf("a link that is gone: %v, %v", l, err)
		}
	}
}

// Whichever request of a batch fails, the others are carried out, and each error
// is the right one's.
func TestEach(t *testing.T) {
	h, ns := newHandle(t)
	ns.IP(t, "link", "add", "bridge0", "type", "bridge")
	index, err := h.IndexByName("bridge0")
	if err != nil {
		t.Fatal(err)
	}
	var reqs []rtnl.Request
	for i := range 200 {
		link := index
		if i%7 == 0 {
			link = 9999
		}
		reqs = append(reqs, rtnl.AddAddr(link, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 32), dataplane.Universe))
	}
	for i, err := range h.Each(t.Context(), reqs...) {
		if (i%7 == 0) != errors.Is(err, rtnl.ErrNotExist) || i%7 != 0 && err != nil {
			t.Errorf("%s: %v", reqs[i], err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for i, err := range h.Each(ctx, reqs...) {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", reqs[i], err)
		}
	}
}

// A packet's way depends on its mark, its source and the link by which it came.
func TestRouteOf(t *testing.T) {
	h, ns := newHandle(t)
	for _, l := range []string{"in0", "out0"} {
		ns.IP(t, "link", "add", l, "type", "bridge")
		ns.IP(t, "link", "set", l, "up")
		testkit.Must(ns.Run("sysctl", "-w", "net.ipv4.conf."+l+".rp_filter=0", "net.ipv4.conf."+l+".forwarding=1", "net.ipv6.conf."+l+".forwarding=1"))(t)
	}
	testkit.Must(ns.Run("sysctl", "-w", "net.ipv4.conf.all.rp_filter=0", "net.ipv6.conf.all.forwarding=1"))(t)
	ns.IP(t, "address", "add", "192.0.2.1/24", "dev", "out0")
	ns.IP(t, "address", "add", "2001:db8::1/64", "dev", "out0", "nodad")
	for _, family := range []string{"-4", "-6"} {
		ns.IP(t, family, "rule", "add", "priority", "2000", "iif", "in0", "fwmark", "0x5/0x5", "lookup", "116")
	}
	ns.IP(t, "route", "add", "203.0.113.0/24", "dev", "out0", "table", "116")
	ns.IP(t, "route", "add", "2001:db8:113::/64", "dev", "out0", "table", "116")
	in, out := testkit.Must(h.IndexByName("in0"))(t), testkit.Must(h.IndexByName("out0"))(t)
	for _, c := range []struct {
		name    string
		packet  rtnl.Packet
		table   int
		missing bool
	}{
		{"forwarded with the mark", rtnl.Packet{To: netip.MustParseAddr("203.0.113.5"), From: netip.MustParseAddr("10.0.0.1"), In: in, Mark: 0x5}, 116, false},
		{"forwarded without it", rtnl.Packet{To: netip.MustParseAddr("203.0.113.5"), From: netip.MustParseAddr("10.0.0.1"), In: in}, 0, true},
		{"the host's own", rtnl.Packet{To: netip.MustParseAddr("203.0.113.5"), Mark: 0x5}, 0, true},
		{"the host's own to a neighbour", rtnl.Packet{To: netip.MustParseAddr("192.0.2.9")}, 254, false},
		{"IPv6 with the mark", rtnl.Packet{To: netip.MustParseAddr("2001:db8:113::5"), From: netip.MustParseAddr("fd00::1"), In: in, Mark: 0x5}, 116, false},
		{"IPv6 without it", rtnl.Packet{To: netip.MustParseAddr("2001:db8:113::5"), From: netip.MustParseAddr("fd00::1"), In: in}, 0, true},
	} {
		r, err := h.RouteOf(t.Context(), c.packet)
		if c.missing != errors.Is(err, rtnl.ErrNotExist) || !c.missing && (r.Table != c.table || r.Link != out) {
			t.Errorf("%s: %s, %v", c.name, r, err)
		}
		way, err := h.Way(t.Context(), c.packet)
		if err != nil || c.missing != (way == "no route") || !c.missing && !strings.HasSuffix(way, " (out0)") {
			t.Errorf("%s: %q, %v", c.name, way, err)
		}
	}
}

func TestRouteTo(t *testing.T) {
	h, ns := newHandle(t)
	ns.IP(t, "link", "add", "bridge0", "type", "bridge")
	ns.IP(t, "link", "set", "bridge0", "up")
	ns.IP(t, "address", "add", "192.0.2.1/24", "dev", "bridge0")
	ns.IP(t, "address", "add", "2001:db8::1/64", "dev", "bridge0", "nodad")
	ns.IP(t, "rule", "add", "priority", "2000", "lookup", "116")
	ns.IP(t, "route", "add", "unreachable", "10.0.0.0/8", "table", "116")
	index, err := h.IndexByName("bridge0")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		to      string
		dst     string
		local   bool
		missing bool
	}{
		{"192.0.2.1", "192.0.2.1/32", true, false},
		{"192.0.2.9", "192.0.2.0/24", false, false},
		{"2001:db8::9", "2001:db8::/64", false, false},
		{"198.51.100.1", "", false, true},
		{"10.1.1.1", "", false, true},
		{"2001:db8:1::1", "", false, true},
	} {
		r, err := h.RouteTo(t.Context(), netip.MustParseAddr(c.to), 0)
		if c.missing != errors.Is(err, rtnl.ErrNotExist) {
			t.Errorf("%s: %v", c.to, err)
			continue
		}
		if !c.missing && (r.Dst.String() != c.dst || r.Type == dataplane.Local != c.local || r.Link != index) {
			t.Errorf("%s: %s, local %t", c.to, r, r.Type == dataplane.Local)
		}
	}
	exists, tentative, err := h.IPv6Addr(t.Context(), index, netip.MustParseAddr("2001:db8::1"))
	if !exists || tentative || err != nil {
		t.Errorf("got %t, %t, %v", exists, tentative, err)
	}
	exists, _, err = h.IPv6Addr(t.Context(), index, netip.MustParseAddr("2001:db8::2"))
	if exists || err != nil {
		t.Errorf("got %t, %v", exists, err)
	}
}

// Addresses of both families are one list. An address with a lifetime is dynamic.
func TestAddrs(t *testing.T) {
	h, ns := newHandle(t)
	ns.IP(t, "link", "set", "lo", "up")
	ns.IP(t, "address", "add", "192.0.2.1/24", "dev", "lo")
	ns.IP(t, "address", "add", "2001:db8::1/64", "dev", "lo", "valid_lft", "1000", "preferred_lft", "1000", "nodad")
	want := []rtnl.Addr{
		{Link: 1, Prefix: netip.MustParsePrefix("127.0.0.1/8")},
		{Link: 1, Prefix: netip.MustParsePrefix("192.0.2.1/24")},
		{Link: 1, Prefix: netip.MustParsePrefix("::1/128")},
		{Link: 1, Prefix: netip.MustParsePrefix("2001:db8::1/64"), Dynamic: true},
	}
	got, err := h.Addrs(t.Context())
	slices.SortFunc(got, func(a, b rtnl.Addr) int { return a.Prefix.Addr().Compare(b.Prefix.Addr()) })
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v and %v, want %v", got, err, want)
	}
}

// Ports decide by which rule a flow goes.
func TestLinkOf(t *testing.T) {
	h, ns := newHandle(t)
	links := map[string]int{}
	for _, name := range []string{"bridge0", "bridge1"} {
		ns.IP(t, "link", "add", name, "type", "bridge")
		ns.IP(t, "link", "set", name, "up")
		links[name] = testkit.Must(h.IndexByName(name))(t)
	}
	for _, family := range []struct{ flag, from, to string }{{"-4", "192.0.2.1", "198.51.100.1"}, {"-6", "2001:db8::1", "2001:db8:1::1"}} {
		from, to := netip.MustParseAddr(family.from), netip.MustParseAddr(family.to)
		flow := func(transport uint8, sport, dport uint16) (int, error) {
			return h.LinkOf(t.Context(), transport, netip.AddrPortFrom(from, sport), netip.AddrPortFrom(to, dport))
		}
		args := []string{"address", "add", netip.PrefixFrom(from, from.BitLen()).String(), "dev", "bridge0"}
		if from.Is6() {
			args = append(args, "nodad")
		}
		ns.IP(t, args...)
		if link, err := flow(unix.IPPROTO_TCP, 1000, 443); !errors.Is(err, rtnl.ErrNotExist) {
			t.Errorf("without a route: %d, %v", link, err)
		}
		ns.IP(t, family.flag, "route", "add", "default", "dev", "bridge0")
		ns.IP(t, family.flag, "route", "add", "default", "dev", "bridge1", "table", "77")
		ns.IP(t, family.flag, "rule", "add", "ipproto", "tcp", "sport", "1000", "dport", "443", "lookup", "77")
		for _, c := range []struct {
			transport    uint8
			sport, dport uint16
			want         string
		}{
			{unix.IPPROTO_TCP, 1000, 443, "bridge1"}, {unix.IPPROTO_UDP, 1000, 443, "bridge0"},
			{unix.IPPROTO_TCP, 1001, 443, "bridge0"}, {unix.IPPROTO_TCP, 1000, 444, "bridge0"},
		} {
			if link, err := flow(c.transport, c.sport, c.dport); err != nil || link != links[c.want] {
				t.Errorf("%+v goes by %d, %v", c, link, err)
			}
		}
		ns.IP(t, family.flag, "route", "replace", "unreachable", "default", "table", "77")
		if link, err := flow(unix.IPPROTO_TCP, 1000, 443); !errors.Is(err, rtnl.ErrNotExist) {
			t.Errorf("to what is unreachable: %d, %v", link, err)
		}
	}
}

// The kernel really interrupts dumps while links come and go. A list that comes back
// without an error is complete all the same.
func TestDumpUnderChurn(t *testing.T) {
	h, ns := newHandle(t)
	const steady = 200
	for i := range steady / 2 {
		if err := h.Do(t.Context(), addVeth(ns, fmt.Sprintf("v%d", i))); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for w := range 2 {
		wg.Go(func() {
			name := fmt.Sprintf("churn%d", w)
			for ctx.Err() == nil {
				err := h.Do(t.Context(), addVeth(ns, name))
				index, indexErr := h.IndexByName(name)
				if err := errors.Join(err, indexErr, h.Do(t.Context(), rtnl.DelLink(index))); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	complete, dumps := 0, 0
	traced := rtnl.WithTrace(t.Context(), func(rtnl.Request) error { dumps++; return nil })
	for range 200 {
		links, err := h.Veths(traced)
		if errors.Is(err, rtnl.ErrDumpInterrupted) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		complete++
		count := 0
		for _, l := range links {
			if l.MTU == 1400 && l.Name[0] == 'v' {
				count++
			}
		}
		if count != steady {
			t.Fatalf("%d links, not %d", count, steady)
		}
	}
	cancel()
	wg.Wait()
	t.Logf("%d lists by %d dumps", complete, dumps)
	if complete == 0 {
		t.Error("no list was complete")
	}
}

func TestManyAtOnce(t *testing.T) {
	h, _ := newHandle(t)
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			for range 50 {
				if l, err := h.LinkByIndex(t.Context(), 1); err != nil || l.Name != "lo" {
					t.Errorf("got %v, %v", l, err)
				}
			}
		})
	}
	wg.Wait()
}

// Packets of a link are counted.
func TestTraffic(t *testing.T) {
	h, ns := newHandle(t)
	before := testkit.Must(h.Traffic(t.Context(), "lo"))(t)
	testkit.Check(t, ns.Ping(netip.MustParseAddr("127.0.0.1"), testkit.Timeout(5*time.Second)))
	after := testkit.Must(h.Traffic(t.Context(), "lo"))(t)
	if got := after.Since(before); got.In < 2 || got.Out < 2 || got.Lost != 0 {
		t.Errorf("an echo and its reply over lo are %+v", got)
	}
	if _, err := h.Traffic(t.Context(), "none"); !errors.Is(err, rtnl.ErrNotExist) {
		t.Errorf("of a link that isn't there: %v", err)
	}
}
