package floatingtest

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// Path is a node with a pod, and a host that sends to addresses of the pod by the node. The node's links are "pod" and "uplink".
type Path struct {
	T               *testing.T
	Host, Node, Pod *netnstest.NS
	Handle          *rtnl.Handle // of the node
	Link            int          // "pod"
}

// NewPath returns a Path that ends with the test.
func NewPath(t *testing.T) *Path {
	l := &Path{T: t, Host: netnstest.New(t), Node: netnstest.New(t), Pod: netnstest.New(t)}
	ctx := t.Context()
	testkit.Check(t,
		l.Node.Lab().Forward(),
		l.Node.Lab().IP(ctx,
			fmt.Sprintf("link add uplink type veth peer name eth0 netns %s", l.Host.Lab().Path()),
			fmt.Sprintf("link add pod type veth peer name eth0 netns %s", l.Pod.Lab().Path()),
			"link set uplink up", "link set pod up",
			"addr add 10.0.0.1/24 dev uplink", "addr add fd00::1/64 dev uplink nodad",
			"addr add 10.0.1.1/24 dev pod", "addr add fd00:1::1/64 dev pod nodad",
			"rule add priority 2000 table 116", "-6 rule add priority 2000 table 116"),
		l.Host.Lab().IP(ctx, "link set eth0 up", "addr add 10.0.0.2/24 dev eth0", "addr add fd00::2/64 dev eth0 nodad",
			"route add default via 10.0.0.1", "-6 route add default via fd00::1"),
		l.Pod.Lab().IP(ctx, "link set eth0 up", "addr add 10.0.1.2/24 dev eth0", "addr add fd00:1::2/64 dev eth0 nodad",
			"addr add 192.0.2.7/32 dev lo", "addr add 2001:db8::7/128 dev lo nodad", "route add default via 10.0.1.1", "-6 route add default via fd00:1::1"),
	)
	l.Handle = testkit.Must(rtnl.New(l.Node.NS))(t)
	t.Cleanup(l.Handle.Close)
	l.Link = testkit.Must(l.Handle.IndexByName("pod"))(t)
	return l
}

// Order asks to answer for an address of a number, by the pod "router".
func Order(n byte, lasts time.Duration) floating.Order {
	return floating.Order{
		Address: floating.Address{
			ID: fmt.Sprint("u", n), Block: fmt.Sprint("p-", n), Pod: "router",
			Address: ipam.Address{IPv4: netip.AddrFrom4([4]byte{192, 0, 2, n}), IPv6: netip.MustParseAddr(fmt.Sprintf("2001:db8::%d", n))},
		},
		Epoch: 3, Until: time.Now().Add(lasts),
	}
}

// Passes returns an error unless packets to an address reach the pod, or with pass false if they do.
func (l *Path) Passes(a netip.Addr, pass bool) error {
	var hears, sends net.PacketConn
	err := errors.Join(l.Pod.Do(func() (err error) {
		hears, err = net.ListenPacket("udp", netip.AddrPortFrom(a, 0).String())
		return err
	}), l.Host.Do(func() (err error) {
		sends, err = net.ListenPacket("udp", ":0")
		return err
	}))
	if err != nil {
		return err
	}
	defer hears.Close()
	defer sends.Close()
	if _, err := sends.WriteTo([]byte("x"), hears.LocalAddr()); err != nil {
		return err
	}
	if err := hears.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		return err
	}
	_, _, err = hears.ReadFrom(make([]byte, 1))
	if (err == nil) != pass {
		return fmt.Errorf("a packet to %s arrives: %t", a, err == nil)
	}
	return nil
}

// Await waits until packets to the address of an order reach the pod, or don't.
func (l *Path) Await(o floating.Order, pass bool) {
	l.T.Helper()
	for _, a := range o.Addrs() {
		testkit.Eventually(l.T, 5*time.Second, fmt.Sprintf("packets to %s arrive: %t", a, pass), func() error { return l.Passes(a, pass) })
	}
}

// Routes are those of a table as ip(8) shows them.
func (l *Path) Routes(table string) string {
	l.T.Helper()
	var all []string
	for _, f := range []string{"-4", "-6"} {
		out, _ := l.Node.Run("ip", f, "route", "show", "table", table) // an error if there never was such a table
		for line := range strings.Lines(out) {
			all = append(all, strings.Join(strings.Fields(line), " "))
		}
	}
	return strings.Join(all, "; ")
}

// Rules makes what another program on the node makes of nftables.
func (l *Path) Rules(text string) {
	l.T.Helper()
	testkit.Must(l.Node.Run("nft", text))(l.T)
}

// Leaving captures what probes may cause outside of the node: themselves, and errors about them. It returns a function that wants none.
func (l *Path) Leaving() (none func()) {
	l.T.Helper()
	seen := testkit.Must(l.Host.Lab().NewCapture("eth0", func(p netlab.Packet) bool {
		isError := p.Protocol == unix.IPPROTO_ICMP || p.Protocol == unix.IPPROTO_ICMPV6
		return p.Protocol == unix.IPPROTO_UDP && p.DPort == 9 || isError && slices.Contains(Order(7, 0).Addrs(), p.Dst)
	}))(l.T)
	return func() {
		l.T.Helper()
		if got := seen.Take(); len(got) > 0 {
			l.T.Errorf("outside are %v", got)
		}
		testkit.Must(seen.Close())(l.T)
	}
}

// Outside gives the node routes.
func (l *Path) Outside() {
	l.T.Helper()
	testkit.Check(l.T, l.Node.Lab().IP(l.T.Context(), "route add default via 10.0.0.2", "-6 route add default via fd00::2"))
}
