// Package peers carries the messages of nodes about floating addresses, as UDP datagrams that only those make who know the key, and opens
// connections between such nodes.
//
// It owns sockets, where nodes are, and which datagrams and connections are looked at. It must not know what messages mean, nor what
// is sent by connections.
//
// Anybody may send datagrams to the port. One from an address that no peer has costs a look into a map. Of those from the address of a peer
// at most mostForeign a second may be without the key; the rest of that second all of that address are dropped, whether somebody
// forges the address or not. Nothing is answered here, and package holding answers a message by one that isn't longer, to the address that the
// peer has in the API: no datagram makes a node send to a third party, or more than it got.
package peers

import (
	"context"
	"crypto/tls"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/holding"
)

const (
	// backlog is how many messages may wait until they are sent. More are lost.
	backlog = 1024
	// retry is the time between two attempts to open a socket, sendWait how long to wait for room in its buffer.
	retry, sendWait = time.Second, 100 * time.Millisecond
	// mostForeign is how many datagrams without the key are looked at in a second, of each address of a peer. To look at one takes
	// some microseconds.
	mostForeign = 1000
)

// Config is what Peers are made of.
type Config struct {
	// Node is this node, Port the UDP and TCP port of all.
	Node string
	Port int
	// Addrs returns the addresses of this node at which others ask it.
	Addrs func() []netip.Addr
	// Keys returns the keys, of which the first one is for messages that are sent.
	Keys func() [][]byte
	// Receive takes messages. It doesn't block.
	Receive func(from string, m holding.Message)
	// Accept takes a connection of a node, which is closed when it returns. It is called concurrently.
	Accept func(ctx context.Context, from string, conn net.Conn)
}

// Peers are the other nodes. Its methods may be called concurrently.
type Peers struct {
	cfg   Config
	out   chan message
	moved chan struct{}
	known atomic.Pointer[addresses]

	mu      sync.Mutex
	sockets map[netip.Addr]*socket
	readers sync.WaitGroup
	// accepted counts connections of nodes, by their addresses, and all is their number.
	accepted map[netip.Addr]int
	all      int

	certificate            func() (*tls.Certificate, error)
	datagrams, connections *prometheus.CounterVec
}

// socket has what belongs to an address of this node.
type socket struct {
	*net.UDPConn
	listener *net.TCPListener // nil before it could be opened
}

func (s *socket) close() {
	_ = s.UDPConn.Close()
	if s.listener != nil {
		_ = s.listener.Close()
	}
}

type message struct {
	to string
	holding.Message
}

// addresses are where peers are.
type addresses struct {
	of  map[string][]netip.Addr
	all map[netip.Addr]bool
}

// New returns Peers without sockets.
func New(cfg Config, registry prometheus.Registerer) *Peers {
	p := &Peers{
		cfg: cfg, out: make(chan message, backlog), moved: make(chan struct{}, 1), sockets: map[netip.Addr]*socket{},
		accepted: map[netip.Addr]int{}, certificate: sync.OnceValues(newCertificate),
		datagrams: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coil_floating_datagrams_total",
			Help: "Datagrams between nodes about floating addresses, by what became of them: sent, unsent, received; stranger: of an address " +
				"that no node has; foreign: made without the key, or not for this node; refused: too many foreign ones of the address.",
		}, []string{"result"}),
		connections: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coil_floating_connections_total",
			Help: "Connections of nodes about floating addresses to this one, by what became of them: accepted; stranger: of an address that no " +
				"node has; foreign: of one without the key, or not for this node; refused: too many.",
		}, []string{"result"}),
	}
	p.known.Store(&addresses{})
	registry.MustRegister(p.datagrams, p.connections)
	return p
}

// Peers says where nodes are.
func (p *Peers) Peers(of map[string][]netip.Addr) {
	a := &addresses{of: of, all: map[netip.Addr]bool{}}
	for _, addrs := range of {
		for _, addr := range addrs {
			a.all[addr] = true
		}
	}
	p.known.Store(a)
}

// Send sends a message to a node. It doesn't block, and the message may be lost.
func (p *Peers) Send(node string, m holding.Message) {
	select {
	case p.out <- message{node, m}:
	default:
		p.count("unsent")
	}
}

// Moved says that Addrs may return others than before.
func (p *Peers) Moved() {
	select {
	case p.moved <- struct{}{}:
	default: // it is told already
	}
}

func (p *Peers) count(result string) { p.datagrams.WithLabelValues(result).Inc() }

// Run sends and receives until ctx ends.
func (p *Peers) Run(ctx context.Context) error {
	defer p.readers.Wait()
	defer p.close(func(netip.Addr) bool { return true })
	var sender sync.WaitGroup
	defer sender.Wait()
	sender.Go(func() { p.send(ctx) })
	for {
		var again <-chan time.Time
		if !p.open(ctx) {
			again = time.After(retry)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-p.moved:
		case <-again:
		}
	}
}

