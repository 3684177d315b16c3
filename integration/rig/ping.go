package rig

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/testkit"
)

// Ping is a ping that goes on, 100 times a second.
type Ping struct {
	name string
	conn *icmp.PacketConn
	// request and protocol are of the family (IANA protocol numbers).
	request  icmp.Type
	protocol int
	stop     chan struct{}
	sender   sync.WaitGroup
	receiver sync.WaitGroup
	sent     int
	failed   error
	answered atomic.Int64
}

// Ping begins to ping an address from the sandbox.
func (s *Sandbox) Ping(to netip.Addr) (*Ping, error) { return s.ns.ping(s.String(), to) }

// PingOutside begins to ping an address from the router between the nodes.
func (r *Rig) PingOutside(to netip.Addr) (*Ping, error) { return r.fabric.ping("outside", to) }

func (n *namespace) ping(from string, to netip.Addr) (*Ping, error) {
	p := &Ping{name: from + " to " + to.String(), request: ipv4.ICMPTypeEcho, protocol: 1, stop: make(chan struct{})}
	network, address := "udp4", "0.0.0.0"
	if to.Is6() {
		p.request, p.protocol = ipv6.ICMPTypeEchoRequest, 58
		network, address = "udp6", "::"
	}
	if _, err := sysctl.Set(n.NS, sysctl.Setting{Key: "net/ipv4/ping_group_range", Value: "0\t0"}); err != nil {
		return nil, fmt.Errorf("ping %s: %w", p.name, err)
	}
	if err := n.Do(func() (err error) {
		// The kernel gives each such socket the answers to its own requests only.
		p.conn, err = icmp.ListenPacket(network, address)
		return err
	}); err != nil {
		return nil, fmt.Errorf("ping %s: %w", p.name, err)
	}
	p.sender.Go(func() { p.send(to) })
	p.receiver.Go(p.receive)
	return p, nil
}

func (p *Ping) send(to netip.Addr) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		m := icmp.Message{Type: p.request, Body: &icmp.Echo{Seq: p.sent & 0xffff}}
		b, err := m.Marshal(nil)
		if err == nil {
			_, err = p.conn.WriteTo(b, &net.UDPAddr{IP: to.AsSlice()})
		}
		p.sent++
		if err != nil && p.failed == nil {
			p.failed = fmt.Errorf("ping %s, number %d: %w", p.name, p.sent, err)
		}
		select {
		case <-p.stop:
			return
		case <-tick.C:
		}
	}
}

func (p *Ping) receive() {
	buf := make([]byte, 1500)
	for {
		n, _, err := p.conn.ReadFrom(buf)
		if err != nil {
			return
		}
		if m, err := icmp.ParseMessage(p.protocol, buf[:n]); err == nil && (m.Type == ipv4.ICMPTypeEchoReply || m.Type == ipv6.ICMPTypeEchoReply) {
			p.answered.Add(1)
		}
	}
}

// Answered is the number of answers so far.
func (p *Ping) Answered() int { return int(p.answered.Load()) }

// End ends it, waits for the last answers, and returns how many requests were sent
// and how many were answered. The error is the first that a request met.
func (p *Ping) End() (sent, answered int, err error) {
	close(p.stop)
	p.sender.Wait()
	deadline := time.Now().Add(testkit.Timeout(time.Second))
	for p.Answered() < p.sent && time.Now().Before(deadline) {
		time.Sleep(5 * time.Millisecond)
	}
	p.conn.Close()
	p.receiver.Wait()
	return p.sent, p.Answered(), p.failed
}

// String says who pings whom.
func (p *Ping) String() string { return p.name }
