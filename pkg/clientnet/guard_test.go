package clientnet

import (
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/clientnet/clientnettest"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// guarded is a pod whose program has taken away all that Coil has in its network namespace, and its
// node, which has all addresses that the pod sends to.
type guarded struct {
	*pod
	node *netnstest.NS
	host *podnet.Network
	ear  net.PacketConn
}

var guardedEnds = []string{"192.0.2.1", "2001:db8::1", "198.51.100.1", "2001:db8:1::1"}

func newGuarded(t *testing.T) *guarded {
	g := &guarded{pod: newPod(t)}
	g.node = g.Outside(guardedEnds...)
	g.host = g.agent()
	g.network = New(dataplane.ProtocolNode, g.Links, g.host)
	testkit.Check(t, g.node.Do(func() (err error) {
		g.ear, err = net.ListenPacket("udp", ":7000")
		return err
	}))
	t.Cleanup(func() { g.ear.Close() })
	return g
}

// agent is a coild of the node.
func (g *guarded) agent() *podnet.Network {
	n := testkit.Must(podnet.New(podnet.Options{PodTable: 116, RulePriority: 2000, Protocol: dataplane.ProtocolNode, Netns: g.node.Path}))(g.T)
	g.T.Cleanup(func() { testkit.Check(g.T, n.Close()) })
	return n
}

// takeAway is what a program with CAP_NET_ADMIN can do to its pod.
func (g *guarded) takeAway() {
	g.T.Helper()
	testkit.Must(g.NS.Run("sh", "-c", "nft flush ruleset; for f in -4 -6; do ip $f route flush table 117; ip $f route flush table 118; done 2>/dev/null; true"))(g.T)
}

// leaves says whether a datagram to an address comes out of the pod.
func (g *guarded) leaves(dst string) error {
	conn, err := func() (conn net.Conn, err error) {
		err = g.NS.Do(func() (err error) {
			conn, err = net.Dial("udp", net.JoinHostPort(dst, "7000"))
			return err
		})
		return conn, err
	}()
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(dst)); err != nil {
		return err
	}
	b := make([]byte, 50)
	for {
		if err := g.ear.SetReadDeadline(time.Now().Add(testkit.Timeout(200 * time.Millisecond))); err != nil {
			return err
		}
		n, _, err := g.ear.ReadFrom(b)
		if err != nil || string(b[:n]) == dst { // not a late one of before
			return err
		}
	}
}

// wantLeaving wants that datagrams to some of the ends come out of the pod, and to no others.
func (g *guarded) wantLeaving(when string, ends ...string) {
	g.T.Helper()
	for _, dst := range guardedEnds {
		if strings.Contains(strings.Join(ends, " ")+" ", dst+" ") {
			testkit.Eventually(g.T, 3*time.Second, when+": a datagram to "+dst+" arrives", func() error { return g.leaves(dst) })
		} else if err := g.leaves(dst); err == nil {
			g.T.Errorf("%s: a datagram to %s comes out of the pod", when, dst)
		}
	}
}

// Packets that a pod sends past its tunnels end at the node, whatever a program in it does.
func TestNodeGuardsClients(t *testing.T) {
	g := newGuarded(t)
	a, b := clientnettest.Gateway("net/a", 1, "192.0.2.0/24", "2001:db8::/64"), clientnettest.Gateway("net/b", 2, "198.51.100.0/24", "2001:db8:1::/64")
	g.mustUse(a)
	testkit.Check(t, g.check(g.mustUse(a).State))
	g.takeAway()
	g.wantLeaving("with Egress a", guardedEnds[2:]...)
	if d := testkit.Must(g.host.Dropped(t.Context()))(t)[ruleset.PastTunnel]; d[dataplane.IPv4] == 0 || d[dataplane.IPv6] == 0 {
		t.Errorf("counted are %v", d)
	}
	g.mustUse(a, b)
	g.takeAway()
	g.wantLeaving("with both")
	g.mustUse(b)
	g.takeAway()
	g.wantLeaving("with Egress b", guardedEnds[:2]...)
	made := g.mustUse(b).State
	testkit.Check(t, g.check(made))

	// A failure in the pod, which a program there may cause, opens nothing.
	g.Links.Broken[a.Peers.IPv4] = true
	if _, err := g.use(t.Context(), a); err == nil {
		t.Error("a tunnel that can't be made is no error")
	}
	g.takeAway()
	g.wantLeaving("when the change to Egress a fails", guardedEnds[2:]...)
	clear(g.Links.Broken)
	g.mustUse(b)

	// Somebody takes away what the node has: CHECK tells, and it comes back.
	testkit.Must(g.node.Run("nft", "flush", "ruleset"))(t)
	if err := g.check(made); err == nil || !strings.Contains(err.Error(), "table coil of nftables is missing") {
		t.Errorf("CHECK without the node's table: %v", err)
	}
	g.takeAway()
	g.wantLeaving("control: without the node's table", guardedEnds...)
	if out := testkit.Must(g.host.Guard(t.Context()))(t); !out.Changed() {
		t.Error("the node's table isn't repaired")
	}
	g.wantLeaving("repaired", guardedEnds[:2]...)

	// Another coild knows what the last one wanted, before it knows the pod.
	network := g.agent()
	if out := testkit.Must(network.Guard(t.Context()))(t); out.Changed() {
		t.Errorf("another coild changed %+v", out)
	}
	g.wantLeaving("after a restart", guardedEnds[:2]...)
	g.network = New(dataplane.ProtocolNode, g.Links, network)
	g.mustUse()
	g.wantLeaving("without an Egress", guardedEnds...)
	if out := testkit.Must(g.node.Run("nft", "list", "ruleset"))(t); out != "" {
		t.Errorf("left on the node:\n%s", out)
	}
}

