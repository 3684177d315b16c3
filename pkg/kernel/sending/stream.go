package sending

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// stream sends SYN of TCP or datagrams of UDP, each by a socket of its own.
type stream struct {
	order   Order
	content []byte
	fds     []int
}

func (s *stream) open() error {
	kind := unix.SOCK_STREAM
	if s.order.Kind == UDP {
		kind = unix.SOCK_DGRAM
	}
	a := s.order.To.Addr()
	level, option := unix.IPPROTO_IP, unix.IP_RECVERR
	if !a.Is4() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVERR
	}
	for range s.order.Count {
		fd, err := unix.Socket(domain(a), kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("open a socket: %w", err)
		}
		s.fds = append(s.fds, fd)
		// With it the socket tells who sent an error of ICMP.
		if err := unix.SetsockoptInt(fd, level, option, 1); err != nil {
			return fmt.Errorf("set up a socket: %w", err)
		}
	}
	return nil
}

// close also resets connections, so that the kernel remembers none (TIME_WAIT).
func (s *stream) close() {
	for _, fd := range s.fds {
		if s.order.Kind == TCP {
			_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		}
		_ = unix.Close(fd)
	}
}

func (s *stream) send(i int) (uint16, error) {
	fd := s.fds[i]
	if err := unix.Connect(fd, sockaddr(s.order.To)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return 0, err
	}
	id := local(fd).Port()
	if s.order.Kind == TCP {
		return id, nil
	}
	_, err := unix.Write(fd, s.content)
	return id, err
}

func (s *stream) sockets(pending []int) []unix.PollFd {
	var all []unix.PollFd
	for _, i := range pending {
		p := unix.PollFd{Fd: int32(s.fds[i]), Events: unix.POLLIN}
		if s.order.Kind == TCP {
			p.Events = unix.POLLOUT // the attempt to connect is over
		}
		all = append(all, p)
	}
	return all
}

func (s *stream) read(socket int32, note func(int, Outcome)) {
	fd := int(socket)
	info, err := &unix.TCPInfo{}, error(nil)
	if s.order.Kind == TCP {
		if info, err = unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO); err != nil {
			return
		}
	}
	o, ok := queued(fd)
	if !ok {
		if o, ok = s.heard(fd, info.State); !ok {
			return
		}
	}
	o.Resent = int(info.Total_retrans)
	note(slices.Index(s.fds, fd), o)
}

// tcpSynSent is the state TCP_SYN_SENT of tcp_states.h.
const tcpSynSent = 2

// heard is what came by a socket that has no error of ICMP.
func (s *stream) heard(fd int, state byte) (o Outcome, ok bool) {
	o.By = s.order.To.Addr()
	if s.order.Kind == UDP {
		o.Answer = Replied
		_, _, err := unix.Recvfrom(fd, make([]byte, maxMessage), 0)
		return o, err == nil
	}
	errno, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	switch {
	case err != nil:
		return o, false
	case errno == 0 && state == tcpSynSent: // there is no answer yet
		o = Outcome{}
	case errno == 0, errno == int(unix.ECONNRESET), errno == int(unix.EPIPE): // or accepted, and then reset
		o.Answer = Accepted
	case errno == int(unix.ECONNREFUSED):
		o.Answer = Refused
	default: // the kernel has given up
		o = Outcome{}
	}
	return o, true
}

// Origins of an error in the queue of a socket (linux/errqueue.h), and the size of the struct sock_extended_err.
const (
	originICMP   = 2
	originICMPv6 = 3
	sizeExtended = 16
)

// queued takes an error of ICMP from the queue of a socket.
func queued(fd int) (Outcome, bool) {
	oob := make([]byte, 512)
	_, n, _, _, err := unix.Recvmsg(fd, make([]byte, maxMessage), oob, unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
	if err != nil {
		return Outcome{}, false
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil {
		return Outcome{}, false
	}
	for _, m := range messages {
		four := m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_RECVERR
		six := m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_RECVERR
		if o, ok := parseExtended(m.Data); ok && (four || six) {
			return o, true
		}
	}
	return Outcome{}, false
}

// parseExtended reads a struct sock_extended_err and the address that follows it, of who sent the error.
func parseExtended(b []byte) (o Outcome, ok bool) {
	if len(b) < sizeExtended || b[4] != originICMP && b[4] != originICMPv6 {
		return o, false
	}
	o.Answer, o.Type, o.Code = Failed, b[5], b[6]
	by := b[sizeExtended:]
	if len(by) < 8 {
		return o, true
	}
	switch family := binary.NativeEndian.Uint16(by); {
	case family == unix.AF_INET:
		o.By = netip.AddrFrom4([4]byte(by[4:8]))
	case family == unix.AF_INET6 && len(by) >= 24:
		o.By = netip.AddrFrom16([16]byte(by[8:24])).Unmap()
	}
	return o, true
}
