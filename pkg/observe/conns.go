package observe

import (
	"net"
	"net/netip"
	"slices"
	"sync"
)

const (
	// maxConns is how many connections one remote address may have to a server at once. Kubelet and Prometheus need
	// one or two each; a pod may open as many as it has ports.
	maxConns = 16
	// maxOfAll is how many all remote addresses may have together. Each host of the network has as many addresses as
	// its prefix of IPv6 holds.
	maxOfAll = 1024
)

// bounded is a listener that closes the oldest connection of a remote address when it has more than maxConns at
// once. Others are served on: they have addresses of their own, which a pod can't send from. So is kubelet, should
// somebody make its address open many, as by a Service of type NodePort: a probe takes milliseconds. Of more than
// maxOfAll connections it closes the oldest.
type bounded struct {
	net.Listener

	mu   sync.Mutex
	open []*counted // the oldest first
}

func newBounded(l net.Listener) *bounded { return &bounded{Listener: l} }

// Accept implements net.Listener.
func (l *bounded) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	made := &counted{Conn: c, listener: l, from: remoteOf(c)}
	if oldest := l.add(made); oldest != nil {
		if tcp, ok := oldest.Conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // no TIME_WAIT for each of them; it is closed all the same
		}
		_ = oldest.Conn.Close() // its server notices, and closes it, too
	}
	return made, nil
}

// add returns the connection that is one too many, or nil.
func (l *bounded) add(c *counted) *counted {
	l.mu.Lock()
	defer l.mu.Unlock()
	first, n := -1, 0
	for i, o := range l.open {
		if o.from == c.from {
			if n++; first < 0 {
				first = i
			}
		}
	}
	var oldest *counted
	switch {
	case n >= maxConns:
		oldest = l.open[first]
	case len(l.open) >= maxOfAll:
		oldest = l.open[0]
	}
	l.open = append(slices.DeleteFunc(l.open, func(o *counted) bool { return o == oldest }), c)
	return oldest
}

func (l *bounded) remove(c *counted) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open = slices.DeleteFunc(l.open, func(o *counted) bool { return o == c })
}

// remoteOf is the zero Addr for a connection that isn't IP's.
func remoteOf(c net.Conn) netip.Addr {
	tcp, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	return remoteAddr(tcp.AddrPort().Addr())
}

// remoteAddr is the address by which a remote one counts.
func remoteAddr(a netip.Addr) netip.Addr {
	if a.Zone() != "" {
		return netip.IPv6Unspecified().WithZone(a.Zone())
	}
	return a.Unmap()
}

// counted is a connection that counts until it is closed.
type counted struct {
	net.Conn
	listener *bounded
	from     netip.Addr
}

// Close implements net.Conn.
func (c *counted) Close() error {
	defer c.listener.remove(c)
	return c.Conn.Close()
}
