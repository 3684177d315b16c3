package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/podnet"
)

// kernel is the floor of everybody who attaches a pod by a veth: the netlink messages
// without which there is no connection, sent by this process as Coil sends them. It
// knows no pod by name, keeps no record, and can't be asked what it did.
type kernel struct{ host *space }

func newKernel() (*kernel, error) {
	host, err := newSpace()
	return &kernel{host}, err
}

func (k *kernel) name() string                      { return "kernel" }
func (k *kernel) node() *space                      { return k.host }
func (k *kernel) wires() bool                       { return true }
func (k *kernel) checks() bool                      { return false }
func (k *kernel) check(context.Context, *pod) error { return errors.ErrUnsupported }
func (k *kernel) close() error                      { return k.host.close() }

func (k *kernel) add(ctx context.Context, p *pod) error {
	ns, err := netns.Open(p.Path())
	if err != nil {
		return err
	}
	defer ns.Close()
	inside, err := rtnl.New(ns)
	if err != nil {
		return err
	}
	defer inside.Close()
	number := binary.BigEndian.AppendUint32(nil, uint32(p.number))
	peer := fmt.Sprintf("veth%x", p.number)
	err = inside.Do(ctx, rtnl.AddVeth(rtnl.Veth{
		Name: ifName, MAC: append(net.HardwareAddr{2, 0}, number...), Up: true,
		PeerName: peer, PeerMAC: append(net.HardwareAddr{2, 1}, number...), PeerNetns: k.host.Fd(), MTU: 1500,
	}))
	if err != nil {
		return err
	}
	index, err := inside.IndexByName(ifName)
	if err != nil {
		return err
	}
	addrs, gateways := []netip.Addr{v4Of(p.number)}, []netip.Addr{podnet.Gateways.IPv4}
	noAuto := rtnl.LinkChange{NoAutoAddress: true} // an address by the kernel would be tentative for a second
	var in, out []rtnl.Request
	if p.family == dual {
		addrs, gateways = append(addrs, v6Of(p.number)), append(gateways, podnet.Gateways.IPv6)
		in = append(in, rtnl.SetLink(index, noAuto))
	}
	if p.index, err = k.host.handle.IndexByName(peer); err != nil {
		return err
	}
	if p.family == dual {
		out = append(out, rtnl.SetLink(p.index, noAuto))
	}
	out = append(out, rtnl.SetLink(p.index, rtnl.LinkChange{Up: true}))
	for i, a := range addrs {
		gw := gateways[i]
		in = append(in, rtnl.AddAddr(index, netip.PrefixFrom(a, a.BitLen()), dataplane.Universe))
		main := dataplane.Route{Table: unix.RT_TABLE_MAIN, Protocol: unix.RTPROT_BOOT, Link: index}
		if gw.Is4() {
			onLink := main
			onLink.Dst, onLink.Scope = netip.PrefixFrom(gw, 32), dataplane.LinkScope
			in = append(in, rtnl.AddRoute(onLink))
			out = append(out, rtnl.AddAddr(p.index, netip.PrefixFrom(gw, 32), dataplane.LinkScope))
			main.Dst = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		} else {
			out = append(out, rtnl.AddAddr(p.index, netip.PrefixFrom(gw, 64), dataplane.LinkScope))
			main.Dst = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		main.Gateway = gw
		in = append(in, rtnl.AddRoute(main))
		out = append(out, rtnl.AddRoute(dataplane.Route{
			Table: dataplane.TablePods, Protocol: dataplane.ProtocolNode, Dst: netip.PrefixFrom(a, a.BitLen()),
			Link: p.index, Scope: dataplane.LinkScope,
		}.Canonical()))
	}
	// IPv6's gateway is link-local, so that a link-local address must be there first.
	if p.family == dual {
		ll := netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 8: 1, 12: number[0], 13: number[1], 14: number[2], 15: number[3]}), 64)
		in = append([]rtnl.Request{in[0], rtnl.AddAddr(index, ll, dataplane.LinkScope)}, in[1:]...)
	}
	return errors.Join(inside.Do(ctx, in...), k.host.handle.Do(ctx, out...))
}

func (k *kernel) del(ctx context.Context, p *pod) error {
	return k.host.handle.Do(ctx, rtnl.DelLink(p.index))
}

// v4Of and v6Of are the addresses of a pod of the kernel's floor.
func v4Of(number int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 64 | byte(number>>16), byte(number >> 8), byte(number)})
}

func v6Of(number int) netip.Addr {
	return netip.AddrFrom16([16]byte{0: 0xfd, 13: byte(number >> 16), 14: byte(number >> 8), 15: byte(number)})
}
