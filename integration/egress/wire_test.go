package egress

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// raw sends packets of a protocol whose header and payload it is given, from the source that
// the route says, and with the checksum of the transport layer at an offset.
type raw struct {
	fd       int
	from, to netip.Addr
	protocol byte
	checksum int // offset
}

func (c *sender) raw(t *testing.T, to netip.Addr, protocol byte, checksum int) *raw {
	t.Helper()
	r := &raw{from: of(dataplane.FamilyOf(to), c.addr4, c.addr6), to: to, protocol: protocol, checksum: checksum}
	family := unix.AF_INET
	if to.Is6() {
		family = unix.AF_INET6
	}
	testkit.Check(t, c.Do(func() (err error) {
		r.fd, err = unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(protocol))
		return err
	}))
	t.Cleanup(func() { unix.Close(r.fd) })
	return r
}

// send sends one packet.
func (r *raw) send(b []byte) error {
	// The pseudo header of RFC 9293, section 3.1, and RFC 8200, section 8.1, give the same sum.
	pseudo := append(append(r.from.AsSlice(), r.to.AsSlice()...), 0, r.protocol, byte(len(b)>>8), byte(len(b)))
	binary.BigEndian.PutUint16(b[r.checksum:], 0)
	binary.BigEndian.PutUint16(b[r.checksum:], checksum(append(pseudo, b...)))
	if r.to.Is4() {
		return unix.Sendto(r.fd, b, 0, &unix.SockaddrInet4{Addr: r.to.As4()})
	}
	return unix.Sendto(r.fd, b, 0, &unix.SockaddrInet6{Addr: r.to.As16()})
}

// checksum is that of RFC 1071.
func checksum(b []byte) uint16 {
	if len(b)%2 == 1 {
		b = append(b, 0)
	}
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// tcp is a TCP header without options.
func tcp(sport, dport uint16, seq, ack uint32, flags byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, sport)
	b = binary.BigEndian.AppendUint16(b, dport)
	b = binary.BigEndian.AppendUint32(b, seq)
	b = binary.BigEndian.AppendUint32(b, ack)
	return append(b, 5<<4, flags, 0xff, 0xff, 0, 0, 0, 0)
}

const (
	tcpRST = 4
	tcpACK = 16
)

// A packet of no connection never leaves with a client's source, and ends no connection.
func testInvalid(t *testing.T, top *topology) {
	c, uplink := top.a, top.uplink
	for _, f := range both {
		server, protocol := of(f, server4, server6), map[dataplane.Family]string{4: `protocol="ipv4"`, 6: `protocol="ipv6"`}[f]
		conn := testkit.Must(c.dial(server, testkit.Timeout(5*time.Second)))(t)
		defer conn.Close()
		testkit.Check(t, conn.SetDeadline(time.Now().Add(testkit.Timeout(20*time.Second))))
		who := make([]byte, 100)
		testkit.Must(conn.Read(who))(t)
		port := netip.MustParseAddrPort(conn.LocalAddr().String()).Port()
		before := top.metric("coil_egress_nftables_invalid_packets_total", protocol)
		r := c.raw(t, server, unix.IPPROTO_TCP, 16)
		uplink.settle()
		uplink.forget()
		for i := range uint32(10) {
			// Far outside of the window, and of connections that aren't there.
			testkit.Check(t, r.send(tcp(port, 80, 0x10000000*i, 0, tcpRST)), r.send(tcp(port, 80, 0x10000000*i, 0x10000000*i, tcpACK)),
				r.send(tcp(1000+uint16(i), 80, 1, 0, tcpRST)), r.send(tcp(1000+uint16(i), 81, 1, 1, tcpACK)))
		}
		uplink.sound()
		if after := top.metric("coil_egress_nftables_invalid_packets_total", protocol); after < before+5 {
			t.Errorf("%s: %v packets were invalid, now %v", f, before, after)
		}
		testkit.Must(conn.Write([]byte("alive")))(t)
		answer := make([]byte, 5)
		if n, err := conn.Read(answer); err != nil || string(answer[:n]) != "alive" {
			t.Errorf("%s: the connection is dead: %q, %v", f, answer[:n], err)
		}
	}
}

// Many connections to one destination are translated or dropped, but never let through as they
// are, and the metrics say how near the end is.
func testPorts(t *testing.T, top *topology) {
	c, uplink := top.a, top.uplink
	top.program.Kill() // what it knows of ports is as old as the last look
	top.start()
	command(t, "sysctl", "-qw", "net.netfilter.nf_conntrack_max=200000")
	flows := testkit.EgressForm.Times(1000, 60000)
	r := c.raw(t, server4, unix.IPPROTO_UDP, 6)
	for i := range flows {
		b := binary.BigEndian.AppendUint16(nil, uint16(1024+i))
		b = append(b, 0, 9, 0, 8, 0, 0) // to port 9, no payload
		if err := r.send(b); err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
	}
	uplink.sound()
	used := top.metric("coil_egress_snat_ports_used", `protocol="udp"`, `destination="192.0.2.2"`, `port="9"`)
	t.Logf("%d flows use %v ports", flows, used)
	if used < float64(flows)*0.9 {
		t.Errorf("%v ports are used by %d flows", used, flows)
	}
	// Other destinations have ports of their own.
	testkit.Check(t, c.transfer(server4, 1000))
}
