package nft

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Watch receives the kernel's notifications of changes of a table, whoever made them.
type Watch struct {
	file  *os.File
	table string
}

// watchBuffer is the receive buffer in bytes. What doesn't fit may be about the table.
const watchBuffer = 1 << 20

// NewWatch begins to watch the table of a namespace, nil for the one that the process was started in.
func NewWatch(ns *netns.NS, table string) (*Watch, error) {
	fd := -1
	err := ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, watchBuffer) != nil {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, watchBuffer)
		}
		err = errors.Join(unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
			unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, unix.NFNLGRP_NFTABLES))
		if err != nil {
			unix.Close(fd)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("watch nftables: %w", err)
	}
	return &Watch{os.NewFile(uintptr(fd), "nftables"), table}, nil
}

// Close ends the watch; Run returns.
func (w *Watch) Close() error { return w.file.Close() }

// Run calls told when the table has, or may have, changed: at once and then at most once in every
// settle, until ctx ends.
func (w *Watch) Run(ctx context.Context, settle time.Duration, told func()) error {
	// A deadline in the past wakes the one who waits.
	defer context.AfterFunc(ctx, func() { _ = w.file.SetReadDeadline(time.Unix(1, 0)) })()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		ours, err := w.receive()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("watch nftables: %w", err)
		}
		if ours {
			told()
		}
		timer.Reset(settle)
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
	}
}

// receive waits for notifications, and says whether one of those that are there is of the table.
func (w *Watch) receive() (ours bool, err error) {
	raw, err := w.file.SyscallConn()
	if err != nil {
		return false, err
	}
	buf := make([]byte, 64<<10)
	received := false
	var failure error
	err = raw.Read(func(fd uintptr) bool {
		for {
			n, _, err := unix.Recvfrom(int(fd), buf, unix.MSG_TRUNC)
			switch {
			case errors.Is(err, unix.EINTR):
				continue
			case errors.Is(err, unix.EAGAIN):
				return received
			case errors.Is(err, unix.ENOBUFS):
				ours = true
			case err != nil:
				failure = err
				return true
			default:
				ours = ours || n > len(buf) || mentions(buf[:n], w.table)
			}
			received = true
		}
	})
	return ours, errors.Join(err, failure)
}

// mentions says whether a datagram, which may have many messages, has one about the table, whose
// name is the first attribute of each kind of object.
func mentions(datagram []byte, table string) bool {
	const body = unix.SizeofNlMsghdr + nfgenmsgSize
	name := append([]byte(table), 0)
	for len(datagram) >= unix.SizeofNlMsghdr {
		size := int(binary.NativeEndian.Uint32(datagram))
		if size < unix.SizeofNlMsghdr || size > len(datagram) {
			return true // not understood
		}
		m := datagram[:size]
		if len(m) >= body+unix.SizeofNlAttr+len(name) && m[unix.SizeofNlMsghdr] == byte(family) &&
			string(m[body+unix.SizeofNlAttr:][:len(name)]) == string(name) {
			return true
		}
		datagram = datagram[min((size+3)&^3, len(datagram)):]
	}
	return false
}
