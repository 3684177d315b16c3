package netlab

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/testkit"
)

// protocol is what ICMP is called in one address family.
type protocol struct {
	// raw sockets receive all ICMP of the namespace, those of datagrams the answers to their own requests only.
	raw, datagrams, any string
	number              int // of IANA
	request, reply      icmp.Type
	// header is the length of an IP header, and dst where the destination is in it.
	header, dst int
}

func protocolOf(a netip.Addr) protocol {
	if a.Is4() {
		return protocol{"ip4:icmp", "udp4", "0.0.0.0", 1, ipv4.ICMPTypeEcho, ipv4.ICMPTypeEchoReply, 20, 16}
	}
	return protocol{"ip6:ipv6-icmp", "udp6", "::", 58, ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply, 40, 24}
}

// listenICMP opens a socket for ICMP in the namespace. It receives all ICMP of one family that the namespace receives.
func (n *NS) listenICMP(p protocol) (*icmp.PacketConn, error) {
	conn, err := netns.In(n.NS, func() (*icmp.PacketConn, error) { return icmp.ListenPacket(p.raw, p.any) })
	if err != nil {
		return nil, fmt.Errorf("listen for ICMP: %w", err)
	}
	return conn, nil
}

var echoID atomic.Uint32

// own is the payload of the next request of a sender. An ID alone doesn't tell whose an answer is: the kernel chooses
// those of pingers, and two senders of a namespace may have the same.
func own() []byte { return strconv.AppendUint([]byte("coil "), senders.Add(1), 10) }

var senders atomic.Uint64

// send sends an echo request by a socket that receives all ICMP, whose deadline it sets. It returns the request and
// what is in it.
func (p protocol) send(conn *icmp.PacketConn, dst netip.Addr, timeout time.Duration) (request []byte, body *icmp.Echo, err error) {
	body = &icmp.Echo{ID: int(echoID.Add(1) & 0xffff), Seq: 1, Data: own()}
	request, err = (&icmp.Message{Type: p.request, Body: body}).Marshal(nil)
	if err != nil {
		return nil, nil, fmt.Errorf("encode echo request: %w", err)
	}
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, nil, err
	}
	if _, err := conn.WriteTo(request, &net.IPAddr{IP: dst.AsSlice(), Zone: dst.Zone()}); err != nil {
		return nil, nil, fmt.Errorf("ping %s: %w", dst, err)
	}
	return request, body, nil
}

// answers says whether the message is an answer to that request.
func (p protocol) answers(m *icmp.Message, request *icmp.Echo) bool {
	e, ok := m.Body.(*icmp.Echo)
	return ok && m.Type == p.reply && e.ID == request.ID && bytes.Equal(e.Data, request.Data)
}

// Ping sends one echo request from the namespace and waits for the answer. A link-local destination has the index of
// the link as zone.
func (n *NS) Ping(dst netip.Addr, timeout time.Duration) error {
	p := protocolOf(dst)
	conn, err := n.listenICMP(p)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, asked, err := p.send(conn, dst, timeout)
	if err != nil {
		return err
	}
	buf := make([]byte, 1500)
	for {
		size, from, err := conn.ReadFrom(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("ping %s: no answer within %s", dst, timeout)
		}
		if err != nil {
			return fmt.Errorf("ping %s: %w", dst, err)
		}
		m, err := icmp.ParseMessage(p.number, buf[:size])
		if err != nil {
			return fmt.Errorf("ping %s: answer from %s: %w", dst, from, err)
		}
		if p.answers(m, asked) {
			return nil
		}
	}
}

// SourceOf pings dst, an address of the namespace to, and returns the source address that the echo request arrives with.
func (n *NS) SourceOf(to *NS, dst netip.Addr, timeout time.Duration) (netip.Addr, error) {
	p := protocolOf(dst)
	conn, err := to.listenICMP(p)
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	if err := n.Ping(dst, timeout); err != nil {
		return netip.Addr{}, err
	}
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return netip.Addr{}, err
	}
	buf := make([]byte, 1500)
	for {
		size, from, err := conn.ReadFrom(buf)
		if err != nil {
			return netip.Addr{}, fmt.Errorf("receive echo request: %w", err)
		}
		m, err := icmp.ParseMessage(p.number, buf[:size])
		if err != nil {
			return netip.Addr{}, fmt.Errorf("receive echo request: %w", err)
		}
		if m.Type == p.request {
			return netip.ParseAddr(from.String())
		}
	}
}

// Answer is what came back to an echo request.
type Answer struct {
	From netip.Addr
	Kind AnswerKind
}

// String says what came from where.
func (a Answer) String() string { return fmt.Sprintf("%s from %s", a.Kind, a.From) }

// AnswerKind is what ICMP says, in either family.
type AnswerKind string

// The kinds of answers.
const (
	Reached     AnswerKind = "echo reply"
	Unreachable AnswerKind = "destination unreachable"
	Looped      AnswerKind = "time exceeded"
)

