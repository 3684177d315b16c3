package netlab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Listen listens in the namespace; network is one of package net's for an IP address.
func (n *NS) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	return netns.In(n.NS, func() (net.Listener, error) { return new(net.ListenConfig).Listen(ctx, network, address) })
}

// ListenPacket is Listen for datagrams.
func (n *NS) ListenPacket(ctx context.Context, network, address string) (net.PacketConn, error) {
	return netns.In(n.NS, func() (net.PacketConn, error) { return new(net.ListenConfig).ListenPacket(ctx, network, address) })
}

// Dialer is a function that connects from somewhere, such as NS.Dial.
type Dialer func(ctx context.Context, network, address string) (net.Conn, error)

// Dial connects from the namespace to an IP address.
func (n *NS) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return netns.In(n.NS, func() (net.Conn, error) { return new(net.Dialer).DialContext(ctx, network, address) })
}

// Reach connects by TCP to an address that the namespace has, and returns the source that is seen there.
func (n *NS) Reach(ctx context.Context, to netip.Addr, dial Dialer) (source netip.Addr, err error) {
	l, err := n.Listen(ctx, "tcp", netip.AddrPortFrom(to, 0).String())
	if err != nil {
		return source, fmt.Errorf("listen at %s: %w", to, err)
	}
	defer l.Close()
	conn, err := dial(ctx, "tcp", l.Addr().String())
	if err != nil {
		return source, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		err = l.(*net.TCPListener).SetDeadline(deadline)
	}
	if err == nil {
		var seen net.Conn
		if seen, err = l.Accept(); err == nil {
			source, err = seen.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap(), seen.Close()
		}
	}
	return source, errors.Join(err, conn.Close())
}

// Serve handles each connection that a listener accepts, until the listener is closed; handle need not close it.
func Serve(l net.Listener, handle func(net.Conn)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			handle(c)
		}()
	}
}

// Proxy connects what is dialed in a namespace with an address of the machine.
type Proxy struct {
	listener net.Listener
	target   string

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]bool
	wg    sync.WaitGroup
}

// NewProxy listens at an address in a namespace.
func NewProxy(ctx context.Context, ns *NS, at, target string) (*Proxy, error) {
	l, err := ns.Listen(ctx, "tcp4", at)
	if err != nil {
		return nil, fmt.Errorf("listen at %s in the namespace: %w", at, err)
	}
	p := &Proxy{listener: l, target: target, conns: map[net.Conn]bool{}}
	p.wg.Go(p.accept)
	return p, nil
}

func (p *Proxy) accept() {
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.serve(c) })
	}
}

func (p *Proxy) serve(c net.Conn) {
	defer c.Close()
	up, err := net.Dial("tcp4", p.target)
	if err != nil {
		return
	}
	defer up.Close()
	if !p.keep(c, up) {
		return
	}
	defer p.forget(c, up)
	var both sync.WaitGroup
	for _, pair := range [][2]net.Conn{{c, up}, {up, c}} {
		both.Go(func() {
			// The end of one direction ends both; the reason doesn't matter.
			_, _ = io.Copy(pair[0], pair[1])
			c.Close()
			up.Close()
		})
	}
	both.Wait()
}

func (p *Proxy) keep(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut {
		return false
	}
	for _, c := range conns {
		p.conns[c] = true
	}
	return true
}

func (p *Proxy) forget(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		delete(p.conns, c)
	}
}

// Cut ends all connections and refuses new ones, or lets them through again.
func (p *Proxy) Cut(cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = cut
	if cut {
		for c := range p.conns {
			c.Close()
		}
	}
}

// Close ends all connections, and refuses new ones.
func (p *Proxy) Close() error {
	err := p.listener.Close()
	p.Cut(true)
	p.wg.Wait()
	return err
}
