package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/fou"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/tunnel"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

func newNetns(t *testing.T) (*netnstest.NS, *rtnl.Handle) {
	t.Helper()
	return handleOf(t, netnstest.New(t))
}

func handleOf(t *testing.T, ns *netnstest.NS) (*netnstest.NS, *rtnl.Handle) {
	t.Helper()
	h, err := rtnl.New(ns.NS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return ns, h
}

// contains says whether there is a line with all the words.
func contains(text string, words ...string) bool {
	for line := range strings.Lines(text) {
		fields := " " + strings.Join(strings.Fields(line), " ") + " "
		all := true
		for _, w := range words {
			all = all && strings.Contains(fields, " "+w+" ")
		}
		if all {
			return true
		}
	}
	return false
}

func testFou(t *testing.T) {
	ns, _ := newNetns(t)
	both := []dataplane.Family{dataplane.IPv4, dataplane.IPv6}
	for range 2 {
		if err := fou.Ensure(t.Context(), ns.NS, 5555, both...); err != nil {
			t.Fatal(err)
		}
		shown := ns.IP(t, "fou", "show")
		if !contains(shown, "port 5555 ipproto 4") || !contains(shown, "port 5555 ipproto 41", "-6") || strings.Count(shown, "port") != 2 {
			t.Errorf("ports are:\n%s", shown)
		}
	}
	ns.IP(t, "fou", "add", "port", "5556", "ipproto", "47")
	if err := fou.Ensure(t.Context(), ns.NS, 5556, both...); !errors.Is(err, fou.ErrTaken) {
		t.Errorf("a port for another protocol: %v", err)
	}
	if shown := ns.IP(t, "fou", "show"); !contains(shown, "port 5556 ipproto 41", "-6") {
		t.Errorf("the other family's port isn't open:\n%s", shown)
	}
	t.Run("unavailable", func(t *testing.T) {
		ns, _ := newNetns(t)
		ns.IP(t, "fou", "show") // the module is there
		command(t, "rmmod", "fou6", "fou")
		defer command(t, "modprobe", "-a", "fou", "fou6")
		if err := fou.Ensure(t.Context(), ns.NS, 5555, both...); !errors.Is(err, fou.ErrUnavailable) {
			t.Errorf("without the module: %v", err)
		}
	})
}

// tunnels returns one tunnel of each family, to the n-th client.
func tunnels(n int, sport uint16) []dataplane.Tunnel {
	var ts []dataplane.Tunnel
	for f, a := range map[dataplane.Family][2]netip.Addr{
		dataplane.IPv4: {netip.MustParseAddr("10.1.0.1"), netip.AddrFrom4([4]byte{10, 2, byte(n >> 8), byte(n)})},
		dataplane.IPv6: {netip.MustParseAddr("fd01::1"), netip.MustParseAddr(fmt.Sprintf("fd02::%x", n))},
	} {
		ts = append(ts, dataplane.Tunnel{Local: a[0], Remote: a[1], SourcePort: sport, Port: 5555, MTU: dataplane.TunnelMTU(f, 1500)})
	}
	return ts
}

// ensureTunnels makes tunnels, and compares the result with the wanted one.
func ensureTunnels(t *testing.T, s *tunnel.Syncer, want []dataplane.Tunnel, result dataplane.Result) map[netip.Addr]tunnel.Link {
	t.Helper()
	links, got, err := s.Ensure(t.Context(), want)
	if err != nil || got != result || len(links) != len(want) {
		t.Errorf("Ensure: %+v, %d links, %v; want %+v", got, len(links), err, result)
	}
	return links
}

func testTunnels(t *testing.T) {
	ns, h := newNetns(t)
	s := tunnel.New(h)
	fixed := tunnels(1, 5555)
	links := ensureTunnels(t, s, fixed, dataplane.Result{Added: 2})
	ensureTunnels(t, s, fixed, dataplane.Result{})
	shown := ns.IP(t, "-d", "-o", "link", "show")
	for _, words := range [][]string{
		{"fou4_0a020001@NONE:", "ipip ipip remote 10.2.0.1 local 10.1.0.1 ttl 225", "encap fou encap-sport 5555 encap-dport 5555", "encap-csum", "mtu 1472", "UNKNOWN", "addrgenmode none"},
		{dataplane.TunnelName(netip.MustParseAddr("fd02::1"), 0) + "@NONE:", "ip6tnl ip6ip6 remote fd02::1 local fd01::1 hoplimit 225 encaplimit none",
			"encap fou encap-sport 5555 encap-dport 5555", "encap-csum6", "mtu 1452", "UNKNOWN", "addrgenmode none"},
	} {
		if !contains(shown, words...) {
			t.Errorf("no link with %q in\n%s", words, shown)
		}
	}
	if addrs := ns.IP(t, "-o", "addr"); strings.Contains(addrs, "fou") {
		t.Errorf("tunnels have addresses:\n%s", addrs)
	}

	// A change is made to the living link.
	auto := tunnels(1, 0)
	auto[0].MTU -= 50
	if changed := ensureTunnels(t, s, auto, dataplane.Result{Replaced: 2}); fmt.Sprint(changed) != fmt.Sprint(links) {
		t.Errorf("links were %v and are %v", links, changed)
	}
	ensureTunnels(t, s, auto, dataplane.Result{})
	if shown := ns.IP(t, "-d", "-o", "link", "show"); !contains(shown, "fou4_0a020001@NONE:", "encap-sport auto") {
		t.Errorf("source port isn't auto:\n%s", shown)
	}
	// Drift comes back, also of several at once.
	ns.IP(t, "link", "set", "fou4_0a020001", "down")
	ns.IP(t, "link", "set", "fou4_0a020001", "mtu", "1300")
	ns.IP(t, "link", "del", dataplane.TunnelName(netip.MustParseAddr("fd02::1"), 0))
	ensureTunnels(t, s, auto, dataplane.Result{Added: 1, Replaced: 1})
	ensureTunnels(t, s, auto, dataplane.Result{})
}

// Objects that Coil 2.x made are changed where they have to be, and not made a second time.
func testTunnelsAdopted(t *testing.T) {
	ns, h := newNetns(t)
	s := tunnel.New(h)
	want := tunnels(1, 5555)
	six := dataplane.TunnelName(netip.MustParseAddr("fd02::1"), 0)
	ns.IP(t, "link", "add", "fou4_0a020001", "type", "ipip", "local", "10.1.0.1", "remote", "10.2.0.1", "ttl", "225", "mode", "any",
		"encap", "fou", "encap-sport", "5555", "encap-dport", "5555")
	ns.IP(t, "link", "add", six, "type", "ip6tnl", "local", "fd01::1", "remote", "fd02::1", "mode", "any", "hoplimit", "225",
		"encap", "fou", "encap-sport", "5555", "encap-dport", "5555")
	ns.IP(t, "link", "set", "fou4_0a020001", "up")
	index, err := h.IndexByName(six)
	if err != nil {
		t.Fatal(err)
	}
	links := ensureTunnels(t, s, want, dataplane.Result{Replaced: 2})
	if l := links[netip.MustParseAddr("fd02::1")]; l.Index != index {
		t.Errorf("link is %v, and was %d", l, index)
	}
	ensureTunnels(t, s, want, dataplane.Result{})
	if shown := ns.IP(t, "-o", "link"); strings.Count(shown, "fou") != 2 {
		t.Errorf("links are:\n%s", shown)
	}
	// The own address is another one now.
	for i := range want {
		want[i].Local = want[i].Local.Next()
	}
	ensureTunnels(t, s, want, dataplane.Result{Replaced: 2})
	ensureTunnels(t, s, want, dataplane.Result{})
}

// Links of others are neither changed nor removed, and don't keep the other tunnels from being made.
func testTunnelsForeign(t *testing.T) {
	ns, h := newNetns(t)
	s := tunnel.New(h)
	ns.IP(t, "link", "add", "fou4_0a020001", "type", "dummy")
	ns.IP(t, "link", "add", "fou4_0a020002", "type", "ipip", "local", "10.1.0.1", "remote", "192.0.2.9")
	ns.IP(t, "link", "add", "other", "type", "ipip", "local", "10.1.0.1", "remote", "10.2.0.3", "ttl", "64")
	before := ns.IP(t, "-d", "-o", "link", "show")
	for n, name := range map[int]string{1: "fou4_0a020001 (dummy", 2: "fou4_0a020002 (ipip", 3: "other (ipip"} {
		want := append(tunnels(n, 0), tunnels(9, 0)...)
		links, _, err := s.Ensure(t.Context(), want)
		if !errors.Is(err, rtnl.ErrExist) || !strings.Contains(err.Error(), name) {
			t.Errorf("error doesn't name %s): %v", name, err)
		}
		if len(links) != 3 {
			t.Errorf("%d tunnels were made beside %s", len(links), name)
		}
	}
	if _, err := s.Prune(t.Context(), nil); err != nil {
		t.Error(err)
	}
	// A tunnel of our kind with our prefix is ours.
	ns.IP(t, "link", "del", "other")
	after := ns.IP(t, "-d", "-o", "link", "show")
	if !contains(before, "fou4_0a020001:", "dummy") || !contains(after, "fou4_0a020001:", "dummy") || strings.Contains(after, "fou4_0a020009") {
		t.Errorf("links were\n%s\nand are\n%s", before, after)
	}
}

// colliding are two addresses with the same name at the first attempt.
var colliding = [2]netip.Addr{netip.MustParseAddr("fd02::45d"), netip.MustParseAddr("fd02::c27e")}

// Two addresses that have the same name have two tunnels.
func testTunnelsColliding(t *testing.T) {
	_, h := newNetns(t)
	s := tunnel.New(h)
	var want []dataplane.Tunnel
	for _, remote := range colliding {
		want = append(want, dataplane.Tunnel{Local: netip.MustParseAddr("fd01::1"), Remote: remote, Port: 5555, MTU: 1452})
	}
	if a, b := dataplane.TunnelName(colliding[0], 0), dataplane.TunnelName(colliding[1], 0); a != b {
		t.Fatalf("names are %s and %s", a, b)
	}
	links := ensureTunnels(t, s, want, dataplane.Result{Added: 2})
	for i, name := range []string{dataplane.TunnelName(colliding[0], 0), dataplane.TunnelName(colliding[1], 1)} {
		if l := links[colliding[i]]; l.Name != name {
			t.Errorf("%s has %s, not %s", colliding[i], l.Name, name)
		}
	}
	// The tunnel that comes first keeps its link.
	want[0], want[1] = want[1], want[0]
	if again := ensureTunnels(t, s, want, dataplane.Result{}); fmt.Sprint(again) != fmt.Sprint(links) {
		t.Errorf("links were %v and are %v", links, again)
	}
	// The one that has gone leaves the other where it is.
	if r, err := s.Prune(t.Context(), want[:1]); err != nil || r.Deleted != 1 {
		t.Errorf("Prune: %+v, %v", r, err)
	}
	ensureTunnels(t, s, want[:1], dataplane.Result{})
	ensureTunnels(t, s, want, dataplane.Result{Added: 1})
}

func testTunnelsMany(t *testing.T) {
	ns, h := newNetns(t)
	s := tunnel.New(h)
	ns.IP(t, "link", "add", "other", "type", "ipip", "local", "10.1.0.1", "remote", "192.0.2.9")
	var want []dataplane.Tunnel
	for n := range 150 {
		for _, w := range tunnels(n+1, 0) {
			w.Alias = fmt.Sprint("pod-", n)
			want = append(want, w)
		}
	}
	ensureTunnels(t, s, want, dataplane.Result{Added: 300})
	ensureTunnels(t, s, want, dataplane.Result{})
	// One by one they would take minutes, of which the kernel waits most.
	var removals []string
	ctx := rtnl.WithTrace(t.Context(), func(r rtnl.Request) error {
		if strings.HasPrefix(r.String(), "link del") {
			removals = append(removals, r.String())
		}
		return nil
	})
	if r, err := s.Prune(ctx, want[:20]); err != nil || r != (dataplane.Result{Deleted: 280}) {
		t.Errorf("Prune: %+v, %v", r, err)
	}
	if len(removals) != 2 {
		t.Errorf("280 tunnels were removed by %d requests: %q", len(removals), removals)
	}
	ensureTunnels(t, s, want[:20], dataplane.Result{})
	ns.IP(t, "link", "show", "other")
}

func testReceivers(t *testing.T) {
	ns, h := newNetns(t)
	for range 2 {
		if _, err := tunnel.New(h).EnsureReceivers(t.Context(), 0, dataplane.IPv4, dataplane.IPv6); err != nil {
			t.Fatal(err)
		}
		shown := ns.IP(t, "-d", "-o", "link", "show", "up")
		for _, name := range []string{"coil_ipip4@NONE:", "coil_ipip6@NONE:"} {
			if !contains(shown, name, "external", "addrgenmode none") {
				t.Errorf("no link %s in\n%s", name, shown)
			}
		}
	}
	if r, err := tunnel.New(h).Prune(t.Context(), nil); err != nil || r.Changed() {
		t.Errorf("Prune: %+v, %v", r, err)
	}
	other, h := newNetns(t)
	other.IP(t, "link", "add", "cilium_ipip4", "type", "ipip", "external")
	_, err := tunnel.New(h).EnsureReceivers(t.Context(), 0, dataplane.IPv4, dataplane.IPv6)
	if !errors.Is(err, rtnl.ErrExist) || !strings.Contains(err.Error(), "cilium_ipip4") {
		t.Errorf("beside another receiver: %v", err)
	}
	if shown := other.IP(t, "-o", "link", "show", "up"); !strings.Contains(shown, "coil_ipip6") {
		t.Errorf("the other family has no receiver:\n%s", shown)
	}
}
