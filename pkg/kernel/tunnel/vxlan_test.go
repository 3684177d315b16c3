//go:build coil_vxlan

package tunnel_test

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/tunnel"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// Tunnels of VXLAN behave as those of FoU: they are made once, come back, and carry packets of either family for whatever destination, although no
// neighbour is known there.
func TestStandIn(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	a, b := netnstest.New(t), netnstest.New(t)
	a.IP(t, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", b.Path)
	both := []struct{ near, far, client, server string }{
		{"10.1.0.1", "10.1.0.2", "10.9.0.1", "192.0.2.1"},
		{"fd01::1", "fd01::2", "fd09::1", "2001:db8::1"},
	}
	for _, f := range both {
		n := netip.MustParseAddr(f.near).BitLen()
		for _, end := range []struct {
			ns            *netnstest.NS
			own, remote   string
			inner, behind string
		}{{a, f.near, f.far, f.client, f.server}, {b, f.far, f.near, f.server, f.client}} {
			end.ns.Configure(t, "link set lo up", "link set eth0 up", fmt.Sprintf("addr add %s/%d dev eth0 nodad", end.own, map[int]int{32: 24, 128: 64}[n]))
			end.ns.Configure(t, fmt.Sprintf("addr add %s/%d dev lo nodad", end.inner, n))
			h, err := rtnl.New(end.ns.NS)
			testkit.Check(t, err)
			defer h.Close()
			s := tunnel.New(h)
			tunnels := []dataplane.Tunnel{{
				Local: netip.MustParseAddr(end.own), Remote: netip.MustParseAddr(end.remote), SourcePort: 5555, Port: 5555, MTU: dataplane.TunnelMTU(dataplane.FamilyOf(netip.MustParseAddr(end.own)), 1500),
			}}
			testkit.Must(s.EnsureReceivers(t.Context(), 1400, dataplane.FamilyOf(tunnels[0].Local)))(t)
			for _, want := range []dataplane.Result{{Added: 1}, {}} {
				links, got, err := s.Ensure(t.Context(), tunnels)
				if err != nil || got != want || links[tunnels[0].Remote].Name != dataplane.TunnelName(tunnels[0].Remote, 0) {
					t.Fatalf("Ensure of %s: %v, %+v, %v; want %+v", tunnels[0], links, got, err, want)
				}
			}
			// As a process leaves it that ends while it makes a tunnel.
			name := dataplane.TunnelName(tunnels[0].Remote, 0)
			end.ns.IP(t, "link", "set", name, "down")
			testkit.Must(end.ns.Run("tc", "qdisc", "del", "dev", name, "clsact"))(t)
			if _, got, err := s.Ensure(t.Context(), tunnels); err != nil || got != (dataplane.Result{Replaced: 1}) {
				t.Fatalf("Ensure of a tunnel that is half made: %+v, %v", got, err)
			}
			testkit.Must(s.Check(t.Context(), tunnels))(t)
			end.ns.Configure(t, fmt.Sprintf("route add %s dev %s src %s", end.behind, dataplane.TunnelName(tunnels[0].Remote, 0), end.inner))
		}
	}
	for _, f := range both {
		l := testkit.Must(b.Lab().Listen(t.Context(), "tcp", net.JoinHostPort(f.server, "80")))(t)
		defer l.Close()
		go func() {
			if conn, err := l.Accept(); err == nil {
				fmt.Fprint(conn, conn.RemoteAddr())
				conn.Close()
			}
		}()
		testkit.Eventually(t, 5*time.Second, "a connection by the tunnel", func() error {
			conn, err := a.Lab().Dial(t.Context(), "tcp", net.JoinHostPort(f.server, "80"))
			if err != nil {
				return err
			}
			return conn.Close()
		})
	}
	for _, ns := range []*netnstest.NS{a, b} {
		h, err := rtnl.New(ns.NS)
		testkit.Check(t, err)
		defer h.Close()
		s := tunnel.New(h)
		if links := testkit.Must(s.Links(t.Context()))(t); len(links) != 2 {
			t.Errorf("links are %v", links)
		}
		if r := testkit.Must(s.Prune(t.Context(), nil))(t); r.Deleted != 2 {
			t.Errorf("pruned %+v", r)
		}
		testkit.Check(t, s.RemoveReceivers(t.Context()))
	}
}