// open opens the sockets that are missing, closes those of other addresses, and says whether all are open.
func (p *Peers) open(ctx context.Context) bool {
	want := p.cfg.Addrs()
	p.close(func(a netip.Addr) bool { return !slices.Contains(want, a) })
	p.mu.Lock()
	defer p.mu.Unlock()
	all := len(want) > 0
	for _, a := range want {
		if err := p.openAt(ctx, a); err != nil {
			klog.FromContext(ctx).Error(err, "Can't hear other nodes about floating addresses (--floating-port), trying again")
			all = false
		}
	}
	return all
}

// openAt opens what is missing of the sockets at an address of this node. Messages don't need the one for connections. It must be called with
// mu held.
func (p *Peers) openAt(ctx context.Context, a netip.Addr) error {
	at := netip.AddrPortFrom(a, uint16(p.cfg.Port))
	s := p.sockets[a]
	if s == nil {
		conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		if err != nil {
			return err
		}
		s = &socket{UDPConn: conn}
		p.sockets[a] = s
		p.readers.Go(func() { p.receive(ctx, s) })
	}
	if s.listener != nil {
		return nil
	}
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
	if err != nil {
		return err
	}
	s.listener = l
	p.readers.Go(func() { p.accept(ctx, s, l) })
	return nil
}

// close closes sockets.
func (p *Peers) close(which func(netip.Addr) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for a, s := range p.sockets {
		if which(a) {
			s.close()
			delete(p.sockets, a)
		}
	}
}

// send sends what waits until ctx ends.
func (p *Peers) send(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case m := <-p.out:
			result := "sent"
			if !p.sendOne(ctx, m) {
				result = "unsent"
			}
			p.count(result)
		}
	}
}

// sendOne sends a message, and says whether it could.
func (p *Peers) sendOne(ctx context.Context, m message) bool {
	keys := p.cfg.Keys()
	conn, _, to := p.way(m.to)
	if conn == nil || len(keys) == 0 {
		return false
	}
	datagram, err := holding.Seal(keys[0], p.cfg.Node, m.to, m.Message)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Can't tell another node about floating addresses")
		return false
	}
	_ = conn.SetWriteDeadline(time.Now().Add(sendWait))
	if _, err := conn.WriteToUDPAddrPort(datagram, netip.AddrPortFrom(to, uint16(p.cfg.Port))); err != nil {
		klog.FromContext(ctx).V(4).Info("Can't send to another node", "node", m.to, "reason", err)
		return false
	}
	return true
}

// way returns the first address of a node to whose family this node has a socket, and the socket with its address.
func (p *Peers) way(node string) (s *socket, from, to netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, to := range p.known.Load().of[node] {
		for from, s := range p.sockets {
			if from.Is4() == to.Is4() {
				return s, from, to
			}
		}
	}
	return nil, netip.Addr{}, netip.Addr{}
}

// receive takes datagrams until the socket is closed.
func (p *Peers) receive(ctx context.Context, conn *socket) {
	buffer := make([]byte, holding.MaxDatagram+1)
	b := budget{foreign: map[netip.Addr]int{}}
	for {
		n, from, err := conn.ReadFromUDPAddrPort(buffer)
		switch {
		case err == nil:
			p.count(p.take(&b, from.Addr().Unmap().WithZone(""), buffer[:n]))
		case p.closed(conn):
			return
		default:
			klog.FromContext(ctx).Error(err, "Can't hear other nodes about floating addresses, trying again")
			select {
			case <-ctx.Done():
				return
			case <-time.After(retry):
			}
		}
	}
}

// closed says whether a socket isn't used any more.
func (p *Peers) closed(s *socket) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, used := range p.sockets {
		if used == s {
			return false
		}
	}
	return true
}

// budget counts foreign datagrams of a second.
type budget struct {
	since   time.Time
	foreign map[netip.Addr]int
}

// take passes the message of a datagram on, and says what became of it.
func (p *Peers) take(b *budget, from netip.Addr, datagram []byte) string {
	if !p.known.Load().all[from] {
		return "stranger"
	}
	if now := time.Now(); now.Sub(b.since) >= time.Second {
		b.since = now
		clear(b.foreign)
	}
	if b.foreign[from] >= mostForeign {
		return "refused"
	}
	node, m, err := holding.Open(p.cfg.Keys(), p.cfg.Node, datagram)
	if err != nil {
		b.foreign[from]++
		return "foreign"
	}
	p.cfg.Receive(node, m)
	return "received"
}
