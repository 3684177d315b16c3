package conntrack

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

func TestUses(t *testing.T) {
	ns := netnstest.New(t)
	c := table(t, ns)
	own4, own6 := netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("fd09::1")
	n := 0
	add := func(times int, protocol, client, to, port, translated string) {
		t.Helper()
		for range times {
			n++
			sport := fmt.Sprint(1000 + n)
			args := []string{"-I", "-p", protocol, "-t", "600", "--orig-src", client, "--orig-dst", to, "--sport", sport, "--dport", port,
				"--reply-src", to, "--reply-dst", translated, "--reply-port-src", port, "--reply-port-dst", fmt.Sprint(20000 + n)}
			if protocol == "tcp" {
				args = append(args, "--state", "ESTABLISHED")
			}
			run(t, ns, args...)
		}
	}
	add(3, "udp", "10.1.0.1", "192.0.2.1", "53", own4.String())
	add(2, "tcp", "10.1.0.2", "192.0.2.1", "443", own4.String())
	add(1, "udp", "10.1.0.2", "192.0.2.1", "53", own4.String())
	add(5, "tcp", "fd01::1", "2001:db8::1", "443", own6.String())
	add(1, "udp", "10.1.0.3", "192.0.2.2", "53", own4.String())
	add(7, "udp", "10.1.0.4", "192.0.2.3", "53", "10.9.0.99") // another's address
	add(7, "udp", own4.String(), "192.0.2.4", "53", own4.String())

	want := []Use{
		{unix.IPPROTO_TCP, netip.MustParseAddrPort("[2001:db8::1]:443"), 5},
		{unix.IPPROTO_UDP, netip.MustParseAddrPort("192.0.2.1:53"), 4},
		{unix.IPPROTO_TCP, netip.MustParseAddrPort("192.0.2.1:443"), 2},
	}
	if got, err := c.Uses(t.Context(), 3, own4, own6); err != nil || !slices.Equal(got, want) {
		t.Errorf("uses are %v, %v; want %v", got, err, want)
	}
	if got, err := c.Uses(t.Context(), 10, own4, own6); err != nil || len(got) != 4 {
		t.Errorf("all uses are %v, %v", got, err)
	}
	// Each address has ports of its own.
	add(3, "udp", "10.1.0.9", "192.0.2.1", "53", "10.9.0.2")
	add(6, "udp", "10.1.0.9", "192.0.2.2", "53", "10.9.0.2")
	want[1] = Use{unix.IPPROTO_UDP, netip.MustParseAddrPort("192.0.2.2:53"), 6}
	slices.SortFunc(want, func(a, b Use) int { return b.Ports - a.Ports })
	want[2] = Use{unix.IPPROTO_UDP, netip.MustParseAddrPort("192.0.2.1:53"), 4}
	if got, err := c.Uses(t.Context(), 3, own4, own6, netip.MustParseAddr("10.9.0.2")); err != nil || !slices.Equal(got, want) {
		t.Errorf("uses of three addresses are %v, %v; want %v", got, err, want)
	}
	add(1, "udp", "10.1.0.2", "192.0.2.9", "53", own4.String())
	n++
	run(t, ns, "-I", "-p", "tcp", "-t", "600", "--orig-src", "10.1.0.2", "--orig-dst", "192.0.2.1", "--sport", "999", "--dport", "443",
		"--reply-src", "192.0.2.1", "--reply-dst", own4.String(), "--reply-port-src", "443", "--reply-port-dst", "19999", "--state", "TIME_WAIT")
	clients := map[netip.Addr]int{}
	for addr, n := range map[string]int{"10.1.0.1": 3, "10.1.0.2": 4, "10.1.0.3": 1, "fd01::1": 5} {
		clients[netip.MustParseAddr(addr)] = n
	}
	if got, err := c.Clients(t.Context(), own4, own6); err != nil || !maps.Equal(got, clients) {
		t.Errorf("clients have %v, %v; want %v", got, err, clients)
	}
	if count, limit, err := c.Size(); err != nil || count != n || limit < n {
		t.Errorf("%d of %d flows, %v; want %d", count, limit, err, n)
	}
	if s, err := c.Stats(t.Context()); err != nil || s.Dropped != 0 {
		t.Errorf("statistics are %+v, %v", s, err)
	}
}
