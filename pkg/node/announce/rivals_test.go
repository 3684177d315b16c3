package announce

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/coil-net/coil/pkg/kernel/announce"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/testkit"
)

// says lets the host say that addresses are at it, or at a MAC address of another.
func (s *site) says(t *testing.T, mac string, addrs ...netip.Addr) {
	t.Helper()
	l := testkit.Must(netns.In(s.host.NS, func() (*net.Interface, error) { return net.InterfaceByName("eth0") }))(t)
	if mac != "" {
		l.HardwareAddr = testkit.Must(net.ParseMAC(mac))(t)
	}
	for _, a := range addrs {
		testkit.Check(t, announce.Send(s.host.NS, []announce.Announcement{{Link: l.Index, MAC: l.HardwareAddr, Addr: a}}))
	}
}

// told says whether there was a rival for an address with a MAC address.
func (s *site) told(a netip.Addr, mac string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.rivals, func(r Rival) bool { return r.Addr == a && r.MAC == mac })
}

// What other hosts say about addresses of the node is told, while it answers for them: and nothing that the node itself says, which
// it hears if two of its links are in one network.
func TestRivals(t *testing.T) {
	s := newSite(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- s.Run(ctx) }()
	second, third := netip.MustParseAddr("192.0.2.201"), "02:00:00:00:53:03"
	s.sync(t, append(slices.Clone(podHas), of("lan:192.0.2.201")...)...)
	until := func(a netip.Addr, mac string) {
		t.Helper()
		testkit.Eventually(t, 10*time.Second, fmt.Sprintf("a rival for %s is told", a), func() error {
			s.says(t, mac, a)
			if !s.told(a, mac) {
				return errors.New("none")
			}
			return nil
		})
	}
	for _, a := range []netip.Addr{v4, v6} {
		until(a, "02:00:00:00:53:01")
	}
	own := s.mac(t, testkit.Must(s.cfg.Handle.IndexByName("eth0"))(t))
	s.says(t, own, v4)
	s.says(t, "02:00:00:00:53:02", netip.MustParseAddr("192.0.2.99"))
	until(second, "02:00:00:00:53:02")
	if s.told(v4, own) || s.told(netip.MustParseAddr("192.0.2.99"), "02:00:00:00:53:02") {
		t.Errorf("rivals are %v", s.rivals)
	}
	if got := testutil.ToFloat64(s.Keeper.rivals.WithLabelValues("IPv4")); got < 2 {
		t.Errorf("%v packets are counted", got)
	}

	// Repeat announces what is held.
	s.sent = nil
	s.Repeat(t.Context(), v4, netip.MustParseAddr("192.0.2.99"))
	if fmt.Sprint(s.sent) != "[192.0.2.200]" {
		t.Errorf("repeated are %v", s.sent)
	}

	// Given up.
	testkit.Check(t, s.Withdraw(t.Context(), v4))
	s.says(t, third, v4)
	until(second, third)
	if s.told(v4, third) {
		t.Error("a rival for an address that was given up is told")
	}
	s.sync(t)
	cancel()
	testkit.Check(t, <-ended)
}
