package observe

import (
	"net"
	"net/http"
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

// bounded closes the oldest connection of a remote address when it has more than maxConns to a server at
// once. Others are served on: they have addresses of their own, which a pod can't send from. So is kubelet, should
// somebody make its address open many, as by a Service of type NodePort: a probe takes milliseconds. Of more than
// maxOfAll connections it closes the oldest.
type bounded struct {
	mu   sync.Mutex
	open []net.Conn // the oldest first
}

// state is told of each connection that comes or ends; see http.Server.ConnState.
func (b *bounded) state(c net.Conn, s http.ConnState) {
	switch s {
	case http.StateNew:
		if oldest := b.add(c); oldest != nil {
			if tcp, ok := oldest.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0) // no TIME_WAIT for each of them; it is closed all the same
			}
			_ = oldest.Close() // its server notices, and closes it, too
		}
	case http.StateClosed:
		b.remove(c)
	}
}

// add returns the connection that is one too many, or nil.
func (b *bounded) add(c net.Conn) (oldest net.Conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	from, first, n := remoteOf(c), -1, 0
	for i, o := range b.open {
		if remoteOf(o) == from {
			if n++; first < 0 {
				first = i
			}
		}
	}
	switch {
	case n >= maxConns:
		oldest = b.open[first]
	case len(b.open) >= maxOfAll:
		oldest = b.open[0]
	}
	b.open = append(slices.DeleteFunc(b.open, func(o net.Conn) bool { return o == oldest }), c)
	return oldest
}

func (b *bounded) remove(c net.Conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open = slices.DeleteFunc(b.open, func(o net.Conn) bool { return o == c })
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