// Hosts outside are answered by the way that their packets came, and nothing is sent there by another way.
func TestNodeLetsAnswersThrough(t *testing.T) {
	g := newGuarded(t)
	e := clientnettest.Gateway("net/a", 1, "192.0.2.0/24", "2001:db8::/64")
	e.OriginatingOnly = true
	g.mustUse(e)
	g.takeAway()
	g.wantLeaving("by itself", guardedEnds[2:]...)
	for _, ends := range [][2]string{{"192.0.2.1", "10.1.0.5"}, {"2001:db8::1", "fd01::5"}} {
		var server net.PacketConn
		var client net.Conn
		testkit.Check(t, g.NS.Do(func() (err error) {
			server, err = net.ListenPacket("udp", net.JoinHostPort(ends[1], "53"))
			return err
		}), g.node.Do(func() (err error) {
			dialer := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(ends[0])}}
			client, err = dialer.Dial("udp", net.JoinHostPort(ends[1], "53"))
			return err
		}))
		defer server.Close()
		defer client.Close()
		testkit.Eventually(t, 3*time.Second, ends[0]+" gets an answer", func() error {
			soon := time.Now().Add(testkit.Timeout(200 * time.Millisecond))
			b := make([]byte, 10)
			if _, err := client.Write([]byte("?")); err != nil {
				return err
			}
			if err := errors.Join(server.SetReadDeadline(soon), client.SetReadDeadline(soon)); err != nil {
				return err
			}
			_, from, err := server.ReadFrom(b)
			if err != nil {
				return err
			}
			if _, err = server.WriteTo([]byte("!"), from); err != nil {
				return err
			}
			_, err = client.Read(b)
			return err
		})
	}
	g.wantLeaving("by itself, afterwards", guardedEnds[2:]...)
}

// The guard follows its Egresses whatever a program in the pod does to the pod's links, and goes with the
// link. It is found by the marks of the node's end or, where another plugin made that, by the routes there.
func TestGuardOfRenamedLinks(t *testing.T) {
	a, b := clientnettest.Gateway("net/a", 1, "192.0.2.0/24", "2001:db8::/64"), clientnettest.Gateway("net/b", 2, "198.51.100.0/24", "2001:db8:1::/64")
	for name, wired := range map[string]bool{"coild's link": true, "another plugin's link": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newGuarded(t)
			g.Client.ContainerID, g.Client.Wired = "c1", wired
			if wired {
				g.node.IP(t, "link", "set", "outside", "alias", "COIL:default:c1:eth0")
				g.node.IP(t, "link", "property", "add", "dev", "outside", "altname", "coil-c1-eth0")
				g.node.IP(t, "route", "del", "10.1.0.5")
				g.node.IP(t, "-6", "route", "del", "fd01::5")
			}
			g.mustUse(a)
			g.NS.IP(t, "link", "set", "eth0", "down") // older kernels rename no link that is up
			g.NS.IP(t, "link", "set", "eth0", "name", "real")
			g.NS.IP(t, "link", "add", "eth0", "type", "veth", "peer", "name", "inner")
			for _, args := range []string{"link set real up", "route replace 169.254.1.1 dev real", "route replace default via 169.254.1.1 dev real", "-6 route replace default via fe80::1 dev real"} {
				g.NS.IP(t, strings.Fields(args)...)
			}
			_, _ = g.use(t.Context(), b)
			g.takeAway()
			g.wantLeaving("with Egress b", guardedEnds[:2]...)
			g.NS.IP(t, "link", "del", "eth0")
			if _, err := g.use(t.Context(), a, b); err == nil {
				t.Error("a client without its link is no error")
			}
			g.takeAway()
			g.wantLeaving("with both")
			g.mustUse()
			g.wantLeaving("without an Egress", guardedEnds...)
			_, _ = g.use(t.Context(), a)
			g.node.IP(t, "link", "del", "outside")
			testkit.Must(g.host.Guard(t.Context()))(t)
			if out := testkit.Must(g.node.Run("nft", "list", "ruleset"))(t); out != "" {
				t.Errorf("the guard of a link that is gone:\n%s", out)
			}
			if _, err := g.use(t.Context(), a); errors.Is(err, ErrUnguarded) != wired {
				t.Errorf("without the node's end: %v", err)
			}
		})
	}
}

// A link of the node that leads elsewhere is no pod's, whatever routes say.
func TestHostLinkLeadsToThePod(t *testing.T) {
	g := newGuarded(t)
	id := attachment.ID{ContainerID: "c1", IfName: "eth0"}
	link := testkit.Must(g.host.HostLink(t.Context(), id, g.NS.NS, g.Client.Address))(t)
	if l := testkit.Must(g.host.Handle().LinkByName(t.Context(), "outside"))(t); l.Index != link {
		t.Errorf("the link is %d, not %d", link, l.Index)
	}
	if _, err := g.host.HostLink(t.Context(), id, netnstest.New(t).NS, g.Client.Address); !errors.Is(err, podnet.ErrNoHostLink) {
		t.Errorf("a link of another namespace: %v", err)
	}
	for _, way := range []string{"unreachable", "blackhole"} {
		g.node.IP(t, "route", "replace", way, "10.1.0.5")
		if _, err := g.host.HostLink(t.Context(), id, g.NS.NS, ipam.Address{IPv4: g.Client.Address.IPv4}); !errors.Is(err, podnet.ErrNoHostLink) {
			t.Errorf("a route of the type %s: %v", way, err)
		}
	}
}
