package selftest

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/plan/selftest"
)

const (
	// mostQuestions is how many questions are asked at a time.
	mostQuestions = 32
	// again is when a datagram is sent again that nobody has answered.
	again = 300 * time.Millisecond
	// replyWithin is how long a connection may take to answer, once it is there: what isn't a pod of a selftest waits for a request, perhaps.
	replyWithin = time.Second
)

// Ask asks all questions, several at once, and waits so long for each answer.
func Ask(ctx context.Context, questions []selftest.Question, within time.Duration) []selftest.Answer {
	answers := make([]selftest.Answer, len(questions))
	free := make(chan struct{}, mostQuestions)
	var work sync.WaitGroup
	for i, q := range questions {
		work.Go(func() {
			free <- struct{}{}
			defer func() { <-free }()
			ctx, cancel := context.WithTimeout(ctx, within)
			defer cancel()
			a := selftest.Answer{Question: q.String()}
			var err error
			switch q.Kind {
			case selftest.TCP:
				err = connect(ctx, q, &a)
			case selftest.UDP:
				err = send(ctx, q, &a)
			default:
				err = fill(ctx, q, &a)
			}
			if err != nil {
				a.Error = explain(err)
			}
			answers[i] = a
		})
	}
	work.Wait()
	return answers
}

// errSilent says that no answer came.
var errSilent = errors.New("no answer")

// explain is an error without the addresses, which the question has.
func explain(err error) string {
	if op := new(net.OpError); errors.As(err, &op) && op.Err != nil {
		err = op.Err
	}
	if errors.Is(err, context.DeadlineExceeded) || isTimeout(err) {
		err = errSilent
	}
	return err.Error()
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

func newToken() string {
	b := make([]byte, tokenSize/2)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

// connect opens a connection. What answers in other words than a pod of a selftest is reached, too.
func connect(ctx context.Context, q selftest.Question, a *selftest.Answer) error {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", q.To.String())
	if err != nil {
		return err
	}
	defer c.Close()
	a.Reached = true
	if err := c.SetDeadline(time.Now().Add(replyWithin)); err != nil {
		return err
	}
	token := newToken()
	if _, err := c.Write([]byte(token + "\n")); err != nil {
		return nil // it is closed: that isn't a pod of a selftest
	}
	b := make([]byte, selftest.Request)
	n, _ := c.Read(b)
	if line, _, ok := bytes.Cut(b[:n], []byte("\n")); ok {
		take(a, line, token)
	}
	return nil
}

// take keeps what a reply says, if it is one to the token.
func take(a *selftest.Answer, text []byte, token string) (r selftest.Reply, ok bool) {
	if json.Unmarshal(text, &r) != nil || r.Token != token {
		return r, false
	}
	a.Reached, a.Name, a.Source = true, r.Name, r.Source
	return r, true
}

// exchange sends a datagram of so many bytes until it is answered.
func exchange(ctx context.Context, c *net.UDPConn, size int, a *selftest.Answer) error {
	token := newToken()
	request, b := make([]byte, size), make([]byte, longest)
	copy(request, token)
	var refused error
	for {
		if _, err := c.Write(request); err != nil && !errors.Is(err, unix.ECONNREFUSED) { // of the datagram before
			return err
		}
		if err := c.SetReadDeadline(time.Now().Add(again)); err != nil {
			return err
		}
		for {
			n, err := c.Read(b)
			if ctx.Err() != nil {
				return cmp.Or(refused, ctx.Err())
			}
			if errors.Is(err, unix.ECONNREFUSED) { // nobody serves there yet
				if refused = err; !wait(ctx, again) {
					return err
				}
				break
			}
			if isTimeout(err) {
				break
			}
			if err != nil {
				return err
			}
			if r, ok := take(a, b[:n], token); ok && r.Bytes == size {
				return nil
			}
		}
	}
}

// wait waits for a time, and says whether ctx goes on.
func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// dial opens a socket for datagrams to one address.
func dial(ctx context.Context, to netip.AddrPort) (*net.UDPConn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "udp", to.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.UDPConn), nil
}

// send sends a datagram, and waits for the reply.
func send(ctx context.Context, q selftest.Question, a *selftest.Answer) error {
	c, err := dial(ctx, q.To)
	if err != nil {
		return err
	}
	defer c.Close()
	return exchange(ctx, c, selftest.Request, a)
}

// fill sends a datagram that is as long as the link takes, and must not be cut into fragments, then one that is a byte longer.
func fill(ctx context.Context, q selftest.Question, a *selftest.Answer) error {
	c, err := dial(ctx, q.To)
	if err != nil {
		return err
	}
	defer c.Close()
	level, discover, do, asks, headers := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO, unix.IP_MTU, 20+8
	if q.To.Addr().Is6() {
		level, discover, do, asks, headers = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO, unix.IPV6_MTU, 40+8
	}
	if err := control(c, func(fd int) error { return unix.SetsockoptInt(fd, level, discover, do) }); err != nil {
		return fmt.Errorf("forbid fragments: %w", err)
	}
	link, err := linkOf(c.LocalAddr())
	if err != nil {
		return err
	}
	a.Link = &selftest.Link{Name: link.Name, MTU: link.MTU}
	size := link.MTU - headers
	if q.To.Addr().Is4() {
		size = min(link.MTU, longest-1) - headers // the length of IPv4 has 16 bits
	}
	err = exchange(ctx, c, size, a)
	if e := control(c, func(fd int) (err error) { a.Link.Path, err = unix.GetsockoptInt(fd, level, asks); return err }); e != nil && err == nil {
		err = fmt.Errorf("ask for the MTU of the path: %w", e)
	}
	if err != nil {
		return err
	}
	switch _, err := c.Write(make([]byte, size+1)); {
	case err == nil:
		a.Link.Longer = true
	case !errors.Is(err, unix.EMSGSIZE):
		return err
	}
	return nil
}

// control does something with the socket.
func control(c *net.UDPConn, do func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	if err := raw.Control(func(fd uintptr) { result = do(int(fd)) }); err != nil {
		return err
	}
	return result
}

// linkOf is the link that has an address.
func linkOf(local net.Addr) (net.Interface, error) {
	own, err := netip.ParseAddrPort(local.String())
	if err != nil {
		return net.Interface{}, err
	}
	links, err := net.Interfaces()
	if err != nil {
		return net.Interface{}, err
	}
	for _, l := range links {
		addrs, err := l.Addrs()
		if err != nil {
			return l, err
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Unmap() == own.Addr().Unmap().WithZone("") {
				return l, nil
			}
		}
	}
	return net.Interface{}, fmt.Errorf("no link has %s", own.Addr())
}
