package netlab_test

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// subnets are what the two namespaces of a bridge have, in both families.
var subnets = []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("2001:db8::1/64")}

// bridged is a bridge that forwards, in a namespace of its own, and a namespace behind it.
func bridged(t *testing.T) (bridge, host *netlab.NS) {
	t.Helper()
	outer, inner := netnstest.New(t), netnstest.New(t)
	outer.Configure(t, netlab.AddBridge("br0", subnets...)...)
	outer.Configure(t, "link add port type veth peer name eth0 netns "+inner.Path, "link set port master br0 up")
	commands := []string{"link set eth0 up"}
	for _, s := range subnets {
		commands = append(commands, netlab.AddAddr(netip.PrefixFrom(s.Addr().Next(), s.Bits()), "eth0"))
	}
	inner.Configure(t, append(commands, "route add default via 192.0.2.1", "-6 route add default via 2001:db8::1")...)
	testkit.Check(t, outer.Lab().Forward())
	return outer.Lab(), inner.Lab()
}

// A pinger counts no answers to the requests of others, which may have its ID.
func TestPingsCountTheirOwnAnswers(t *testing.T) {
	bridge, _ := bridged(t)
	for _, s := range subnets {
		own := s.Addr().Next()
		testkit.Eventually(t, 5*time.Second, "an answer from "+own.String(), func() error { return bridge.Ping(own, testkit.Timeout(time.Second)) })
		p := testkit.Must(bridge.Pings("the bridge", own))(t)
		t.Cleanup(func() { _, _, _ = p.End() })
		p.TakeID()
		testkit.Check(t, bridge.Ping(own, testkit.Timeout(5*time.Second)))
		if sent, answered, err := p.End(); err != nil || sent != answered {
			t.Errorf("%s: %d of %d were answered, %v", p, answered, sent, err)
		}
	}
}

// Namespaces on a bridge reach each other by ICMP and TCP, and see the source that asks.
func TestReach(t *testing.T) {
	bridge, host := bridged(t)
	for _, s := range subnets {
		own := s.Addr().Next()
		testkit.Eventually(t, 5*time.Second, "an answer from "+own.String(), func() error { return bridge.Ping(own, testkit.Timeout(time.Second)) })
		if got := testkit.Must(bridge.SourceOf(host, own, testkit.Timeout(time.Second)))(t); got != s.Addr() {
			t.Errorf("a ping comes from %s, want %s", got, s.Addr())
		}
		if got := testkit.Must(host.Reach(t.Context(), own, bridge.Dial))(t); got != s.Addr() {
			t.Errorf("a connection comes from %s, want %s", got, s.Addr())
		}
		if _, err := host.Reach(t.Context(), s.Addr(), bridge.Dial); err == nil {
			t.Errorf("%s is reached where nobody has it", s.Addr())
		}
		p := testkit.Must(bridge.Pings("the bridge", own))(t)
		t.Cleanup(func() { _, _, _ = p.End() })
		testkit.Eventually(t, 5*time.Second, "pings are answered", func() error {
			if p.Answered() < 3 {
				return fmt.Errorf("%d answers", p.Answered())
			}
			return nil
		})
		if sent, answered, err := p.End(); err != nil || sent != answered {
			t.Errorf("%s: %d pings, %d answers, %v", p, sent, answered, err)
		}
	}
}

// A probe tells an answer from an address that nobody has. Package routes has the case of a loop.
func TestProbe(t *testing.T) {
	bridge, host := bridged(t)
	testkit.Check(t, bridge.IP(t.Context(), "route add unreachable 198.51.100.0/24", "-6 route add unreachable 2001:db8:1::/64"))
	for i, c := range []struct {
		to   string
		kind netlab.AnswerKind
		from netip.Addr
	}{
		{"192.0.2.1", netlab.Reached, subnets[0].Addr()},
		{"198.51.100.1", netlab.Unreachable, subnets[0].Addr()},
		{"2001:db8::1", netlab.Reached, subnets[1].Addr()},
		{"2001:db8:1::1", netlab.Unreachable, subnets[1].Addr()},
	} {
		want := []netlab.Answer{{From: c.from, Kind: c.kind}}
		testkit.Eventually(t, 15*time.Second, "the answer from "+c.to, func() error {
			got, err := host.Probe(netip.MustParseAddr(c.to), testkit.Timeout(200*time.Millisecond))
			if err == nil && !slices.Equal(got, want) {
				err = fmt.Errorf("%d: answers are %v, want %v", i, got, want)
			}
			return err
		})
	}
}

// A capture sees what comes and what goes, by one link or by all.
func TestCapture(t *testing.T) {
	bridge, host := bridged(t)
	own := subnets[0].Addr().Next()
	testkit.Eventually(t, 5*time.Second, "an answer", func() error { return bridge.Ping(own, testkit.Timeout(time.Second)) })
	udp := func(p netlab.Packet) bool { return p.Protocol == unix.IPPROTO_UDP }
	port := testkit.Must(bridge.NewCapture("port", udp))(t)
	t.Cleanup(func() { _, _ = port.Close() })
	everywhere := testkit.Must(host.NewCapture("", func(p netlab.Packet) bool { return p.Out && udp(p) }))(t)
	t.Cleanup(func() { _, _ = everywhere.Close() })
	r := testkit.Must(host.NewRaw(own, subnets[0].Addr(), unix.IPPROTO_UDP, 6))(t)
	defer r.Close()
	testkit.Check(t, r.Send([]byte{0x12, 0x34, 0, 9, 0, 8, 0, 0}))
	for name, c := range map[string]struct {
		*netlab.Capture
		out bool
	}{"the port": {port, false}, "the namespace": {everywhere, true}} {
		var got []netlab.Packet
		testkit.Eventually(t, 5*time.Second, name+" has a packet", func() error {
			if got = append(got, c.Take()...); len(got) == 0 {
				return fmt.Errorf("no packet")
			}
			return nil
		})
		p := got[0]
		if len(got) > 1 || p.Src != own || p.Dst != subnets[0].Addr() || p.SPort != 0x1234 || p.DPort != 9 || p.Size != 28 || p.Checksum == 0 || p.Out != c.out {
			t.Errorf("%s: packets %v", name, got)
		}
		if missed, err := c.Close(); missed != 0 || err != nil {
			t.Errorf("%s: %d packets were missed, %v", name, missed, err)
		}
	}
}

// A proxy connects a namespace with the machine, until it is cut.
func TestProxy(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	ns := netnstest.New(t).Lab()
	l := testkit.Must(netlab.Machine().Listen(t.Context(), "tcp4", "127.0.0.1:0"))(t)
	defer l.Close()
	go netlab.Serve(l, func(c net.Conn) { _, _ = io.Copy(c, c) })
	p := testkit.Must(netlab.NewProxy(t.Context(), ns, l.Addr().String(), l.Addr().String()))(t)
	defer p.Close()
	echo := func() error {
		c, err := ns.Dial(t.Context(), "tcp4", l.Addr().String())
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := c.Write([]byte("x")); err != nil {
			return err
		}
		_, err = io.ReadFull(c, make([]byte, 1))
		return err
	}
	testkit.Check(t, echo())
	p.Cut(true)
	if err := echo(); err == nil {
		t.Error("there is an answer through a proxy that is cut")
	}
	p.Cut(false)
	testkit.Check(t, echo())
}
