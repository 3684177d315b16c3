// Package echo asks other hosts for an answer (ICMP echo, RFC 792 and RFC 4443) by a given link,
// whatever the routes are.
//
// It owns the packets. It must not know what an answer means.
package echo

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Question is one echo request.
type Question struct {
	// Link is the index of the link that it leaves by: one that takes IP packets as they are,
	// such as a tunnel.
	Link     int
	From, To netip.Addr
}

// String names the host that is asked.
func (q Question) String() string {
	return fmt.Sprintf("echo %s > %s by link %d", q.From, q.To, q.Link)
}

// Answer says whether a question was answered.
type Answer int

const (
	// Unknown: the question was not sent, or this host did not come to listen in time. Nothing can be said.
	Unknown Answer = iota
	// Missing: the question was not answered in time.
	Missing
	// Given: the question was answered.
	Given
)

// ErrLate is of answers that stay unknown because this host did not come to listen for them.
var ErrLate = errors.New("this host is too busy to listen")

// lateness is how many times as long as it should a round may take, and still tells the hosts that are silent.
const lateness = 2

// Ask sends questions in a network namespace and returns which were answered in time, by whatever
// link the answer came. It keeps the namespace alive until then. The error joins why some couldn't
// be sent, and ErrLate.
func Ask(ctx context.Context, ns *netns.NS, wait time.Duration, questions []Question) ([]Answer, error) {
	answers := make([]Answer, len(questions))
	sockets := map[dataplane.Family]*os.File{}
	defer func() {
		for _, s := range sockets {
			s.Close()
		}
	}()
	secret := make([]byte, secretSize)
	_, _ = rand.Read(secret) // never fails
	var errs []error
	var asked time.Time
	err := ns.Do(func() (err error) {
		for _, q := range questions {
			f := dataplane.FamilyOf(q.To)
			if sockets[f] == nil {
				if sockets[f], err = icmpSocket(f); err != nil {
					return err
				}
			}
		}
		fd, err := packetSocket()
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		asked = time.Now()
		for i, q := range questions {
			if i > 0 && time.Since(asked) > wait {
				break // a program in the pod has given its links rules that take long
			}
			p := protocols[dataplane.FamilyOf(q.To)]
			err := unix.Sendto(fd, p.packet(q, uint16(i), secret), 0, &unix.SockaddrLinklayer{Protocol: bigEndian(p.ether), Ifindex: q.Link})
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", q, err))
			} else {
				answers[i] = Missing
			}
		}
		return nil
	})
	if err != nil {
		return answers, err
	}
	r := reception{secret: secret, answers: answers}
	errs = append(errs, r.listen(ctx, sockets, asked, wait), ctx.Err())
	return answers, errors.Join(errs...)
}

// reception is the wait for answers.
type reception struct {
	secret []byte
	// mu protects answers, which the goroutines of two families write.
	mu      sync.Mutex
	answers []Answer
}

// listen receives answers to the questions that were asked from a moment on, until none is missing or their time is over.
func (r *reception) listen(ctx context.Context, sockets map[dataplane.Family]*os.File, asked time.Time, wait time.Duration) error {
	if !slices.Contains(r.answers, Missing) {
		return nil
	}
	stop := func() {
		for _, s := range sockets {
			_ = s.SetReadDeadline(time.Unix(1, 0))
		}
	}
	var wg sync.WaitGroup
	for f, s := range sockets {
		_ = s.SetReadDeadline(time.Now().Add(wait))
		wg.Go(func() {
			buf := make([]byte, maxMessage)
			for {
				n, err := s.Read(buf)
				if err != nil {
					return // in time, no more came
				}
				if r.note(f, buf[:n]) {
					stop()
					return
				}
			}
		})
	}
	defer context.AfterFunc(ctx, stop)()
	wg.Wait()
	took := time.Since(asked)
	for f, s := range sockets {
		if err := r.drain(f, s); err != nil {
			return err
		}
	}
	if took <= lateness*wait || !slices.Contains(r.answers, Missing) {
		return nil
	}
	for i, a := range r.answers {
		if a == Missing {
			r.answers[i] = Unknown
		}
	}
	return fmt.Errorf("%w: %s instead of %s", ErrLate, took, wait)
}

// leastRoom is less than a message takes of a receive buffer, its struct sk_buff included.
const leastRoom = 256

// drain reads the messages that are there already: Go reads nothing after a deadline, though the deadline may be
// noticed before an answer that came long before it. It reads no more than a full buffer has: in a pod
// messages may arrive as quickly as they are read.
func (r *reception) drain(f dataplane.Family, socket *os.File) error {
	c, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	var failure error
	err = c.Control(func(fd uintptr) {
		var room int
		if room, failure = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF); failure != nil {
			return
		}
		buf := make([]byte, maxMessage)
		for range room / leastRoom {
			n, err := unix.Read(int(fd), buf)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil || r.note(f, buf[:n]) {
				return
			}
		}
	})
	return errors.Join(err, failure)
}

// note notes a message and says whether no answer is missing any more.
func (r *reception) note(f dataplane.Family, message []byte) (all bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i, ok := protocols[f].answer(message, r.secret)
	if ok && int(i) < len(r.answers) && r.answers[i] == Missing {
		r.answers[i] = Given
	}
	return !slices.Contains(r.answers, Missing)
}

// icmpSocket opens a socket that receives ICMP of a family, in the namespace of the thread.
func icmpSocket(f dataplane.Family) (*os.File, error) {
	p := protocols[f]
	fd, err := unix.Socket(p.family, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, p.icmp)
	if err != nil {
		return nil, fmt.Errorf("open a socket for ICMP of %s: %w", f, err)
	}
	return os.NewFile(uintptr(fd), "icmp"), nil
}

// packetSocket opens a socket that sends packets by any link, in the namespace of the thread. It receives nothing. There is
// one for all questions: the kernel takes tens of milliseconds to close it (synchronize_net).
//
// It is of the kind that adds no header of the link: the other one wants a link's address as long as the
// link's own, which for a tunnel of IPv6 doesn't fit into a struct sockaddr_ll.
func packetSocket() (fd int, err error) {
	if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
		return -1, fmt.Errorf("open a packet socket: %w", err)
	}
	return fd, nil
}

// bigEndian is a number of 16 bits whose bytes in memory are in the network's order.
func bigEndian(n uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, n))
}
