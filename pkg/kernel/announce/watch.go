package announce

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

	"golang.org/x/net/bpf"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Claim is what a host has said on a link: that an address is at it.
type Claim struct {
	MAC  net.HardwareAddr
	Addr netip.Addr
}

// Watch calls seen with what is said on a link of a network namespace, until ctx ends: by ARP, and by neighbour advertisements and
// solicitations. These are all that hosts send to all, and what they send to this one. What this host sends isn't seen. Nothing is seen
// while the link is down.
func Watch(ctx context.Context, ns *netns.NS, link int, seen func(Claim)) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, p := range []struct {
		kind   uint16
		filter []bpf.Instruction
		parse  func([]byte) (Claim, bool)
	}{
		{etherARP, arpFilter(link), parseARP},
		{etherIPv6, ndpFilter(link), parseNDP},
	} {
		f, err := listen(ns, link, p.kind, p.filter)
		if err != nil {
			return errors.Join(err, group.Wait())
		}
		stop := context.AfterFunc(ctx, func() { _ = f.Close() })
		group.Go(func() error {
			defer stop()
			defer f.Close()
			for frame := make([]byte, frameSize); ; {
				n, err := f.Read(frame)
				switch {
				case ctx.Err() != nil:
					return nil
				case errors.Is(err, unix.ENETDOWN):
					continue // said once when the link goes down
				case err != nil:
					return fmt.Errorf("hear what hosts say on link %d: %w", link, err)
				}
				if c, ok := p.parse(frame[:n]); ok {
					seen(c)
				}
			}
		})
	}
	return group.Wait()
}

// frameSize is more than messages of ARP and NDP have that say where an address is.
const frameSize = 512

// listen opens a packet socket for frames of a type that come in by a link. Without the filter it would hear something before it has one.
func listen(ns *netns.NS, link int, kind uint16, filter []bpf.Instruction) (*os.File, error) {
	program, err := bpf.Assemble(filter)
	if err != nil {
		return nil, fmt.Errorf("assemble a filter: %w", err)
	}
	var raw []unix.SockFilter
	for _, i := range program {
		raw = append(raw, unix.SockFilter{Code: i.Op, Jt: i.Jt, Jf: i.Jf, K: i.K})
	}
	return netns.In(ns, func() (*os.File, error) {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return nil, fmt.Errorf("open a packet socket: %w", err)
		}
		err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(raw)), Filter: &raw[0]})
		if err == nil {
			// ETH_P_ARP and ETH_P_IPV6, not ETH_P_ALL: the kernel gives the socket no packets of others, nor those that are sent.
			err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: bits(kind), Ifindex: link})
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("listen at link %d: %w", link, err), unix.Close(fd))
		}
		return os.NewFile(uintptr(fd), fmt.Sprintf("packets of link %d", link)), nil
	})
}

// bits is a number in the byte order of the network.
func bits(n uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, n))
}

// Offsets in frames.
const (
	arpAt      = etherSize
	arpSender  = arpAt + 8
	ipv6At     = etherSize
	icmpAt     = ipv6At + ipv6Size
	typeAsk    = 135 // neighbour solicitation
	optionSrc  = 1   // source link-layer address
	optionsAt  = icmpAt + 24
	acceptAll  = 0xffff
	lastHop    = 255
	ipv6Source = ipv6At + 8
)

// only lets a program go on if the accumulator has a value, which an instruction loads.
func only(load bpf.Instruction, value uint32, rest ...bpf.Instruction) []bpf.Instruction {
	return append([]bpf.Instruction{load, bpf.JumpIf{Cond: bpf.JumpEqual, Val: value, SkipTrue: 1}, bpf.RetConstant{}}, rest...)
}

// received is the condition that a frame has come by a link: a socket of a link also gets frames of the VLANs on it.
func received(link int, rest []bpf.Instruction) []bpf.Instruction {
	return only(bpf.LoadExtension{Num: bpf.ExtInterfaceIndex}, uint32(link), rest...)
}

// arpFilter accepts ARP of Ethernet and IPv4.
func arpFilter(link int) []bpf.Instruction {
	return received(link,
		only(bpf.LoadAbsolute{Off: arpAt, Size: 4}, 1<<16|0x0800,
			only(bpf.LoadAbsolute{Off: arpAt + 4, Size: 2}, macSize<<8|4, bpf.RetConstant{Val: acceptAll})...))
}

// ndpFilter accepts neighbour advertisements and solicitations of the link itself.
func ndpFilter(link int) []bpf.Instruction {
	return received(link,
		only(bpf.LoadAbsolute{Off: ipv6At + 6, Size: 2}, protoICMPv6<<8|lastHop,
			bpf.LoadAbsolute{Off: icmpAt, Size: 1},
			bpf.JumpIf{Cond: bpf.JumpEqual, Val: typeAsk, SkipTrue: 2},
			bpf.JumpIf{Cond: bpf.JumpEqual, Val: typeAdvert, SkipTrue: 1},
			bpf.RetConstant{},
			bpf.RetConstant{Val: acceptAll}))
}

// parseARP returns what the sender of a message says of itself. A host that looks whether anybody has an address says nothing.
func parseARP(b []byte) (c Claim, ok bool) {
	if len(b) < arpAt+arpSize {
		return c, false
	}
	c.MAC = slices.Clone(b[arpSender : arpSender+macSize])
	c.Addr = netip.AddrFrom4([4]byte(b[arpSender+macSize:]))
	return c, !c.Addr.IsUnspecified()
}

// parseNDP returns what an advertisement says, or a solicitation of its sender. Without an option the address is at the frame's sender.
func parseNDP(b []byte) (c Claim, ok bool) {
	if len(b) < optionsAt {
		return c, false
	}
	at, option := ipv6Source, byte(optionSrc)
	if b[icmpAt] == typeAdvert {
		at, option = icmpAt+8, optionTargetLL
	}
	c.Addr = netip.AddrFrom16([16]byte(b[at:]))
	c.MAC = slices.Clone(b[macSize : 2*macSize])
	for rest := b[optionsAt:]; len(rest) >= 8 && rest[1] > 0 && len(rest) >= 8*int(rest[1]); rest = rest[8*int(rest[1]):] {
		if rest[0] == option && rest[1] == 1 {
			c.MAC = bytes.Clone(rest[2:8])
		}
	}
	return c, !c.Addr.IsUnspecified()
}
