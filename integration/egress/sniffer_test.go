package egress

import (
	"encoding/binary"
	"net/netip"
	gosync "sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// sniffer sees all packets that leave a network namespace, by whatever link.
type sniffer struct {
	fd int

	mu   gosync.Mutex
	seen map[sent]int
}

// sent is what tells packets apart.
type sent struct {
	link int // index
	dst  netip.Addr
	// sport and dport are of UDP; 0 for others.
	sport, dport uint16
}

// sniff begins to look.
func sniff(t *testing.T, ns *netnstest.NS) *sniffer {
	t.Helper()
	const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // in network byte order
	fd := -1
	err := ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, all)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	// Nothing must be missed.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20); err != nil {
		t.Fatal(err)
	}
	s := &sniffer{fd: fd, seen: map[sent]int{}}
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-end:
				return
			default:
			}
			const wait = 50 // ms
			if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, wait); n > 0 && err == nil {
				s.read()
			}
		}
	}()
	t.Cleanup(func() {
		close(end)
		<-ended
		stats, err := unix.GetsockoptTpacketStats(fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
		if err != nil || stats.Drops > 0 {
			t.Errorf("the sniffer missed %+v, %v", stats, err)
		}
		unix.Close(fd)
	})
	return s
}

// read notes all packets that have come.
func (s *sniffer) read() {
	s.mu.Lock()
	defer s.mu.Unlock()
	buf := make([]byte, 128)
	for {
		n, from, err := unix.Recvfrom(s.fd, buf, unix.MSG_DONTWAIT)
		if err != nil {
			return // that was all
		}
		if a, ok := from.(*unix.SockaddrLinklayer); ok && a.Pkttype == unix.PACKET_OUTGOING {
			s.add(a.Ifindex, buf[:n])
		}
	}
}

// add notes an IP packet.
func (s *sniffer) add(link int, p []byte) {
	var k sent
	ports := 0
	switch {
	case len(p) >= 20 && p[0]>>4 == 4:
		k.dst = netip.AddrFrom4([4]byte(p[16:20]))
		if p[9] == unix.IPPROTO_UDP {
			ports = int(p[0]&15) * 4
		}
	case len(p) >= 40 && p[0]>>4 == 6:
		k.dst = netip.AddrFrom16([16]byte(p[24:40]))
		if p[6] == unix.IPPROTO_UDP {
			ports = 40
		}
	default:
		return
	}
	if ports > 0 && len(p) >= ports+4 {
		k.sport, k.dport = binary.BigEndian.Uint16(p[ports:]), binary.BigEndian.Uint16(p[ports+2:])
	}
	k.link = link
	s.seen[k]++
}

// take returns how many packets were seen so far of each kind that is asked for, and forgets
// all.
func (s *sniffer) take(which func(sent) bool) map[sent]int {
	s.read()
	s.mu.Lock()
	defer s.mu.Unlock()
	found := map[sent]int{}
	for k, n := range s.seen {
		if which(k) {
			found[k] = n
		}
	}
	s.seen = map[sent]int{}
	return found
}
