// Package flows keeps TCP connections talking, thousands if need be, and tells how each of them fared.
//
// It owns both ends of them: a server, and clients in network namespaces. By half of the connections the server alone talks, by the others
// the client, and the server answers. It must not know what is between the ends.
package flows

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// word is what an end says at once: how many it has said before.
type word [8]byte

// Set is a server and the flows that were opened to it.
type Set struct {
	every time.Duration
	at    []netip.AddrPort
	ends  sync.WaitGroup

	mu     sync.Mutex
	closed bool
	open   map[io.Closer]bool // listeners and both ends of flows
	flows  []*flow
}

// flow is a connection.
type flow struct {
	// push says that the server alone talks.
	push   bool
	number int // in the set

	mu     sync.Mutex
	client netip.AddrPort
	source netip.AddrPort // which the server sees
	// heard is when the client's end received a word.
	heard []time.Time
	// failed is how the flow ended, or what it has delivered that was never said.
	failed error
}

// Serve starts a server in a network namespace. Ends that talk say a word again and again, at this interval.
func Serve(ctx context.Context, ns *netlab.NS, every time.Duration, at ...netip.AddrPort) (*Set, error) {
	s := &Set{every: every, at: at, open: map[io.Closer]bool{}}
	for _, a := range at {
		l, err := ns.Listen(ctx, "tcp", a.String())
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.keep(l)
		s.ends.Go(func() { s.accept(l) })
	}
	return s, nil
}

// keep says that something is open, until Close closes it. It returns false when that was called.
func (s *Set) keep(c io.Closer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.open[c] = true
	}
	return !s.closed
}

// Close ends the flows and the server.
func (s *Set) Close() error {
	s.mu.Lock()
	s.closed = true
	var errs []error
	for c := range s.open {
		errs = append(errs, c.Close())
	}
	clear(s.open)
	s.mu.Unlock()
	s.ends.Wait()
	return errors.Join(errs...)
}

// Open opens n flows from a network namespace to each address of the server, and waits until they have all talked.
func (s *Set) Open(ctx context.Context, from *netlab.NS, n int) error {
	began := time.Now()
	var all errgroup.Group
	for _, to := range s.at {
		all.Go(func() error {
			return from.Do(func() error {
				for range n {
					if err := s.dial(ctx, to); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
	if err := all.Wait(); err != nil {
		return err
	}
	return testkit.Within(ctx, 20*time.Second, func() error { return s.Talked(began) })
}

// dial opens a flow from the network namespace of this thread.
func (s *Set) dial(ctx context.Context, to netip.AddrPort) error {
	s.mu.Lock()
	f := &flow{number: len(s.flows), push: len(s.flows)%2 == 0}
	s.flows = append(s.flows, f)
	s.mu.Unlock()
	// The first packets wait until neighbours are found.
	c, err := (&net.Dialer{Timeout: testkit.Timeout(10 * time.Second)}).DialContext(ctx, "tcp", to.String())
	if err != nil {
		return fmt.Errorf("flow %d: %w", f.number, err)
	}
	if !s.keep(c) {
		return errors.Join(net.ErrClosed, c.Close())
	}
	f.mu.Lock()
	f.client = c.LocalAddr().(*net.TCPAddr).AddrPort()
	f.mu.Unlock()
	hello := binary.BigEndian.AppendUint32(nil, uint32(f.number))
	if _, err := c.Write(hello); err != nil {
		return fmt.Errorf("flow %d: %w", f.number, err)
	}
	s.ends.Go(func() { s.end(f, "client", s.hear(c, f)) })
	if !f.push {
		s.ends.Go(func() { s.end(f, "client", s.talk(c)) })
	}
	return nil
}

// end notes that an end of a flow has ended. At the end of all it's no failure.
func (s *Set) end(f *flow, of string, err error) {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	if !closed && f.failed == nil {
		f.failed = fmt.Errorf("the %s's end: %w", of, err)
	}
}

// talk says words until the connection ends.
func (s *Set) talk(c net.Conn) error {
	tick := time.NewTicker(s.every)
	defer tick.Stop()
	for n := uint64(0); ; n++ {
		var w word
		binary.BigEndian.PutUint64(w[:], n)
		if _, err := c.Write(w[:]); err != nil {
			return err
		}
		<-tick.C
	}
}

// hear receives words until the connection ends.
func (s *Set) hear(c net.Conn, f *flow) error {
	for n := uint64(0); ; n++ {
		var w word
		if _, err := io.ReadFull(c, w[:]); err != nil {
			return err
		}
		if got := binary.BigEndian.Uint64(w[:]); got != n {
			return fmt.Errorf("word %d is %d", n, got)
		}
		f.mu.Lock()
		f.heard = append(f.heard, time.Now())
		f.mu.Unlock()
	}
}

func (s *Set) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		if !s.keep(c) {
			_ = c.Close()
			return
		}
		s.ends.Go(func() { s.serve(c) })
	}
}

// serve is the server's end of a flow.
func (s *Set) serve(c net.Conn) {
	var hello [4]byte
	if _, err := io.ReadFull(c, hello[:]); err != nil {
		return // its client's end tells
	}
	s.mu.Lock()
	f := s.flows[binary.BigEndian.Uint32(hello[:])]
	s.mu.Unlock()
	f.mu.Lock()
	source := c.RemoteAddr().(*net.TCPAddr).AddrPort()
	f.source = netip.AddrPortFrom(source.Addr().Unmap(), source.Port())
	f.mu.Unlock()
	if f.push {
		s.end(f, "server", s.talk(c))
		return
	}
	_, err := io.Copy(onlyWriter{c}, onlyReader{c})
	if err == nil {
		err = io.EOF
	}
	s.end(f, "server", err)
}

// onlyWriter and onlyReader keep io.Copy from splicing: a word is answered at once.
type (
	onlyWriter struct{ io.Writer }
	onlyReader struct{ io.Reader }
)
