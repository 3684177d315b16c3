package flows

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// The time between words, and the server's and the client's addresses.
const every = 50 * time.Millisecond

var (
	servers = []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:7000"), netip.MustParseAddrPort("[2001:db8::1]:7000")}
	clients = []netip.Addr{netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::2")}
)

// lab is a client and a server on one link, and flows between them.
type lab struct {
	*Set
	t              *testing.T
	client, server *netnstest.NS
	guard          *Guard
}

func newLab(t *testing.T, n int) *lab {
	l := &lab{t: t, client: netnstest.New(t), server: netnstest.New(t)}
	l.client.Configure(t, "link add eth0 type veth peer name eth0 netns "+l.server.Path, "link set eth0 up",
		"addr add 192.0.2.2/24 dev eth0", "addr add 192.0.2.3/24 dev eth0", "addr add 2001:db8::2/64 dev eth0 nodad")
	l.server.Configure(t, "link set eth0 up", "addr add 192.0.2.1/24 dev eth0", "addr add 2001:db8::1/64 dev eth0 nodad")
	l.Set = testkit.Must(Serve(t.Context(), l.server.Lab(), every, servers...))(t)
	t.Cleanup(func() { testkit.Check(t, l.Close()) })
	l.guard = testkit.Must(NewGuard(t.Context(), l.server.Lab(), 7000, clients...))(t)
	testkit.Check(t, l.Open(t.Context(), l.client.Lab(), n))
	return l
}

// spoil has nft do something in the client's network namespace.
func (l *lab) spoil(commands ...string) {
	l.t.Helper()
	testkit.Must(l.client.Run("nft", strings.Join(commands, "; ")))(l.t)
}

// talked waits until all flows have delivered something from now on.
func (l *lab) talked() {
	l.t.Helper()
	now := time.Now()
	testkit.Eventually(l.t, 20*time.Second, "all flows talk", func() error { return l.Talked(now) })
}

// lasts lets a fault last for some time.
func lasts(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// Flows that nothing happens to are reported so.
func TestTalk(t *testing.T) {
	l := newLab(t, 10)
	l.talked()
	l.talked()
	moment := time.Now()
	l.talked()
	l.talked()
	r := l.Since(moment)
	if r.Flows != 20 || len(r.Broken) > 0 || fmt.Sprint(r.Sources) != fmt.Sprint(clients) {
		t.Errorf("%s: %v", r, r.Broken)
	}
	if r.Longer().Before <= 0 || r.Longer().Since <= 0 {
		t.Errorf("no pauses: %s", r)
	}
	testkit.Check(t, l.guard.Check(t.Context()))
}

// A silence is a pause of each flow, while it lasts and when it is over.
func TestPause(t *testing.T) {
	l := newLab(t, 5)
	l.talked()
	l.spoil("add table inet t", "add chain inet t in { type filter hook input priority 0; policy drop; }")
	moment := time.Now()
	lasts(t, time.Second)
	r := l.Since(moment)
	if len(r.Broken) > 0 || r.Longer().Since < 800*time.Millisecond {
		t.Errorf("during a silence of 1s: %s", r)
	}
	if err := l.Talked(moment.Add(500 * time.Millisecond)); err == nil || !strings.Contains(err.Error(), "10 of 10 flows are silent") {
		t.Errorf("during a silence: %v", err)
	}
	l.spoil("delete table inet t")
	l.talked()
	if r = l.Since(moment); len(r.Broken) > 0 || r.Longer().Since < time.Second || r.Longer().More() < 800*time.Millisecond-r.Longer().Before {
		t.Errorf("after a silence of 1s: %s", r)
	}
	testkit.Check(t, l.guard.Check(t.Context()))
}

// Connections that are reset are broken, by whichever end it is noticed.
func TestReset(t *testing.T) {
	l := newLab(t, 2)
	l.spoil("add table ip t", "add chain ip t out { type filter hook output priority 0; }", "add rule ip t out tcp dport 7000 reject with tcp reset")
	testkit.Eventually(t, 20*time.Second, "the flows of one family are broken", func() error {
		if r := l.Since(time.Now()); len(r.Broken) != 2 {
			return fmt.Errorf("%d are", len(r.Broken))
		}
		return nil
	})
}

// A segment that resets a connection, and a packet with another source, are noticed where the server is, even if nobody else is.
func TestGuard(t *testing.T) {
	l := newLab(t, 1)
	testkit.Check(t, l.guard.Check(t.Context()))
	if _, err := l.client.Lab().Dial(t.Context(), "tcp", "192.0.2.1:7001"); err == nil {
		t.Fatal("a port without a server is open")
	}
	if err := l.guard.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "1 resets") || strings.Contains(err.Error(), "packets from") {
		t.Errorf("a port is closed: %v", err)
	}
	l.spoil("add table ip t", "add chain ip t nat { type nat hook postrouting priority 100; }", "add rule ip t nat tcp dport 7000 snat to 192.0.2.3")
	other := testkit.Must(l.client.Lab().Dial(t.Context(), "tcp", "192.0.2.1:7000"))(t)
	defer other.Close()
	if err := l.guard.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "packets from 192.0.2.3") {
		t.Errorf("a connection has another source: %v", err)
	}
}
