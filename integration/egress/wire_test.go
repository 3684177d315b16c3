package egress

import (
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// raw returns a raw socket from a client to an address, closed when the test ends. checksum is the offset of the checksum.
func (c *sender) raw(t *testing.T, to netip.Addr, protocol byte, checksum int) *netlab.Raw {
	t.Helper()
	r := testkit.Must(c.Lab().NewRaw(of(dataplane.FamilyOf(to), c.addr4, c.addr6), to, protocol, checksum))(t)
	t.Cleanup(r.Close)
	return r
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
			testkit.Check(t, r.Send(netlab.TCPHeader(port, 80, 0x10000000*i, 0, tcpRST)), r.Send(netlab.TCPHeader(port, 80, 0x10000000*i, 0x10000000*i, tcpACK)),
				r.Send(netlab.TCPHeader(1000+uint16(i), 80, 1, 0, tcpRST)), r.Send(netlab.TCPHeader(1000+uint16(i), 81, 1, 1, tcpACK)))
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
	testkit.Check(t, beginFlows(c.raw(t, server4, unix.IPPROTO_UDP, 6), 1024, flows, 9))
	uplink.sound()
	used := top.metric("coil_egress_snat_ports_used", `protocol="udp"`, `destination="192.0.2.2"`, `port="9"`)
	t.Logf("%d flows use %v ports", flows, used)
	if used < float64(flows)*0.9 {
		t.Errorf("%v ports are used by %d flows", used, flows)
	}
	// Other destinations have ports of their own.
	testkit.Check(t, c.transfer(server4, 1000))
}
