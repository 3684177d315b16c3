package netlab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Packet is an IP packet that a capture has seen.
type Packet struct {
	Link     int  // index
	Out      bool // by the link; otherwise it came in
	Src, Dst netip.Addr
	Protocol byte
	Size     int
	// SPort and DPort are of UDP and TCP, 0 for others.
	SPort, DPort uint16
	Checksum     uint16 // of UDP
	TCPFlags     byte
}

// String is what a person wants to know of the packet.
func (p Packet) String() string {
	return fmt.Sprintf("%s:%d > %s:%d protocol %d, %d bytes, out %t", p.Src, p.SPort, p.Dst, p.DPort, p.Protocol, p.Size, p.Out)
}

// Capture sees the IP packets of links of a namespace.
type Capture struct {
	fd         int
	want       func(Packet) bool
	end, ended chan struct{}

	mu      sync.Mutex
	packets []Packet

	closing sync.Once
	missed  int
	failed  error
}

// NewCapture begins to capture the packets for which want is true, of a link of the namespace, or of all that it has and
// will have if link is empty.
func (n *NS) NewCapture(link string, want func(Packet) bool) (*Capture, error) {
	fd, err := netns.In(n.NS, func() (int, error) { return captureSocket(link) })
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	c := &Capture{fd: fd, want: want, end: make(chan struct{}), ended: make(chan struct{})}
	go c.run()
	return c, nil
}

// captureSocket opens one in the namespace of the thread.
func captureSocket(link string) (fd int, err error) {
	to := &unix.SockaddrLinklayer{Protocol: networkOrder(unix.ETH_P_ALL)}
	if link != "" {
		i, err := net.InterfaceByName(link)
		if err != nil {
			return -1, err
		}
		to.Ifindex = i.Index
	}
	// Without a protocol it receives nothing before it is bound.
	if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, err
	}
	// Nothing must be missed.
	if err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20); err == nil {
		err = unix.Bind(fd, to)
	}
	if err != nil {
		unix.Close(fd)
	}
	return fd, err
}

// networkOrder is a protocol as struct sockaddr_ll has it: its bytes in memory are in network byte order.
func networkOrder(protocol uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, protocol))
}

func (c *Capture) run() {
	defer close(c.ended)
	for {
		select {
		case <-c.end:
			return
		default:
		}
		const wait = 50 // ms
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLIN}}, wait); n > 0 && err == nil {
			c.mu.Lock()
			c.read()
			c.mu.Unlock()
		}
	}
}

// read keeps all packets that have come.
func (c *Capture) read() {
	buf := make([]byte, 128)
	for {
		n, from, err := unix.Recvfrom(c.fd, buf, unix.MSG_DONTWAIT)
		if err != nil {
			return // that was all
		}
		a, ok := from.(*unix.SockaddrLinklayer)
		if !ok || a.Protocol != networkOrder(unix.ETH_P_IP) && a.Protocol != networkOrder(unix.ETH_P_IPV6) {
			continue
		}
		if p, ok := parse(buf[:n]); ok {
			p.Link, p.Out = a.Ifindex, a.Pkttype == unix.PACKET_OUTGOING
			if c.want(p) {
				c.packets = append(c.packets, p)
			}
		}
	}
}

// parse reads the beginning of a packet; false for what isn't IP.
func parse(b []byte) (p Packet, ok bool) {
	var rest []byte
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		p.Src, _ = netip.AddrFromSlice(b[12:16])
		p.Dst, _ = netip.AddrFromSlice(b[16:20])
		p.Protocol, p.Size, rest = b[9], int(binary.BigEndian.Uint16(b[2:])), b[min(len(b), int(b[0]&15)*4):]
		if binary.BigEndian.Uint16(b[6:])&0x1fff != 0 {
			rest = nil // a later fragment
		}
	case len(b) >= 40 && b[0]>>4 == 6:
		p.Src, _ = netip.AddrFromSlice(b[8:24])
		p.Dst, _ = netip.AddrFromSlice(b[24:40])
		p.Protocol, p.Size, rest = b[6], 40+int(binary.BigEndian.Uint16(b[4:])), b[40:]
	default:
		return p, false
	}
	if (p.Protocol == unix.IPPROTO_UDP || p.Protocol == unix.IPPROTO_TCP) && len(rest) >= 8 {
		p.SPort, p.DPort = binary.BigEndian.Uint16(rest), binary.BigEndian.Uint16(rest[2:])
		switch {
		case p.Protocol == unix.IPPROTO_UDP:
			p.Checksum = binary.BigEndian.Uint16(rest[6:])
		case len(rest) >= 14:
			p.TCPFlags = rest[13]
		}
	}
	return p, true
}

// Take returns the packets so far, those that the kernel has for the capture included, and forgets them.
func (c *Capture) Take() []Packet {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.read()
	all := c.packets
	c.packets = nil
	return all
}

// All returns the packets so far for which match is true.
func (c *Capture) All(match func(Packet) bool) []Packet {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.read()
	return slices.DeleteFunc(slices.Clone(c.packets), func(p Packet) bool { return !match(p) })
}

// Close ends the capture and returns how many packets it has missed. Later calls return the same.
func (c *Capture) Close() (missed int, err error) {
	c.closing.Do(func() {
		close(c.end)
		<-c.ended
		stats, err := unix.GetsockoptTpacketStats(c.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
		if err == nil {
			c.missed = int(stats.Drops)
		}
		c.failed = errors.Join(err, unix.Close(c.fd))
	})
	return c.missed, c.failed
}
