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

// String says who is asked.
func (q Question) String() string {
	return fmt.Sprintf("echo %s > %s by link %d", q.From, q.To, q.Link)
}

// Answer is what is known of a question.
type Answer int

const (
	// Unknown is what was not sent, or that nobody listened for in time: nothing can be said.
	Unknown Answer = iota
	// Missing is what was not answered in time.
	Missing
	// Given is what was answered.
	Given
)

// String says it in a word.
func (a Answer) String() string {
	switch a {
	case Missing:
		return "missing"
	case Given:
		return "given"
	}
	return "unknown"
}

// ErrLate is of answers that stay unknown because this host did not come to listen for them.
var ErrLate = errors.New("this host is too busy to listen")

// lateness is how many times as long as it should a round may take, and still says who is silent.
const lateness = 2

// Ask sends questions in a network namespace and returns which were answered in time, by whatever
// link the answer came. It keeps the namespace alive until then. The error joins why some couldn't
// be sent, and ErrLate.
func Ask(ctx context.Context, ns *netns.NS, wait time.Duration, questions []Question) ([]Answer, error) {
	answers := make([]Answer, len(questions))
	ears := map[dataplane.Family]*os.File{}
	defer func() {
		for _, e := range ears {
			e.Close()
		}
	}()
	secret := make([]byte, secretSize)
	if _, err := rand.Read(secret); err != nil {
		return answers, err
	}
	var errs []error
	var asked time.Time
	err := ns.Do(func() (err error) {
		for _, q := range questions {
			f := dataplane.FamilyOf(q.To)
			if ears[f] == nil {
				if ears[f], err = listen(f); err != nil {
					return err
				}
			}
		}
		fd, err := mouth()
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
	h := hearing{secret: secret, answers: answers}
	errs = append(errs, h.listen(ctx, ears, asked, wait), ctx.Err())
	return answers, errors.Join(errs...)
}

// hearing is the wait for answers.
type hearing struct {
	secret []byte
	// mu protects answers, which are to those who listen for two families.
	mu      sync.Mutex
	answers []Answer
}

// listen hears answers to what was sent from a moment on until none is missing or they had their time.
func (h *hearing) listen(ctx context.Context, ears map[dataplane.Family]*os.File, asked time.Time, wait time.Duration) error {
	if !slices.Contains(h.answers, Missing) {
		return nil
	}
	stop := func() {
		for _, e := range ears {
			_ = e.SetReadDeadline(time.Unix(1, 0))
		}
	}
	var wg sync.WaitGroup
	for f, e := range ears {
		_ = e.SetReadDeadline(time.Now().Add(wait))
		wg.Go(func() {
			buf := make([]byte, maxMessage)
			for {
				n, err := e.Read(buf)
				if err != nil {
					return // in time, no more came
				}
				if h.note(f, buf[:n]) {
					stop()
					return
				}
			}
		})
	}
	defer context.AfterFunc(ctx, stop)()
	wg.Wait()
	took := time.Since(asked)
	for f, e := range ears {
		if err := h.drain(f, e); err != nil {
			return err
		}
	}
	if took <= lateness*wait || !slices.Contains(h.answers, Missing) {
		return nil
	}
	for i, a := range h.answers {
		if a == Missing {
			h.answers[i] = Unknown
		}
	}
	return fmt.Errorf("%w: %s instead of %s", ErrLate, took, wait)
}

// leastRoom is less than a message takes of a receive buffer, its struct sk_buff included.
const leastRoom = 256

// drain hears what is there already: Go reads nothing after a deadline, though the deadline may be
// noticed before an answer that came long before it. It hears no more than a full buffer has: in a pod
// messages may arrive as quickly as they are read.
func (h *hearing) drain(f dataplane.Family, ear *os.File) error {
	c, err := ear.SyscallConn()
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
			if err != nil || h.note(f, buf[:n]) {
				return
			}
		}
	})
	return errors.Join(err, failure)
}

// note hears a message and says whether no answer is missing any more.
func (h *hearing) note(f dataplane.Family, message []byte) (all bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	i, ok := protocols[f].answer(message, h.secret)
	if ok && int(i) < len(h.answers) && h.answers[i] == Missing {
		h.answers[i] = Given
	}
	return !slices.Contains(h.answers, Missing)
}

// listen opens what receives ICMP of a family, in the namespace of the thread.
func listen(f dataplane.Family) (*os.File, error) {
	p := protocols[f]
	fd, err := unix.Socket(p.family, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, p.icmp)
	if err != nil {
		return nil, fmt.Errorf("open a socket for ICMP of %s: %w", f, err)
	}
	return os.NewFile(uintptr(fd), "icmp"), nil
}

// mouth opens what sends packets by any link, in the namespace of the thread. It hears nothing. There is
// one for all questions: the kernel takes tens of milliseconds to close it (synchronize_net).
//
// It is of the kind that adds no header of the link: the other one wants a link's address as long as the
// link's own, which for a tunnel of IPv6 doesn't fit into a struct sockaddr_ll.
func mouth() (fd int, err error) {
	if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
		return -1, fmt.Errorf("open a packet socket: %w", err)
	}
	return fd, nil
}

// bigEndian is a number of 16 bits whose bytes in memory are in the network's order.
func bigEndian(n uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, n))
}
