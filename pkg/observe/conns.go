package observe

import (
	"net"
	"net/netip"
	"sync"
)

// maxConns is how many connections one remote address may have to a server at once. Kubelet and Prometheus need one
// or two each; a pod may open as many as it has ports.
const maxConns = 16

// perRemote is a listener that closes connections of a remote address beyond maxConns at once. Others are served
// on: they have addresses of their own, which a pod can't send from.
type perRemote struct {
	net.Listener

	mu   sync.Mutex
	open map[netip.Addr]int
}

func newPerRemote(l net.Listener) *perRemote {
	return &perRemote{Listener: l, open: map[netip.Addr]int{}}
}

// Accept implements net.Listener.
func (l *perRemote) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from := remoteOf(c)
		if l.take(from) {
			return &counted{Conn: c, done: sync.OnceFunc(func() { l.free(from) })}, nil
		}
		if tcp, ok := c.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // no TIME_WAIT for each of them; it is closed all the same
		}
		_ = c.Close()
	}
}

func (l *perRemote) take(from netip.Addr) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open[from] == maxConns {
		return false
	}
	l.open[from]++
	return true
}

func (l *perRemote) free(from netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open[from]--; l.open[from] == 0 {
		delete(l.open, from)
	}
}

// remoteOf is the zero Addr for a connection that isn't IP's.
func remoteOf(c net.Conn) netip.Addr {
	tcp, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	return tcp.AddrPort().Addr().Unmap()
}

// counted is a connection that counts until it is closed.
type counted struct {
	net.Conn
	done func()
}

// Close implements net.Conn.
func (c *counted) Close() error {
	defer c.done()
	return c.Conn.Close()
}
