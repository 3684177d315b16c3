package observe

import (
	"net"
	"net/netip"
	"slices"
	"sync"
)

// maxConns is how many connections one remote address may have to a server at once. Kubelet and Prometheus need one
// or two each; a pod may open as many as it has ports.
const maxConns = 16

// perRemote is a listener that closes the oldest connection of a remote address when it has more than maxConns at
// once. Others are served on: they have addresses of their own, which a pod can't send from. So is kubelet, should
// somebody make its address open many, as by a Service of type NodePort: a probe takes milliseconds.
type perRemote struct {
	net.Listener

	mu   sync.Mutex
	open map[netip.Addr][]*counted // the oldest first
}

func newPerRemote(l net.Listener) *perRemote {
	return &perRemote{Listener: l, open: map[netip.Addr][]*counted{}}
}

// Accept implements net.Listener.
func (l *perRemote) Accept() (net.Conn, error) {
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
func (l *perRemote) add(c *counted) (oldest *counted) {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.open[c.from]
	if len(all) == maxConns {
		oldest, all = all[0], all[1:]
	}
	l.open[c.from] = append(slices.Clone(all), c)
	return oldest
}

func (l *perRemote) remove(c *counted) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open[c.from] = slices.DeleteFunc(l.open[c.from], func(o *counted) bool { return o == c })
	if len(l.open[c.from]) == 0 {
		delete(l.open, c.from)
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
	listener *perRemote
	from     netip.Addr
}

// Close implements net.Conn.
func (c *counted) Close() error {
	defer c.listener.remove(c)
	return c.Conn.Close()
}
