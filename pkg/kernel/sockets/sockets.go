// Package sockets reads which flows the sockets of a network namespace have, from
// proc_pid_net(5): it needs no module of the kernel, unlike sock_diag(7).
//
// It must not know why flows are read.
package sockets

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Flow is the packets that a connected socket sends and receives.
type Flow struct {
	// Protocol is unix.IPPROTO_TCP or unix.IPPROTO_UDP.
	Protocol      uint8
	Local, Remote netip.AddrPort
}

// tables are the files and the protocols of their sockets. Files of a family that the kernel
// doesn't have don't exist.
var tables = []struct {
	name     string
	protocol uint8
}{
	{"tcp", unix.IPPROTO_TCP}, {"tcp6", unix.IPPROTO_TCP}, {"udp", unix.IPPROTO_UDP}, {"udp6", unix.IPPROTO_UDP},
}

// States of sockets (linux/net/tcp_states.h) that will not send any more.
const (
	timeWait = 6
	closed   = 7
	listen   = 10
)

// Flows returns those of all connected sockets, from the first packet of a connection to its
// last. Sockets that come and go at the same time may be missing.
func Flows(ns *netns.NS) ([]Flow, error) {
	return netns.In(ns, func() (all []Flow, err error) {
		for _, t := range tables {
			f, err := os.Open("/proc/thread-self/net/" + t.name)
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
			flows, err := parse(f, t.protocol)
			if err := errors.Join(err, f.Close()); err != nil {
				return nil, fmt.Errorf("%s: %w", f.Name(), err)
			}
			all = append(all, flows...)
		}
		return all, nil
	})
}

// parse reads a table: a line of headings, then one for each socket.
func parse(r io.Reader, protocol uint8) ([]Flow, error) {
	var flows []Flow
	lines := bufio.NewScanner(r)
	for first := true; lines.Scan(); first = false {
		fields := strings.Fields(lines.Text())
		if first || len(fields) == 0 {
			continue
		}
		if len(fields) < 4 {
			return nil, fmt.Errorf("%q has too few fields", lines.Text())
		}
		local, localErr := parseAddress(fields[1])
		remote, remoteErr := parseAddress(fields[2])
		state, stateErr := strconv.ParseUint(fields[3], 16, 8)
		if err := errors.Join(localErr, remoteErr, stateErr); err != nil {
			return nil, fmt.Errorf("%q: %w", lines.Text(), err)
		}
		if remote.Port() != 0 && state != timeWait && state != closed && state != listen {
			flows = append(flows, Flow{protocol, local, remote})
		}
	}
	return flows, lines.Err()
}

// parseAddress reads an address, in words of the host's byte order, and a port.
func parseAddress(s string) (netip.AddrPort, error) {
	addr, port, _ := strings.Cut(s, ":")
	b, err := hex.DecodeString(addr)
	if err != nil {
		return netip.AddrPort{}, err
	}
	if len(b)%4 != 0 {
		return netip.AddrPort{}, fmt.Errorf("address of %d bytes", len(b))
	}
	for i := 0; i < len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	a, ok := netip.AddrFromSlice(b)
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("address of %d bytes", len(b))
	}
	p, err := strconv.ParseUint(port, 16, 16)
	return netip.AddrPortFrom(a.Unmap(), uint16(p)), err
}
