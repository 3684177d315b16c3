package rtnl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Listener receives notifications of the kernel. It isn't safe for concurrent use, but for Close.
type Listener struct{ file *os.File }

// listenBuffer is the receive buffer in bytes. Notifications that don't fit are lost, which is told.
const listenBuffer = 4 << 20

// Listen begins to receive notifications of multicast groups of the handle's protocol in its namespace. Only those
// that the filter (bpf(4)) accepts are received; without a filter all are.
func (h *Handle) Listen(filter []bpf.RawInstruction, groups ...int) (*Listener, error) {
	fd, err := netns.In(h.ns, func() (int, error) { return listen(h.protocol, filter, groups) })
	if err != nil {
		return nil, fmt.Errorf("subscribe to changes: %w", err)
	}
	return &Listener{os.NewFile(uintptr(fd), "netlink")}, nil
}

// listen opens a socket that doesn't block and is a member of multicast groups.
func listen(protocol int, filter []bpf.RawInstruction, groups []int) (_ int, err error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return -1, err
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	// First the filter, so that nothing passes it.
	if len(filter) > 0 {
		fprog := unix.SockFprog{Len: uint16(len(filter)), Filter: (*unix.SockFilter)(unsafe.Pointer(&filter[0]))}
		if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &fprog); err != nil {
			return -1, fmt.Errorf("attach filter: %w", err)
		}
	}
	// Beyond the host's limit with CAP_NET_ADMIN; a smaller one works, too.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, listenBuffer) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, listenBuffer)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return -1, err
	}
	for _, g := range groups {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g); err != nil {
			return -1, fmt.Errorf("join group %d: %w", g, err)
		}
	}
	return fd, nil
}

// SetBuffer changes the receive buffer, in bytes.
func (l *Listener) SetBuffer(bytes int) error {
	raw, err := l.file.SyscallConn()
	if err != nil {
		return err
	}
	var failure error
	err = raw.Control(func(fd uintptr) {
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, bytes) != nil {
			failure = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, bytes)
		}
	})
	return errors.Join(err, failure)
}

// Close ends the reception; Run returns.
func (l *Listener) Close() error { return l.file.Close() }

// Run calls heard with each notification, and with nil if some were lost or can't be understood; the result says whether
// that is of interest. Run calls settled after all that have arrived together, if any of them was: at once, and then at
// most once in every settle, until ctx ends. A burst of notifications wakes it only so often.
func (l *Listener) Run(ctx context.Context, settle time.Duration, heard func(*Message) bool, settled func()) error {
	// A deadline in the past wakes the goroutine that waits.
	defer context.AfterFunc(ctx, func() { _ = l.file.SetReadDeadline(time.Unix(1, 0)) })()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		interesting, err := l.receive(heard)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("receive changes: %w", err)
		}
		if interesting {
			settled()
		}
		timer.Reset(settle)
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
	}
}

// receive waits for a notification, hears all that are there, and says whether any was of interest.
func (l *Listener) receive(heard func(*Message) bool) (interesting bool, err error) {
	raw, err := l.file.SyscallConn()
	if err != nil {
		return false, err
	}
	buf := buffers.Get().(*[64 << 10]byte)
	defer buffers.Put(buf)
	note := func(m *Message) { interesting = heard(m) || interesting }
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
				note(nil)
				continue
			case err != nil:
				failure = err
				return true
			}
			received = true
			if sa, ok := from.(*unix.SockaddrNetlink); !ok || sa.Pid != 0 {
				continue // not from the kernel
			}
			_, err = split(buf[:min(n, len(buf))], func(m Message) (bool, error) {
				note(&m)
				return true, nil
			})
			if err != nil || n > len(buf) {
				note(nil)
			}
		}
	})
	return interesting, errors.Join(err, failure)
}
