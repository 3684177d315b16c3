package rtnl

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// ChangeKind is what happened.
type ChangeKind uint8

// What may have happened. The kernel doesn't tell everything: when a link goes down or
// an address is lost, IPv4 routes that need it go without a word.
const (
	// Unknown says that notifications were lost: anything may have happened.
	Unknown ChangeKind = iota
	// RouteLost: Route was deleted, or something else replaced it, which is then Route.
	RouteLost
	// RouteLearned: the kernel added Route, of a router advertisement or of an address.
	RouteLearned
	// RuleLost: Rule was deleted.
	RuleLost
	// LinkChanged: Link appeared or is another in some way.
	LinkChanged
	// LinkLost: Link is gone.
	LinkLost
	// AddrAdded: Link has Addr, whose scope is wider than the link.
	AddrAdded
	// AddrLost: Link has Addr no more.
	AddrLost
)

// Change is one notification. Only the fields of its kind are set.
type Change struct {
	Kind  ChangeKind
	Route dataplane.Route
	Rule  dataplane.Rule
	Link  int // index
	// State is that of a link that changed; nil if the kernel didn't tell.
	State *Link
	Addr  netip.Addr
	// Port is the netlink port of who did it: often the ID of its process; 0 is the
	// kernel's own doing, or unknown.
	Port uint32
}

// String says what happened, and who did it if that is known.
func (c Change) String() string {
	var s string
	switch c.Kind {
	case RouteLost:
		s = "route lost: " + c.Route.String()
	case RouteLearned:
		s = "route learned: " + c.Route.String()
	case RuleLost:
		s = "rule lost: " + c.Rule.String()
	case LinkChanged:
		s = fmt.Sprintf("link %d changed", c.Link)
	case LinkLost:
		s = fmt.Sprintf("link %d lost", c.Link)
	case AddrAdded:
		s = fmt.Sprintf("address %s added to link %d", c.Addr, c.Link)
	case AddrLost:
		s = fmt.Sprintf("address %s of link %d lost", c.Addr, c.Link)
	default:
		return "notifications lost"
	}
	if c.Port != 0 {
		s += fmt.Sprintf(" by netlink port %d", c.Port)
	}
	return s
}

// Subscription receives notifications of the kernel. It isn't safe for concurrent use,
// but for Close.
type Subscription struct {
	handle *Handle
	file   *os.File
}

// subscriptionBuffer is the receive buffer in bytes. What doesn't fit is told as Unknown.
const subscriptionBuffer = 4 << 20

// Subscribe begins to receive notifications of the handle's namespace. What the handle
// itself asked the kernel for isn't among them, as far as the kernel tells who asked:
// for routes and rules.
func (h *Handle) Subscribe(i Interest) (*Subscription, error) {
	program, err := i.program()
	if err != nil {
		return nil, err
	}
	var fd int
	err = h.ns.Do(func() (err error) {
		fd, err = subscribe(i.groups(), program)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("subscribe to changes: %w", err)
	}
	return &Subscription{handle: h, file: os.NewFile(uintptr(fd), "rtnetlink")}, nil
}

// subscribe opens a socket that doesn't block and is a member of multicast groups.
func subscribe(groups []int, program []bpf.RawInstruction) (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return -1, err
	}
	// First the filter, so that nothing passes it.
	fprog := unix.SockFprog{Len: uint16(len(program)), Filter: (*unix.SockFilter)(unsafe.Pointer(&program[0]))}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &fprog); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("attach filter: %w", err)
	}
	// Beyond the host's limit with CAP_NET_ADMIN; a smaller one works, too.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, subscriptionBuffer) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, subscriptionBuffer)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		unix.Close(fd)
		return -1, err
	}
	for _, g := range groups {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g); err != nil {
			unix.Close(fd)
			return -1, fmt.Errorf("join group %d: %w", g, err)
		}
	}
	return fd, nil
}

// Close ends the subscription; Run returns.
func (s *Subscription) Close() error { return s.file.Close() }

// loopback is the index of lo, the first link of each namespace.
const loopback = 1

// Run calls told with what has changed, at once and then at most once in every settle, and
// never with nothing, until ctx ends. A burst of notifications wakes it only so often.
func (s *Subscription) Run(ctx context.Context, settle time.Duration, told func([]Change)) error {
	// A deadline in the past wakes the one who waits.
	defer context.AfterFunc(ctx, func() { _ = s.file.SetReadDeadline(time.Unix(1, 0)) })()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		changes, err := s.receive()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("receive changes: %w", err)
		}
		if len(changes) > 0 {
			// The kernel tells of a link or an address before it deletes the routes that need
			// it. All of that is one turn of the lock that this request waits for; its answer
			// doesn't matter.
			_, _ = s.handle.LinkByIndex(ctx, loopback)
			told(changes)
		}
		timer.Reset(settle)
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
	}
}

// receive waits for a notification and returns all that are there.
func (s *Subscription) receive() ([]Change, error) {
	raw, err := s.file.SyscallConn()
	if err != nil {
		return nil, err
	}
	buf := buffers.Get().(*[64 << 10]byte)
	defer buffers.Put(buf)
	var changes []Change
	received := false
	var failure error
	err = raw.Read(func(fd uintptr) bool {
		for {
			n, from, err := unix.Recvfrom(int(fd), buf[:], unix.MSG_TRUNC)
			switch {
			case errors.Is(err, unix.EINTR):
				continue
			case errors.Is(err, unix.EAGAIN):
				return received
			case errors.Is(err, unix.ENOBUFS):
				received = true
				changes = append(changes, Change{})
				continue
			case err != nil:
				failure = err
				return true
			}
			received = true
			if sa, ok := from.(*unix.SockaddrNetlink); !ok || sa.Pid != 0 {
				continue // not from the kernel
			}
			changes = s.read(buf[:min(n, len(buf))], changes)
		}
	})
	return changes, errors.Join(err, failure)
}

// read appends the changes of a datagram. What can't be understood may be anything.
func (s *Subscription) read(datagram []byte, changes []Change) []Change {
	_, err := split(datagram, func(m message) (bool, error) {
		c, known, err := parseChange(m)
		if err != nil || !known {
			return true, err
		}
		// nlmsg_pid is the port of who asked, where the kernel knows it.
		if c.Port = m.port; !s.handle.owns(c.Port) {
			changes = append(changes, c)
		}
		return true, nil
	})
	if err != nil {
		changes = append(changes, Change{})
	}
	return changes
}

// portMemory is for how long the port of a closed socket is remembered: notifications of
// what it did may still be on their way.
const portMemory = 10 * time.Second

// owns says whether a port is, or was a moment ago, of a socket of the handle.
func (h *Handle) owns(port uint32) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	closed, ok := h.ports[port]
	return ok && (closed.IsZero() || time.Since(closed) < portMemory)
}

// opened remembers the port of a socket.
func (h *Handle) opened(c *conn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for port, closed := range h.ports {
		if !closed.IsZero() && time.Since(closed) >= portMemory {
			delete(h.ports, port)
		}
	}
	h.ports[c.port] = time.Time{}
}

// closing closes a socket.
func (h *Handle) closing(c *conn) {
	h.mu.Lock()
	h.ports[c.port] = time.Now()
	h.mu.Unlock()
	c.close()
}
