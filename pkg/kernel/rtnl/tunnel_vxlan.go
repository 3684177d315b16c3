//go:build coil_vxlan

// With the build tag coil_vxlan tunnels are VXLAN links (RFC 7348): kernels without FoU have these. Programs that are built so are for tests only.
// Both ends are built so, and both know the addresses of the two: with the peering Service the client's end has another address.

package rtnl

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"
	"unsafe"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// receiverPorts are UDP ports at which nothing comes in: an external VXLAN can't share its port with others.
var receiverPorts = map[dataplane.Family]uint16{dataplane.IPv4: 65524, dataplane.IPv6: 65526}

// tunnelKind is the kind of the tunnels of a family.
func tunnelKind(dataplane.Family) string { return "vxlan" }

// vni is the VXLAN network identifier, the same at both ends. A few hundred tunnels of a namespace hardly ever share one; ErrExist if two do.
func vni(t dataplane.Tunnel) uint32 {
	ends := [][]byte{t.Local.AsSlice(), t.Remote.AsSlice()}
	slices.SortFunc(ends, slices.Compare)
	h := fnv.New32a()
	h.Write(slices.Concat(ends...))
	return h.Sum32() >> 8
}

// AddTunnel asks for a new tunnel, which is down. ErrExist if a link has the name, or a
// tunnel has the two addresses.
func AddTunnel(name string, t dataplane.Tunnel) Request {
	local, remote := nl.IFLA_VXLAN_LOCAL, nl.IFLA_VXLAN_GROUP
	if t.Remote.Is6() {
		local, remote = nl.IFLA_VXLAN_LOCAL6, nl.IFLA_VXLAN_GROUP6
	}
	return newRequest(unix.RTM_NEWLINK, create, text("link add %s type vxlan for %s", name, t), withoutARP(),
		word(unix.IFLA_IFNAME, name), number(unix.IFLA_MTU, uint32(t.MTU)), linkInfo("vxlan", nest(unix.IFLA_INFO_DATA,
			number(nl.IFLA_VXLAN_ID, vni(t)),
			address(local, t.Local),
			address(remote, t.Remote),
			nl.NewRtAttr(nl.IFLA_VXLAN_TTL, []byte{dataplane.TunnelTTL}),
			nl.NewRtAttr(nl.IFLA_VXLAN_LEARNING, []byte{0}),
			// The first one, and the one after the last one.
			when(t.SourcePort != 0, nl.NewRtAttr(nl.IFLA_VXLAN_PORT_RANGE, slices.Concat(nl.BEUint16Attr(t.SourcePort), nl.BEUint16Attr(t.SourcePort+1)))),
			nl.NewRtAttr(nl.IFLA_VXLAN_PORT, nl.BEUint16Attr(t.Port)))))
}

// withoutARP is the header of a new link whose neighbours all have the link's own hardware address.
func withoutARP() *nl.IfInfomsg {
	header := linkHeader(0, false)
	header.Flags, header.Change = unix.IFF_NOARP, unix.IFF_NOARP
	return header
}

// SetTunnel asks for the MTU of a tunnel: the kernel changes neither identifier nor ports of a VXLAN.
func SetTunnel(index int, t dataplane.Tunnel) Request {
	return SetLink(index, LinkChange{MTU: t.MTU})
}

// AddReceiver asks for a link, which is down, to which all packets get lost. Nothing comes in by it: a VXLAN of two addresses
// takes its packets from wherever they come.
func AddReceiver(name string, f dataplane.Family) Request {
	return newRequest(unix.RTM_NEWLINK, create, text("link add %s type vxlan external", name), withoutARP(),
		word(unix.IFLA_IFNAME, name), linkInfo("vxlan", nest(unix.IFLA_INFO_DATA,
			nl.NewRtAttr(nl.IFLA_VXLAN_FLOWBASED, []byte{1}),
			nl.NewRtAttr(nl.IFLA_VXLAN_LEARNING, []byte{0}),
			nl.NewRtAttr(nl.IFLA_VXLAN_PORT, nl.BEUint16Attr(receiverPorts[f])))))
}

