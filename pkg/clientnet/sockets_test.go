package clientnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/clientnet/clientnettest"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// outsideAddrs are addresses outside the pod: of an Egress each, and the host's.
var outsideAddrs = []string{"192.0.2.1/32", "192.0.2.129/32", "2001:db8::1/128", "2001:db8::129/128", "fd77::1/128"}

// connection is a connected socket of a pod, and its other end outside.
type connection struct {
	t        *testing.T
	own      net.Conn
	received func(b []byte, until time.Time) (int, error)
}

// dial connects from the pod to an address outside.
func dial(p *pod, out *netnstest.NS, network, addr string) *connection {
	p.T.Helper()
	c := &connection{t: p.T}
	at := net.JoinHostPort(addr, "9")
	var listener net.Listener
	testkit.Check(p.T, out.Do(func() (err error) {
		if network == "tcp" {
			listener, err = net.Listen(network, at)
			return err
		}
		peer, err := net.ListenPacket(network, at)
		if err == nil {
			p.T.Cleanup(func() { peer.Close() })
			c.received = func(b []byte, until time.Time) (int, error) {
				err := peer.SetReadDeadline(until)
				n, _, readErr := peer.ReadFrom(b)
				return n, errors.Join(err, readErr)
			}
		}
		return err
	}))
	testkit.Check(p.T, p.NS.Do(func() (err error) {
		c.own, err = net.DialTimeout(network, at, testkit.Timeout(3*time.Second))
		return err
	}))
	p.T.Cleanup(func() { c.own.Close() })
	if listener != nil {
		peer := testkit.Must(listener.Accept())(p.T)
		p.T.Cleanup(func() { peer.Close(); listener.Close() })
		c.received = func(b []byte, until time.Time) (int, error) {
			err := peer.SetReadDeadline(until)
			n, readErr := peer.Read(b)
			return n, errors.Join(err, readErr)
		}
	}
	testkit.Eventually(p.T, 5*time.Second, "packets arrive before", func() error { return c.arrives("before", time.Second) })
	return c
}

// arrives says that what is sent now comes out at the other end.
func (c *connection) arrives(text string, within time.Duration) error {
	if _, err := c.own.Write([]byte(text)); err != nil {
		return err
	}
	b := make([]byte, 100)
	n, err := c.received(b, time.Now().Add(within))
	if err == nil && !strings.Contains(string(b[:n]), text) {
		err = fmt.Errorf("%q arrives", b[:n])
	}
	return err
}

// mustNotLeave wants that nothing that is sent leaves by eth0.
func (c *connection) mustNotLeave(what string) {
	c.t.Helper()
	for i := range 3 {
		if c.arrives("after", 100*time.Millisecond) == nil {
			c.t.Errorf("%s: packet %d of a connected socket leaves by eth0", what, i+1)
		}
	}
}

// mustRoute is mustUse, without the table of nftables: it drops what routes let out, and the tests
// look at routes.
func mustRoute(p *pod, egresses ...client.Egress) Outcome {
	p.T.Helper()
	out := p.mustUse(egresses...)
	p.removeTable()
	return out
}

// removeTable takes away what holds sockets back that choose their link.
func (p *pod) removeTable() {
	p.T.Helper()
	testkit.Must(p.NS.Run("nft", "delete", "table", "inet", dataplane.NftTable))(p.T)
}

// reference is an Egress for other destinations than those that the tests look at, and more.
func reference(inCluster string, more ...string) client.Egress {
	e := clientnettest.Gateway("net/a", 1, append([]string{"198.51.100.0/24", "2001:db9::/32"}, more...)...)
	if inCluster != "" {
		e.InCluster = []netip.Prefix{netip.MustParsePrefix(inCluster)}
	}
	return e
}

