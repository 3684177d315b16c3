package nft_test

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/rule"
	"github.com/coil-net/coil/pkg/plan/gateway"
	"github.com/coil-net/coil/pkg/testkit"
)

// route gives the router the rules that it has beside the table.
func (l *lab) route() {
	l.t.Helper()
	h := testkit.Must(rtnl.New(l.router.NS))(l.t)
	l.t.Cleanup(h.Close)
	_, rules := gateway.State{Config: gateway.Config{Addresses: l.rules.Addresses, Uplink: "eth0"}}.Routes(nil)
	testkit.Must(rule.New(h, dataplane.ProtocolNode, dataplane.RouterPriorities...).Sync(l.t.Context(), rules))(l.t)
}

// Without its table the router forwards nothing, in neither direction, and itself sends as before.
func TestWithoutTableNothingIsForwarded(t *testing.T) {
	for _, damage := range []string{"delete table inet coil", "flush ruleset"} {
		t.Run(damage, func(t *testing.T) {
			l := newLab(t)
			l.route()
			l.sync(dataplane.Result{Added: 1})
			opened := map[dataplane.Family]*net.UDPConn{}
			servers := map[dataplane.Family]*net.UDPConn{}
			for _, f := range families {
				servers[f] = l.receiver(addr(f, 9, 2))
				opened[f] = l.dial(l.clients[0], servers[f])
				testkit.Must(opened[f].Write([]byte("question")))(t)
				from := receive(t, servers[f])
				testkit.Must(servers[f].WriteToUDPAddrPort([]byte("answer"), from))(t)
				receive(t, opened[f])
			}
			l.run(l.router, "nft", damage)
			l.watch()
			for _, f := range families {
				_, err := opened[f].Write([]byte("more"))
				testkit.Check(t, err)
				testkit.Must(l.dial(l.clients[1], servers[f]).Write([]byte("opens")))(t)
				if err := l.clients[0].Ping(addr(f, 9, 2), silence); err == nil {
					t.Errorf("%s: a client gets through", f)
				}
				if err := l.server.Ping(addr(f, 1, 1), silence); err == nil {
					t.Errorf("%s: the server gets through to a client", f)
				}
				testkit.Check(t, l.router.Ping(addr(f, 9, 2), timeout), l.server.Ping(addr(f, 9, 1), timeout))
			}
			l.sound()
			l.run(l.router, "nft", "delete table inet seen")
			l.sync(dataplane.Result{Added: 1})
			for _, f := range families {
				testkit.Check(t, l.clients[0].Ping(addr(f, 9, 2), timeout))
			}
		})
	}
}

// While the table goes and comes, not one packet of a client leaves with its own address.
func TestTableComesAndGoes(t *testing.T) {
	l := newLab(t)
	l.route()
	l.sync(dataplane.Result{Added: 1})
	l.watch()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var group errgroup.Group
	var sent atomic.Int64
	for _, f := range families {
		to := l.receiver(addr(f, 9, 2))
		for _, client := range l.clients {
			conn := l.dial(client, to)
			group.Go(func() error {
				for ctx.Err() == nil {
					// While nothing is forwarded, the sender may be told.
					if _, err := conn.Write([]byte("x")); err == nil {
						sent.Add(1)
					}
				}
				return nil
			})
		}
	}
	for range 20 {
		before := sent.Load()
		l.run(l.router, "nft", "delete table inet coil")
		testkit.Eventually(t, timeout, "clients send", func() error {
			if n := sent.Load() - before; n < 100 {
				return fmt.Errorf("%d packets", n)
			}
			return nil
		})
		l.sync(dataplane.Result{Added: 1})
	}
	stop()
	testkit.Check(t, group.Wait())
	l.sound()
	t.Logf("%d packets were sent", sent.Load())
}

// Answers to clients that were given a port of the router's own find their way, too.
func TestAnswersToTheRoutersPorts(t *testing.T) {
	l := newLab(t)
	l.route()
	l.rules.HealthPort = 8081
	l.sync(dataplane.Result{Added: 1})
	l.run(l.router, "nft", strings.Join([]string{
		"add table inet first", "add chain inet first nat { type nat hook postrouting priority 90; }",
		"add rule inet first nat oifname eth0 ip saddr 10.1.0.0/16 ip protocol udp snat ip to 10.9.0.1:5555",
		"add rule inet first nat oifname eth0 ip6 saddr fd00:1::/32 meta l4proto udp snat ip6 to [fd00:9::1]:5555",
	}, "; "))
	for _, f := range families {
		to := l.receiver(addr(f, 9, 2))
		conn := l.dial(l.clients[0], to)
		testkit.Must(conn.Write([]byte("question")))(t)
		from := receive(t, to)
		if want := netip.AddrPortFrom(addr(f, 9, 1), 5555); from != want {
			t.Fatalf("the server sees %s, want %s", from, want)
		}
		testkit.Must(to.WriteToUDPAddrPort([]byte("answer"), from))(t)
		receive(t, conn)
	}
}
