package egress

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// forged wants that what comes out of FoU is from a router, and has the source of a destination.
func (n *network) forged() {
	n.t.Helper()
	for i, s := range servers {
		own := n.client.Address.Addrs()[i]
		for j, c := range []struct {
			name         string
			outer, inner netip.Addr
			want         bool
		}{
			{"a router sends what a destination sent", routerOwn.Addrs()[i], s, true},
			{"a stranger sends what a destination sent", stranger.Addrs()[i], s, false},
			{"a router sends what a stranger sent", routerOwn.Addrs()[i], stranger.Addrs()[i], false},
			{"a router, after what was lost", routerOwn.Addrs()[i], s, true},
		} {
			// A packet that was sent again, and arrives late, isn't the next case's.
			port := forgedPort + uint16(j)
			if got := n.hears(datagram(c.inner, own, port), port, c.outer, i); got != c.want {
				n.t.Errorf("%s: %s, in a packet of %s, is heard: %t", c.name, c.inner, c.outer, got)
			}
		}
	}
}

// Source ports of datagrams: the first of those that hears is asked about, and of what is known to arrive.
const (
	forgedPort = 60
	knownPort  = 54
	earPort    = 4053
)

// hears says whether the client hears a datagram from a port, of an outer address, that an ordinary socket sends it in
// FoU. Nobody has to wait for what doesn't come: a datagram of the router follows each, on the same way.
func (n *network) hears(forged []byte, port uint16, outer netip.Addr, family int) bool {
	n.t.Helper()
	own := n.client.Address.Addrs()[family]
	known := datagram(servers[family], own, knownPort)
	open := func(ns *netnstest.NS, at netip.Addr, port uint16) net.PacketConn {
		n.t.Helper()
		return testkit.Must(ns.Lab().ListenPacket(n.t.Context(), "udp", netip.AddrPortFrom(at, port).String()))(n.t)
	}
	ear := open(n.pod, own, earPort)
	defer ear.Close()
	mouth := open(n.outside, outer, 0)
	defer mouth.Close()
	router := open(n.outside, routerOwn.Addrs()[family], 0)
	defer router.Close()
	to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(own, 5555))
	followed := 0
	for range 3 {
		testkit.Must(mouth.WriteTo(forged, to))(n.t)
		testkit.Must(router.WriteTo(known, to))(n.t)
		testkit.Check(n.t, ear.SetReadDeadline(time.Now().Add(testkit.Timeout(300*time.Millisecond))))
		_, from, err := ear.ReadFrom(make([]byte, 100))
		if err != nil {
			continue
		}
		switch from.(*net.UDPAddr).Port {
		case int(port):
			return true
		case knownPort:
			followed++
		}
	}
	if followed < 2 {
		n.t.Errorf("the client hears %d of 3 datagrams of its router %s", followed, routerOwn.Addrs()[family])
	}
	return false
}

// datagram is one of UDP, from a port to the ear's, with its IP header.
func datagram(src, dst netip.Addr, from uint16) []byte {
	udp := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, from), earPort)
	udp = append(udp, 0, 14, 0, 0, 'f', 'o', 'r', 'g', 'e', 'd')
	binary.BigEndian.PutUint16(udp[6:], netlab.TransportChecksum(src, dst, unix.IPPROTO_UDP, udp))
	if src.Is6() {
		header := []byte{0x60, 0, 0, 0, 0, byte(len(udp)), unix.IPPROTO_UDP, 64}
		return slices.Concat(header, src.AsSlice(), dst.AsSlice(), udp)
	}
	header := slices.Concat([]byte{0x45, 0, 0, byte(20 + len(udp)), 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}, src.AsSlice(), dst.AsSlice())
	binary.BigEndian.PutUint16(header[10:], netlab.Checksum(header))
	return append(header, udp...)
}
