// Package sending sends a few packets from a network namespace by sockets, as a program there does, and hears what comes back.
//
// It owns the sockets, which are closed at the end, and reads the answers. It must not know why packets are sent, nor what follows from an answer.
package sending

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Kind is a kind of packets.
type Kind byte

const (
	// Echo are echo requests of ICMP or ICMPv6.
	Echo Kind = iota
	// TCP are SYN. A connection that is accepted is reset at the end.
	TCP
	// UDP are datagrams with a few bytes of text.
	UDP
)

// Order says what is sent. Each packet is a flow of its own, by its source port or its identifier.
type Order struct {
	Kind Kind
	// To has the port 0 for echo requests.
	To    netip.AddrPort
	Count int
	// Interval is the time between two packets, and Wait how long an answer to the last one is waited for.
	Interval, Wait time.Duration
}

// Most is the most packets of an order.
const Most = 10

func (o Order) validate() error {
	switch {
	case !o.To.Addr().IsValid() || o.To.Addr().Is4In6() || o.To.Addr().Zone() != "":
		return fmt.Errorf("no packets go to %s", o.To.Addr())
	case o.Count < 1 || o.Count > Most:
		return fmt.Errorf("%d packets aren't 1 to %d", o.Count, Most)
	case o.Kind > UDP || (o.Kind == Echo) != (o.To.Port() == 0):
		return fmt.Errorf("packets of kind %d don't go to port %d", o.Kind, o.To.Port())
	}
	return nil
}

// Answer is what came back.
type Answer byte

const (
	// None: nothing came in time.
	None Answer = iota
	// Replied: an echo reply, or a datagram.
	Replied
	// Accepted: SYN and ACK.
	Accepted
	// Refused: RST.
	Refused
	// Failed: an error of ICMP or ICMPv6.
	Failed
)

// Outcome is what became of a packet.
type Outcome struct {
	// ID is the source port, or the identifier of an echo; 0 if the packet wasn't sent.
	ID uint16
	// NotSent is why the kernel refused the packet.
	NotSent error
	// Resent is how often TCP sent it again.
	Resent int
	Answer Answer
	// By is who answered, as far as the kernel tells. Type and Code are those of the error.
	By         netip.Addr
	Type, Code byte
	// After is the time until the answer.
	After time.Duration
}

// protocol is one kind of packets. Its sockets have indexes.
type protocol interface {
	// open opens the sockets, in the namespace of the thread.
	open() error
	// send sends a packet, and returns its ID.
	send(i int) (uint16, error)
	// sockets are those that are waited for, with the events, while some packets have no answer.
	sockets(pending []int) []unix.PollFd
	// read reads what a socket has, and notes answers. At the end it is called for those that have none, too, and notes what else is known of them.
	read(socket int32, note func(i int, o Outcome))
	close()
}

// session is the sending of one order.
type session struct {
	Order
	protocol
	outcomes []Outcome
	sent     []time.Time
	// over are the packets of which nothing more is expected.
	over []bool
}

// slice is the longest time for which the end of a context isn't noticed.
const slice = 100 * time.Millisecond

// Send sends packets in a network namespace. It returns their source and, in their order, what became of them; also if the context ends before. Nothing is sent after that.
func Send(ctx context.Context, ns *netns.NS, o Order) (from netip.Addr, all []Outcome, err error) {
	if err := o.validate(); err != nil {
		return from, nil, err
	}
	s := &session{Order: o, outcomes: make([]Outcome, o.Count), sent: make([]time.Time, o.Count), over: make([]bool, o.Count)}
	if o.Kind == Echo {
		s.protocol = &echo{to: o.To.Addr(), content: content(), socket: -1}
	} else {
		s.protocol = &stream{order: o, content: content()}
	}
	defer s.close()
	err = ns.Do(func() error {
		from = sourceTo(o.To.Addr())
		return s.open()
	})
	if err != nil {
		return from, nil, err
	}
	return from, s.outcomes, s.run(ctx)
}

// content is the text of packets: nobody else sends it. It has an even number of bytes.
func content() []byte {
	secret := make([]byte, 8)
	_, _ = rand.Read(secret) // never fails
	return []byte("coil trace: " + hex.EncodeToString(secret))
}

// sourceTo is the address by which the kernel sends to another one; not valid if it knows no way. Nothing is sent.
func sourceTo(to netip.Addr) netip.Addr {
	fd, err := unix.Socket(domain(to), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return netip.Addr{}
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, sockaddr(netip.AddrPortFrom(to, discard))); err != nil {
		return netip.Addr{}
	}
	return local(fd).Addr()
}

// discard is the port of RFC 863.
const discard = 9

// run sends all packets, and waits for their answers.
func (s *session) run(ctx context.Context) error {
	var last time.Time
	for next := 0; ; {
		if err := ctx.Err(); err != nil {
			return err
		}
		pending := s.pending(next)
		until := last.Add(s.Wait)
		if next < s.Count {
			until = last.Add(s.Interval)
		}
		left := time.Until(until)
		switch {
		case next < s.Count && left <= 0:
			last = time.Now()
			s.sendOne(next, last)
			next++
			continue
		case next == s.Count && (left <= 0 || len(pending) == 0):
			s.read(s.sockets(pending)) // what is known of those without an answer
			return nil
		}
		if err := s.listen(pending, min(left, slice)); err != nil {
			return err
		}
	}
}

// pending are the packets that were sent and have no answer.
func (s *session) pending(sent int) (all []int) {
	for i := range sent {
		if !s.over[i] {
			all = append(all, i)
		}
	}
	return all
}

func (s *session) sendOne(i int, now time.Time) {
	s.sent[i] = now
	o := &s.outcomes[i]
	if o.ID, o.NotSent = s.send(i); o.NotSent != nil {
		o.ID, s.over[i] = 0, true
	}
}

// listen waits for answers until some have come, or a time is over.
func (s *session) listen(pending []int, wait time.Duration) error {
	sockets := s.sockets(pending)
	n, err := unix.Poll(sockets, int((wait+time.Millisecond-1)/time.Millisecond))
	if errors.Is(err, unix.EINTR) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("wait for answers: %w", err)
	}
	if n == 0 {
		return nil
	}
	s.read(slices.DeleteFunc(sockets, func(p unix.PollFd) bool { return p.Revents == 0 }))
	return nil
}

// read reads what sockets have.
func (s *session) read(sockets []unix.PollFd) {
	now := time.Now()
	for _, p := range sockets {
		s.protocol.read(p.Fd, func(i int, o Outcome) {
			if i < 0 || i >= len(s.outcomes) || s.over[i] || s.sent[i].IsZero() {
				return
			}
			s.over[i] = true
			o.ID = s.outcomes[i].ID
			if o.Answer != None {
				o.After = now.Sub(s.sent[i])
			}
			s.outcomes[i] = o
		})
	}
}

func domain(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// addrPort is the opposite of sockaddr.
func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port))
	}
	return netip.AddrPort{}
}

// local is the own end of a socket.
func local(fd int) netip.AddrPort {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return netip.AddrPort{}
	}
	return addrPort(sa)
}
