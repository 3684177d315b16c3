// Package selftest is what the pods of "coilctl selftest" run: a server that tells who asks it what it sees of them, and a client that asks such servers.
//
// It owns the sockets. It needs no right but to open them, and must not know which questions matter, nor what an answer means.
package selftest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/plan/selftest"
)

const (
	// mostConnections is how many connections are served at a time; others wait.
	mostConnections = 64
	// patience is for how long a connection may ask.
	patience = 5 * time.Second
	// longest is the most bytes of a datagram.
	longest = 1 << 16
)

// Server answers TCP and UDP at one port, by both families.
type Server struct {
	// Name is what it calls itself.
	Name string
	Port uint16
}

// Run serves until ctx ends.
func (s Server) Run(ctx context.Context) error {
	at := net.JoinHostPort("", fmt.Sprint(s.Port))
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", at)
	if err != nil {
		return err
	}
	u, err := config.ListenPacket(ctx, "udp", at)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	return s.serve(ctx, l.(*net.TCPListener), u.(*net.UDPConn))
}

// serve answers at both sockets, and closes them.
func (s Server) serve(ctx context.Context, l *net.TCPListener, u *net.UDPConn) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(ctx, func() {
		l.Close()
		u.Close()
	})()
	var work sync.WaitGroup
	work.Go(func() { cancel(s.datagrams(u)) })
	work.Go(func() { cancel(s.connections(ctx, l)) })
	work.Wait()
	l.Close()
	u.Close()
	if err := context.Cause(ctx); !errors.Is(err, net.ErrClosed) && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// datagrams answers each that is long enough.
func (s Server) datagrams(u *net.UDPConn) error {
	b := make([]byte, longest)
	for {
		n, from, err := u.ReadFromUDPAddrPort(b)
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil { // an earlier answer wasn't taken
			continue
		}
		if n < selftest.Request {
			continue
		}
		reply, err := s.reply(tokenOf(b[:n]), from, n)
		if err == nil && len(reply) <= n {
			_, _ = u.WriteToUDPAddrPort(reply, from) // who gets no answer asks again
		}
	}
}

// connections answers each, some at a time.
func (s Server) connections(ctx context.Context, l *net.TCPListener) error {
	var work sync.WaitGroup
	defer work.Wait()
	free := make(chan struct{}, mostConnections)
	for {
		select {
		case free <- struct{}{}:
		case <-ctx.Done():
			return nil
		}
		c, err := l.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil { // the client has gone, or there is no file descriptor
			klog.FromContext(ctx).V(2).Info("Couldn't accept a connection", "err", err)
			<-free
			continue
		}
		work.Go(func() {
			defer func() { <-free }()
			defer context.AfterFunc(ctx, func() { c.Close() })()
			defer c.Close()
			if err := s.answer(c); err != nil {
				klog.FromContext(ctx).V(4).Info("A client hasn't got an answer", "client", c.RemoteAddr().String(), "err", err)
			}
		})
	}
}

// answer reads the line that asks, and answers with one.
func (s Server) answer(c *net.TCPConn) error {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	b := make([]byte, tokenSize+1)
	if _, err := c.Read(b); err != nil {
		return err
	}
	from, err := netip.ParseAddrPort(c.RemoteAddr().String())
	if err != nil {
		return err
	}
	reply, err := s.reply(tokenOf(b), from, 0)
	if err == nil {
		_, err = c.Write(append(reply, '\n'))
	}
	return err
}

func (s Server) reply(token string, from netip.AddrPort, bytes int) ([]byte, error) {
	return json.Marshal(selftest.Reply{Token: token, Name: s.Name, Source: netip.AddrPortFrom(from.Addr().Unmap().WithZone(""), from.Port()), Bytes: bytes})
}

// tokenSize is how many characters a token has.
const tokenSize = 16

// tokenOf is the token at the begin of a question; others than hexadecimal digits aren't repeated.
func tokenOf(b []byte) string {
	n := 0
	for n < min(len(b), tokenSize) && (b[n] >= '0' && b[n] <= '9' || b[n] >= 'a' && b[n] <= 'f') {
		n++
	}
	return string(b[:n])
}