// parseTunnel reads the attributes of a tunnel of a link that is one, whatever its family.
func parseTunnel(f dataplane.Family, l Link, body []byte) (Tunnel, error) {
	t := Tunnel{Link: l, Spec: dataplane.Tunnel{MTU: l.MTU}}
	_, rest, as := Cut(body, unix.SizeofIfInfomsg)
	info := as.Find(rest, unix.IFLA_LINKINFO, unix.IFLA_INFO_DATA).Value
	local, remote := uint16(nl.IFLA_VXLAN_LOCAL), uint16(nl.IFLA_VXLAN_GROUP)
	if f == dataplane.IPv6 {
		local, remote = nl.IFLA_VXLAN_LOCAL6, nl.IFLA_VXLAN_GROUP6
	}
	t.Spec.Local, t.Spec.Remote = as.Find(info, local).endpoint(), as.Find(info, remote).endpoint()
	t.Spec.Port = as.Find(info, nl.IFLA_VXLAN_PORT).Port()
	if ports := as.Find(info, nl.IFLA_VXLAN_PORT_RANGE).Value; len(ports) == 4 {
		t.Spec.SourcePort = binary.BigEndian.Uint16(ports)
	}
	t.Receiver = as.Find(info, nl.IFLA_VXLAN_FLOWBASED).U8() != 0 && t.Spec.Port == receiverPorts[f]
	t.Exact = !t.Receiver && t.Spec.Remote.IsValid() && as.Find(info, nl.IFLA_VXLAN_ID).U32() == vni(t.Spec)
	return t, as.Err
}

// Numbers of linux/pkt_sched.h, linux/pkt_cls.h and linux/bpf.h.
const (
	clsact       = 0xfffffff1 // TC_H_CLSACT
	ingress      = 0xfffffff2 // TC_H_MIN_INGRESS of it
	tcaKind      = 1
	tcaOptions   = 2
	bpfFD        = 6
	bpfName      = 7
	bpfFlags     = 8
	actDirect    = 1
	schedCls     = 3 // BPF_PROG_TYPE_SCHED_CLS
	firstFilter  = 1 << 16
	allProtocols = 0x0300 // ETH_P_ALL in the order of the network
)

// AcceptAll are requests by which a link takes packets for whatever hardware address: a link without ARP sends all packets to its own, and the
// other end, if it had the same one, would take them for its own that came back.
func AcceptAll(index int) ([]Request, error) {
	program, err := toHost()
	if err != nil {
		return nil, err
	}
	message := func(kind uint16, what string, parent, handle, info uint32, attrs ...*nl.RtAttr) Request {
		header := &nl.TcMsg{Ifindex: int32(index), Parent: parent, Handle: handle, Info: info}
		return newRequest(kind, create, text("%s link %d", what, index), header, attrs...)
	}
	return []Request{
		message(unix.RTM_NEWQDISC, "qdisc add clsact to", clsact, 0xffff0000, 0, word(tcaKind, "clsact")),
		message(unix.RTM_NEWTFILTER, "filter add bpf to", ingress, 0, firstFilter|allProtocols, word(tcaKind, "bpf"),
			nest(tcaOptions, number(bpfFD, uint32(program)), word(bpfName, "to_host"), number(bpfFlags, actDirect))),
	}, nil
}

// toHost loads, once, the program that makes all packets those of the host: bpf_skb_change_type(skb, PACKET_HOST).
var toHost = sync.OnceValues(func() (int, error) {
	instructions := []uint64{
		0x02b7,        // r2 = 0
		32<<32 | 0x85, // call 32
		0x00b7,        // r0 = 0
		0x95,          // exit
	}
	license := []byte("Apache-2.0\x00")
	load := struct {
		kind, count           uint32
		instructions, license uintptr
		rest                  [96]byte
	}{schedCls, uint32(len(instructions)), uintptr(unsafe.Pointer(&instructions[0])), uintptr(unsafe.Pointer(&license[0])), [96]byte{}}
	fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_LOAD, uintptr(unsafe.Pointer(&load)), unsafe.Sizeof(load))
	if errno != 0 {
		return 0, fmt.Errorf("load a program of BPF: %w", errno)
	}
	unix.CloseOnExec(int(fd))
	return int(fd), nil
})
