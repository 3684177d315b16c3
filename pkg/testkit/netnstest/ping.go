package netnstest

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// protocol is what ICMP is called in one address family.
type protocol struct {
	network, any  string
	number        int
	request, echo icmp.Type
}

func protocolOf(a netip.Addr) protocol {
	if a.Is4() {
		return protocol{"ip4:icmp", "0.0.0.0", 1, ipv4.ICMPTypeEcho, ipv4.ICMPTypeEchoReply}
	}
	return protocol{"ip6:ipv6-icmp", "::", 58, ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply}
}

// listen opens a socket for ICMP in the namespace. It receives all ICMP of one
// family that the namespace receives.
func (n *NS) listen(a netip.Addr) (conn *icmp.PacketConn, err error) {
	p := protocolOf(a)
	err = n.Do(func() error {
		conn, err = icmp.ListenPacket(p.network, p.any)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen for ICMP: %w", err)
	}
	return conn, nil
}

var echoID atomic.Uint32

// Ping sends one echo request from the namespace and waits for the answer. A
// link-local destination has the index of the link as zone.
func (n *NS) Ping(dst netip.Addr, timeout time.Duration) error {
	conn, err := n.listen(dst)
	if err != nil {
		return err
	}
	defer conn.Close()
	id := int(echoID.Add(1) & 0xffff)
	p := protocolOf(dst)
	request := icmp.Message{Type: p.request, Body: &icmp.Echo{ID: id, Seq: 1, Data: []byte("coil")}}
	b, err := request.Marshal(nil)
	if err != nil {
		return fmt.Errorf("encode echo request: %w", err)
	}
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if _, err := conn.WriteTo(b, &net.IPAddr{IP: dst.AsSlice(), Zone: dst.Zone()}); err != nil {
		return fmt.Errorf("ping %s: %w", dst, err)
	}
	buf := make([]byte, 1500)
	for {
		size, from, err := conn.ReadFrom(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("ping %s: no answer within %s", dst, timeout)
		}
		if err != nil {
			return fmt.Errorf("ping %s: %w", dst, err)
		}
		m, err := icmp.ParseMessage(p.number, buf[:size])
		if err != nil {
			return fmt.Errorf("ping %s: answer from %s: %w", dst, from, err)
		}
		if e, ok := m.Body.(*icmp.Echo); ok && m.Type == p.echo && e.ID == id {
			return nil
		}
	}
}

// SourceOf pings dst, an address of the namespace to, and returns the source
// address that the echo request arrives with.
func (n *NS) SourceOf(to *NS, dst netip.Addr, timeout time.Duration) (netip.Addr, error) {
	conn, err := to.listen(dst)
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	if err := n.Ping(dst, timeout); err != nil {
		return netip.Addr{}, err
	}
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return netip.Addr{}, err
	}
	p := protocolOf(dst)
	buf := make([]byte, 1500)
	for {
		size, from, err := conn.ReadFrom(buf)
		if err != nil {
			return netip.Addr{}, fmt.Errorf("receive echo request: %w", err)
		}
		m, err := icmp.ParseMessage(p.number, buf[:size])
		if err != nil {
			return netip.Addr{}, fmt.Errorf("receive echo request: %w", err)
		}
		if m.Type == p.request {
			return netip.ParseAddr(from.String())
		}
	}
}
