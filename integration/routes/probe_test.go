package routes

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/testkit"
)

// answer is what came back to an echo request.
type answer struct {
	from netip.Addr
	kind answerKind
}

func (a answer) String() string { return fmt.Sprintf("%s from %s", a.kind, a.from) }

// answerKind is what ICMP says, in either family.
type answerKind string

const (
	reached     answerKind = "echo reply"
	unreachable answerKind = "destination unreachable"
	looped      answerKind = "time exceeded"
)

// kindOf tells what a message says; the others are of no interest.
func kindOf(t icmp.Type) answerKind {
	switch t {
	case ipv4.ICMPTypeEchoReply, ipv6.ICMPTypeEchoReply:
		return reached
	case ipv4.ICMPTypeDestinationUnreachable, ipv6.ICMPTypeDestinationUnreachable:
		return unreachable
	case ipv4.ICMPTypeTimeExceeded, ipv6.ICMPTypeTimeExceeded:
		return looped
	default:
		return ""
	}
}

var echoID atomic.Uint32

// probe sends one echo request from a network namespace and returns all answers to it
// that come within a time.
func probe(path string, to netip.Addr, within time.Duration) ([]answer, error) {
	ns, err := netns.Open(path)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	// IANA protocol numbers; offset is where the destination is in an IP header, and size
	// that of the header.
	network, request, protocol, offset, size := "ip4:icmp", icmp.Type(ipv4.ICMPTypeEcho), 1, 16, 20
	if to.Is6() {
		network, request, protocol, offset, size = "ip6:ipv6-icmp", ipv6.ICMPTypeEchoRequest, 58, 24, 40
	}
	var conn *icmp.PacketConn
	if err := ns.Do(func() (err error) {
		conn, err = icmp.ListenPacket(network, "")
		return err
	}); err != nil {
		return nil, err
	}
	defer conn.Close()
	id := int(echoID.Add(1)) & 0xffff
	b, err := (&icmp.Message{Type: request, Body: &icmp.Echo{ID: id, Seq: 1}}).Marshal(nil)
	if err != nil {
		return nil, err
	}
	if err := conn.SetDeadline(time.Now().Add(within)); err != nil {
		return nil, err
	}
	if _, err := conn.WriteTo(b, &net.IPAddr{IP: to.AsSlice()}); err != nil {
		return nil, fmt.Errorf("send to %s: %w", to, err)
	}
	var all []answer
	buf := make([]byte, 1500)
	for {
		n, from, err := conn.ReadFrom(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		m, err := icmp.ParseMessage(protocol, buf[:n])
		if err != nil {
			continue
		}
		kind := kindOf(m.Type)
		var original []byte
		switch body := m.Body.(type) {
		case *icmp.Echo:
			if kind == reached && body.ID == id {
				original = b
			}
		case *icmp.DstUnreach:
			original = body.Data
		case *icmp.TimeExceeded:
			original = body.Data
		}
		if kind == "" || original == nil {
			continue
		}
		if kind != reached && (len(original) < size+8 || !slices.Equal(original[offset:offset+len(to.AsSlice())], to.AsSlice()) ||
			int(original[size+4])<<8|int(original[size+5]) != id) {
			continue // of another request
		}
		who, _ := netip.ParseAddr(from.String())
		all = append(all, answer{who, kind})
	}
}

// refused ends the test unless a packet from a network namespace to an address that no
// pod has is answered once, as unreachable, by a node.
func (c *network) refused(path string, to netip.Addr, by *node) {
	c.t.Helper()
	want := answer{by.Addr4, unreachable}
	if to.Is6() {
		want.from = by.Addr6
	}
	// The kernel sends one such answer a second (net.ipv4.icmp_ratelimit).
	c.eventually(15*time.Second, fmt.Sprintf("an answer to a packet to %s", to), func() error {
		got, err := probe(path, to, testkit.Timeout(400*time.Millisecond))
		c.check(err)
		if slices.ContainsFunc(got, func(a answer) bool { return a.kind != unreachable }) || len(got) > 1 {
			c.t.Fatalf("a packet to %s is answered %v, want %v", to, got, want)
		}
		if len(got) == 0 || got[0] != want {
			return fmt.Errorf("answers are %v, want %v", got, want)
		}
		return nil
	})
}

// free returns an address of each of a node's blocks that nobody has, or has had.
func (c *network) free(n *node, pool string) []netip.Addr {
	c.t.Helper()
	var all []netip.Addr
	for _, p := range c.blocks(n, pool) {
		// The last one is given last, and pools of these tests are never used up.
		a := p.Masked().Addr()
		for next := a; p.Contains(next); next = next.Next() {
			a = next
		}
		all = append(all, a)
	}
	return all
}

// connect ends the test unless a connection from somewhere reaches an address of a
// pod, and returns where the pod sees it coming from.
func (c *network) connect(dial dialer, from string, to *rig.Sandbox, addr netip.Addr) netip.Addr {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), testkit.Timeout(10*time.Second))
	defer cancel()
	l, err := to.Listen(ctx, "tcp", netip.AddrPortFrom(addr, 0).String())
	if err != nil {
		c.t.Fatalf("listen at %s in %s: %v", addr, to, err)
	}
	defer l.Close()
	conn, err := dial(ctx, "tcp", l.Addr().String())
	if err != nil {
		c.t.Fatalf("%s doesn't reach %s: %v", from, to, err)
	}
	defer conn.Close()
	peer, err := l.Accept()
	c.check(err)
	defer peer.Close()
	return netip.MustParseAddrPort(peer.RemoteAddr().String()).Addr().Unmap()
}

// A probe tells a loop from an answer: without the rule to its unreachable routes, a node
// sends a packet back to the router.
func TestProbeSeesLoops(t *testing.T) {
	c := newNetwork(t, variant{pools: both, external: true, daemon: onBIRD}, 2)
	pool := c.pool(5, 8)
	c.pod(c.nodes[0], pool)
	from := c.pod(c.nodes[1], pool)
	for _, n := range c.nodes {
		c.announced(n, c.blocks(n, pool)...)
	}
	n := c.nodes[0]
	n.Coild.Kill() // it would heal
	for _, family := range []string{"-4", "-6"} {
		_, err := n.Run(t.Context(), "ip", family, "rule", "del", "pref", "2001")
		c.check(err)
	}
	for _, a := range c.free(n, pool) {
		c.eventually(10*time.Second, fmt.Sprintf("a loop of packets to %s", a), func() error {
			got, err := probe(from.Path, a, testkit.Timeout(400*time.Millisecond))
			c.check(err)
			if !slices.ContainsFunc(got, func(a answer) bool { return a.kind == looped }) {
				return fmt.Errorf("answers are %v", got)
			}
			return nil
		})
	}
}
