package egress

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit"
)

// packet is what a capture knows of one.
type packet struct {
	// out says that it came from the namespace behind the port.
	out      bool
	src, dst netip.Addr
	protocol byte
	size     int
	// UDP's.
	sport, dport, checksum uint16
	tcpFlags               byte
}

func (p packet) String() string {
	return fmt.Sprintf("%s:%d > %s:%d protocol %d, %d bytes, out %t", p.src, p.sport, p.dst, p.dport, p.protocol, p.size, p.out)
}

// fou says whether it is of a tunnel.
func (p packet) fou() bool { return p.protocol == unix.IPPROTO_UDP && p.dport == 5555 }

// capture sees all packets of a port of the fabric.
type capture struct {
	t    *testing.T
	file *os.File
	done chan struct{}

	mu      sync.Mutex
	packets []packet
}

// newCapture begins to capture; it ends with the test.
func newCapture(t *testing.T, port string) *capture {
	t.Helper()
	const all = unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8 // in the network's byte order
	fd := testkit.Must(unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0))(t)
	testkit.Check(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20))
	index := strings.TrimSpace(string(testkit.Must(os.ReadFile("/sys/class/net/" + port + "/ifindex"))(t)))
	sa := &unix.SockaddrLinklayer{Protocol: all & 0xffff}
	testkit.Must(fmt.Sscan(index, &sa.Ifindex))(t)
	testkit.Check(t, unix.Bind(fd, sa))
	c := &capture{t: t, file: os.NewFile(uintptr(fd), "capture of "+port), done: make(chan struct{})}
	go c.run(fd)
	t.Cleanup(func() { c.file.Close(); <-c.done })
	return c
}

func (c *capture) run(fd int) {
	defer close(c.done)
	raw, err := c.file.SyscallConn()
	if err != nil {
		return
	}
	buf := make([]byte, 70000)
	for {
		n, outgoing := 0, false
		err := raw.Read(func(fd uintptr) bool {
			size, from, err := unix.Recvfrom(int(fd), buf, 0)
			if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
				return false
			}
			if sa, ok := from.(*unix.SockaddrLinklayer); ok {
				outgoing = sa.Pkttype == unix.PACKET_OUTGOING
			}
			n = size
			return true
		})
		if err != nil {
			return
		}
		// A packet that leaves by the port enters the namespace.
		if p, ok := parse(buf[:n]); ok {
			p.out = !outgoing
			c.mu.Lock()
			c.packets = append(c.packets, p)
			c.mu.Unlock()
		}
	}
}

// parse reads an Ethernet frame; false for what isn't IP.
func parse(b []byte) (p packet, ok bool) {
	if len(b) < 14+20 {
		return p, false
	}
	kind := binary.BigEndian.Uint16(b[12:])
	b = b[14:]
	var rest []byte
	switch {
	case kind == unix.ETH_P_IP:
		p.src, _ = netip.AddrFromSlice(b[12:16])
		p.dst, _ = netip.AddrFromSlice(b[16:20])
		p.protocol, p.size, rest = b[9], int(binary.BigEndian.Uint16(b[2:])), b[min(len(b), int(b[0]&15)*4):]
		if binary.BigEndian.Uint16(b[6:])&0x1fff != 0 {
			rest = nil // a later fragment
		}
	case kind == unix.ETH_P_IPV6 && len(b) >= 40:
		p.src, _ = netip.AddrFromSlice(b[8:24])
		p.dst, _ = netip.AddrFromSlice(b[24:40])
		p.protocol, p.size, rest = b[6], 40+int(binary.BigEndian.Uint16(b[4:])), b[40:]
	default:
		return p, false
	}
	if (p.protocol == unix.IPPROTO_UDP || p.protocol == unix.IPPROTO_TCP) && len(rest) >= 8 {
		p.sport, p.dport = binary.BigEndian.Uint16(rest), binary.BigEndian.Uint16(rest[2:])
		p.checksum = binary.BigEndian.Uint16(rest[6:])
		if p.protocol == unix.IPPROTO_TCP && len(rest) >= 14 {
			p.tcpFlags = rest[13]
		}
	}
	return p, true
}

// all returns the packets so far for which match is true.
func (c *capture) all(match func(packet) bool) []packet {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(c.packets), func(p packet) bool { return !match(p) })
}

// forget forgets the packets so far.
func (c *capture) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.packets = nil
}

// foreign are packets that left the router with a source that isn't its own.
func (c *capture) foreign() []packet {
	return c.all(func(p packet) bool {
		own := p.src == router4 || p.src == router6 || p.src.IsLinkLocalUnicast() || p.src.IsUnspecified()
		return p.out && !own
	})
}

// sound fails the test if a packet left the router with a wrong source.
func (c *capture) sound() {
	c.t.Helper()
	c.settle()
	if bad := c.foreign(); len(bad) > 0 {
		c.t.Errorf("%d packets left with a wrong source, the first %s", len(bad), bad[0])
	}
}

// settle waits until nothing arrives any more that was sent before.
func (c *capture) settle() {
	count := func() int {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.packets)
	}
	testkit.Eventually(c.t, 10*time.Second, "packets end", func() error {
		before := count()
		time.Sleep(30 * time.Millisecond)
		if after := count(); after != before {
			return fmt.Errorf("%d more packets", after-before)
		}
		return nil
	})
}
