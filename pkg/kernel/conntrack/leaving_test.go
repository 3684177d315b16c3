package conntrack

import (
	"fmt"
	"maps"
	"net/netip"
	"testing"

	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

func TestLeaving(t *testing.T) {
	ns := netnstest.New(t)
	c := table(t, ns)
	one, other, six := netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("10.9.0.2"), netip.MustParseAddr("fd09::1")
	n := 0
	add := func(times int, state, client, to, translated string) {
		t.Helper()
		for range times {
			n++
			run(t, ns, "-I", "-p", "tcp", "-t", "600", "--orig-src", client, "--orig-dst", to, "--sport", fmt.Sprint(1000+n), "--dport", "443",
				"--reply-src", to, "--reply-dst", translated, "--reply-port-src", "443", "--reply-port-dst", fmt.Sprint(20000+n), "--state", state)
		}
	}
	add(3, "ESTABLISHED", "10.1.0.1", "192.0.2.1", one.String())
	add(1, "ESTABLISHED", "10.1.0.2", "192.0.2.2", one.String())
	add(2, "TIME_WAIT", "10.1.0.2", "192.0.2.2", one.String())
	add(2, "ESTABLISHED", "10.1.0.1", "192.0.2.1", other.String())
	add(5, "ESTABLISHED", "fd01::1", "2001:db8::1", six.String())
	add(2, "ESTABLISHED", one.String(), "192.0.2.3", one.String()) // the router's own
	got, err := c.Leaving(t.Context(), one, six)
	if want := (map[netip.Addr]int{one: 4, six: 5}); err != nil || !maps.Equal(got, want) {
		t.Errorf("connections leave by %v, %v; want %v", got, err, want)
	}
}