// Connected sockets follow each change, as new ones do: IPv6 doesn't look their routes up again by
// itself when another table gets one.
func TestConnectedSocketsFollow(t *testing.T) {
	other, closed := clientnettest.Gateway("net/b", 2, "192.0.2.0/24", "2001:db8::/32"), clientnettest.Gateway("net/b", 0, "192.0.2.0/24", "2001:db8::/32")
	direct := directly("1 live, 2 live", "192.0.2.0/24", "2001:db8::/32")
	direct.Name = "net/b"
	silent := directly("1 dead, 2 dead", "192.0.2.0/24", "2001:db8::/32")
	silent.Name = "net/b"
	type egresses = []client.Egress
	for _, c := range []struct {
		name          string
		dsts          []string
		before, after egresses
	}{
		{"destination added", []string{"192.0.2.1", "2001:db8::1"}, egresses{reference("")}, egresses{reference("", "192.0.2.0/24", "2001:db8::/32")}},
		{"private destination added", []string{"fd77::1"}, egresses{reference("")}, egresses{reference("", "fd77::/64")}},
		{"everything added", []string{"192.0.2.1", "2001:db8::1"}, egresses{reference("")}, egresses{reference("", "0.0.0.0/0", "::/0")}},
		{"not in the cluster any more", []string{"2001:db8::1"}, egresses{reference("2001:db8::/48", "::/0")}, egresses{reference("", "::/0")}},
		{"IPv4, not in the cluster any more", []string{"192.0.2.1"}, egresses{reference("192.0.2.0/25", "0.0.0.0/0")}, egresses{reference("", "0.0.0.0/0")}},
		{"another Egress", []string{"192.0.2.1", "2001:db8::1"}, egresses{reference("")}, egresses{reference(""), other}},
		{"another Egress at the same Service", []string{"2001:db8::1"}, egresses{reference("")}, egresses{reference(""), clientnettest.Gateway("net/b", 1, "2001:db8::/32")}},
		{"another Egress, not available", []string{"192.0.2.1", "2001:db8::1"}, egresses{reference("")}, egresses{reference(""), closed}},
		{"another Egress, with routers", []string{"192.0.2.1", "2001:db8::1"}, egresses{reference("")}, egresses{reference(""), direct}},
		{"another Egress, with dead routers", []string{"192.0.2.1", "2001:db8::1"}, egresses{reference("")}, egresses{reference(""), silent}},
		{"an Egress with routers gets a destination", []string{"2001:db8::1"}, egresses{directly("1 live", "2001:db9::/32")}, egresses{directly("1 live", "2001:db9::/32", "2001:db8::/32")}},
		{"first Egress", []string{"192.0.2.1", "2001:db8::1"}, nil, egresses{other}},
		{"first Egress, not available", []string{"192.0.2.1", "2001:db8::1"}, nil, egresses{closed}},
	} {
		for _, network := range []string{"udp", "tcp"} {
			for _, dst := range c.dsts {
				t.Run(c.name+"/"+network+"/"+dst, func(t *testing.T) {
					t.Parallel()
					p := newPod(t)
					p.Client.Idle = time.Minute
					out := p.Outside(outsideAddrs...)
					if c.before != nil {
						mustRoute(p, c.before...)
					}
					conn := dial(p, out, network, dst)
					mustRoute(p, c.after...)
					conn.mustNotLeave(c.name)
				})
			}
		}
	}
}

// A change that wasn't finished, whoever began it, is one that sockets may not know.
func TestConnectedSocketsFollowAfterFailure(t *testing.T) {
	p := newPod(t)
	out := p.Outside(outsideAddrs...)
	mustRoute(p, reference(""))
	conn := dial(p, out, "udp", "2001:db8::1")
	// A coild made these, and was killed.
	for _, args := range []string{
		"-6 route add unreachable 2001:db8::/32 table 118 proto 30 metric 4294967295",
		"-6 route add 2001:db8::/32 dev " + dataplane.TunnelName(netip.MustParseAddr("fd96::1"), 0) + " src fd01::5 table 118 proto 30",
	} {
		p.NS.IP(t, strings.Fields(args)...)
	}
	p.Client.Stale = true
	if again := mustRoute(p, reference("", "2001:db8::/32")); again.Rules.Changed() || again.Routes.Changed() {
		t.Errorf("it changed %+v", again)
	}
	conn.mustNotLeave("killed between")
	if rules := p.NS.IP(t, "-6", "rule"); strings.Count(rules, "1900:") != 1 {
		t.Errorf("rules\n%s", rules)
	}

	// A failure in the middle leaves the destinations closed that could be.
	p = newPod(t)
	out = p.Outside(outsideAddrs...)
	mustRoute(p, reference(""))
	conn = dial(p, out, "udp", "2001:db8::1")
	b := clientnettest.Gateway("net/b", 2, "2001:db8::/32")
	p.Links.Broken[b.Peers.IPv6] = true
	if _, err := p.use(t.Context(), reference(""), b); err == nil {
		t.Error("no error of a broken tunnel")
	}
	p.removeTable()
	conn.mustNotLeave("a broken tunnel")
}

// Objects that somebody else destroys are restored for connected sockets, too.
func TestConnectedSocketsFollowRepairs(t *testing.T) {
	for _, destroy := range []string{"-6 route flush 2001:db8::/32 table 118", "-6 rule del priority 2100", "-6 route flush table 118"} {
		t.Run(destroy, func(t *testing.T) {
			p := newPod(t)
			out := p.Outside(outsideAddrs...)
			e := reference("", "2001:db8::/32")
			mustRoute(p, e)
			p.NS.IP(t, strings.Fields(destroy)...)
			conn := dial(p, out, "udp", "2001:db8::1")
			mustRoute(p, e)
			conn.mustNotLeave("restored")
		})
	}
}
