package nft_test

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// Askers alone are told how the router is; its service at other ports is nobody's concern.
func TestRouterTellsAskersAlone(t *testing.T) {
	l := newLab(t)
	l.rules.Ports = []uint16{8080, 8081}
	for _, f := range families {
		a := addr(f, 8, 1)
		l.rules.Askers = append(l.rules.Askers, netip.PrefixFrom(a, a.BitLen()))
	}
	l.sync(dataplane.Result{Added: 1})
	asks := func(n *netnstest.NS, from netip.Addr, to netip.AddrPort, within time.Duration) error {
		return n.Do(func() error {
			dialer := net.Dialer{Timeout: within, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
			conn, err := dialer.Dial("tcp", to.String())
			if err == nil {
				conn.Close()
			}
			return err
		})
	}
	for _, f := range families {
		for _, port := range []uint16{8080, 8081, 8082} {
			to := netip.AddrPortFrom(addr(f, 9, 1), port)
			var listener net.Listener
			testkit.Check(t, l.router.Do(func() (err error) {
				listener, err = net.Listen("tcp", to.String())
				return err
			}))
			defer listener.Close()
			testkit.Check(t, asks(l.server, addr(f, 8, 1), to, timeout), asks(l.router, to.Addr(), to, timeout))
			before := l.count(ruleset.Stranger, f)
			strange := port != 8082
			err := asks(l.server, addr(f, 9, 2), to, map[bool]time.Duration{true: silence, false: timeout}[strange])
			counted := l.count(ruleset.Stranger, f) > before
			if (err != nil) != strange || counted != strange {
				t.Errorf("%s: another asks at port %d: %v, counted: %t", f, port, err, counted)
			}
		}
	}
	l.rules.Askers = nil
	l.sync(dataplane.Result{Replaced: 1})
	if err := asks(l.server, addr(dataplane.IPv4, 8, 1), netip.AddrPortFrom(addr(dataplane.IPv4, 9, 1), 8080), silence); err == nil {
		t.Error("nobody may ask, and it answers")
	}
	l.sync(dataplane.Result{})
}