// Probe sends one echo request from the namespace and returns all answers to it that come within a time.
func (n *NS) Probe(to netip.Addr, within time.Duration) ([]Answer, error) {
	p := protocolOf(to)
	conn, err := n.listenICMP(p)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	request, asked, err := p.send(conn, to, within)
	if err != nil {
		return nil, err
	}
	var all []Answer
	buf := make([]byte, 1500)
	for {
		size, from, err := conn.ReadFrom(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		m, err := icmp.ParseMessage(p.number, buf[:size])
		if err != nil {
			continue
		}
		var a Answer
		a.From, _ = netip.ParseAddr(from.String())
		var original []byte // the IP packet that an error is about
		switch body := m.Body.(type) {
		case *icmp.Echo:
			if p.answers(m, asked) {
				a.Kind = Reached
				all = append(all, a)
			}
			continue
		case *icmp.DstUnreach:
			a.Kind, original = Unreachable, body.Data
		case *icmp.TimeExceeded:
			a.Kind, original = Looped, body.Data
		}
		dst := to.AsSlice()
		if len(original) < p.header+8 || !slices.Equal(original[p.dst:p.dst+len(dst)], dst) || !slices.Equal(original[p.header+4:p.header+6], request[4:6]) {
			continue // of another request
		}
		all = append(all, a)
	}
}

// Pinger pings 100 times a second.
type Pinger struct {
	name     string
	conn     *icmp.PacketConn
	protocol protocol
	own      []byte
	stop     chan struct{}
	ending   sync.Once
	sender   sync.WaitGroup
	receiver sync.WaitGroup
	sent     int
	failed   error

	mu      sync.Mutex
	answers []time.Time
}

// Pings begins to ping an address from the namespace, which has a name in errors.
func (n *NS) Pings(name string, to netip.Addr) (*Pinger, error) { return n.PingsWithin(name, to, 64) }

// PingsWithin does so with a hop limit.
func (n *NS) PingsWithin(name string, to netip.Addr, hops int) (*Pinger, error) {
	p := &Pinger{name: name + " to " + to.String(), protocol: protocolOf(to), own: own(), stop: make(chan struct{})}
	if err := n.Sysctl("ipv4/ping_group_range=0\t0"); err != nil {
		return nil, fmt.Errorf("ping %s: %w", p.name, err)
	}
	var err error
	if p.conn, err = netns.In(n.NS, func() (*icmp.PacketConn, error) { return icmp.ListenPacket(p.protocol.datagrams, p.protocol.any) }); err != nil {
		return nil, fmt.Errorf("ping %s: %w", p.name, err)
	}
	if to.Is4() {
		err = p.conn.IPv4PacketConn().SetTTL(hops)
	} else {
		err = p.conn.IPv6PacketConn().SetHopLimit(hops)
	}
	if err != nil {
		p.conn.Close()
		return nil, fmt.Errorf("ping %s: %w", p.name, err)
	}
	p.sender.Go(func() { p.send(to) })
	p.receiver.Go(p.receive)
	return p, nil
}

func (p *Pinger) send(to netip.Addr) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		m := icmp.Message{Type: p.protocol.request, Body: &icmp.Echo{Seq: p.sent & 0xffff, Data: p.own}}
		b, err := m.Marshal(nil)
		if err == nil {
			_, err = p.conn.WriteTo(b, &net.UDPAddr{IP: to.AsSlice()})
		}
		p.sent++
		if err != nil && p.failed == nil {
			p.failed = fmt.Errorf("ping %s, number %d: %w", p.name, p.sent, err)
		}
		select {
		case <-p.stop:
			return
		case <-tick.C:
		}
	}
}

func (p *Pinger) receive() {
	buf := make([]byte, 1500)
	for {
		n, _, err := p.conn.ReadFrom(buf)
		if err != nil {
			return
		}
		m, err := icmp.ParseMessage(p.protocol.number, buf[:n])
		if err != nil || m.Type != p.protocol.reply {
			continue
		}
		if e, ok := m.Body.(*icmp.Echo); ok && bytes.Equal(e.Data, p.own) {
			p.mu.Lock()
			p.answers = append(p.answers, time.Now())
			p.mu.Unlock()
		}
	}
}

// Answered is the number of answers so far.
func (p *Pinger) Answered() int { return len(p.Answers()) }

// Answers says when answers came so far.
func (p *Pinger) Answers() []time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.answers[:len(p.answers):len(p.answers)]
}

// End ends it, waits for the last answers, and returns how many requests were sent and how many were answered. The
// error is the first that a request met.
func (p *Pinger) End() (sent, answered int, err error) {
	p.ending.Do(func() { close(p.stop) })
	p.sender.Wait()
	deadline := time.Now().Add(testkit.Timeout(time.Second))
	for p.Answered() < p.sent && time.Now().Before(deadline) {
		time.Sleep(5 * time.Millisecond)
	}
	p.conn.Close()
	p.receiver.Wait()
	return p.sent, p.Answered(), p.failed
}

// String says from where to where it pings.
func (p *Pinger) String() string { return p.name }
