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

// Ask sends questions in a network namespace and returns which were answered in time, by whatever
// link the answer came. It keeps the namespace alive until then. The error joins why some couldn't
// be sent; nothing can be said about these.
func Ask(ctx context.Context, ns *netns.NS, wait time.Duration, questions []Question) (answered []bool, sent []bool, err error) {
	answered, sent = make([]bool, len(questions)), make([]bool, len(questions))
	ears := map[dataplane.Family]*os.File{}
	defer func() {
		for _, e := range ears {
			e.Close()
		}
	}()
	secret := make([]byte, secretSize)
	if _, err := rand.Read(secret); err != nil {
		return answered, sent, err
	}
	var errs []error
	err = ns.Do(func() (err error) {
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
		for i, q := range questions {
			p := protocols[dataplane.FamilyOf(q.To)]
			err := unix.Sendto(fd, p.packet(q, uint16(i), secret), 0, &unix.SockaddrLinklayer{Protocol: bigEndian(p.ether), Ifindex: q.Link})
			if sent[i] = err == nil; err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", q, err))
			}
		}
		return nil
	})
	if err != nil {
		return answered, sent, err
	}
	hear(ctx, ears, wait, secret, sent, answered)
	return answered, sent, errors.Join(append(errs, ctx.Err())...)
}

// hear waits for the answers to what was sent.
func hear(ctx context.Context, ears map[dataplane.Family]*os.File, wait time.Duration, secret []byte, sent, answered []bool) {
	var wg sync.WaitGroup
	var mu sync.Mutex // of answered and missing
	missing := 0
	for _, s := range sent {
		if s {
			missing++
		}
	}
	stop := func() {
		for _, e := range ears {
			_ = e.SetReadDeadline(time.Unix(1, 0))
		}
	}
	if missing == 0 {
		return
	}
	for f, e := range ears {
		_ = e.SetReadDeadline(time.Now().Add(wait))
		wg.Go(func() {
			buf := make([]byte, 1500)
			for {
				n, err := e.Read(buf)
				if err != nil {
					return // in time, no more came
				}
				i, ok := protocols[f].answer(buf[:n], secret)
				mu.Lock()
				if ok && int(i) < len(sent) && sent[i] && !answered[i] {
					answered[i] = true
					missing--
				}
				done := missing == 0
				mu.Unlock()
				if done {
					stop()
					return
				}
			}
		})
	}
	defer context.AfterFunc(ctx, stop)()
	wg.Wait()
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
