package datagram

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// A host takes the datagrams: their checksums are right, and they come from where they say. Rules and addresses of the sender don't matter.
func TestSend(t *testing.T) {
	host, pod := netnstest.New(t), netnstest.New(t)
	ctx := t.Context()
	testkit.Check(t,
		host.Lab().IP(ctx, fmt.Sprintf("link add pod type veth peer name eth0 netns %s", pod.Lab().Path()),
			"link set pod up", "addr add 192.0.2.1/24 dev pod", "addr add 2001:db8::1/64 dev pod nodad"),
		pod.Lab().IP(ctx, "link set eth0 up"),
	)
	to := testkit.Must(netns.In(host.NS, func() (*net.Interface, error) { return net.InterfaceByName("pod") }))(t)
	from := testkit.Must(netns.In(pod.NS, func() (*net.Interface, error) { return net.InterfaceByName("eth0") }))(t)
	conn := testkit.Must(netns.In(host.NS, func() (*net.UDPConn, error) { return net.ListenUDP("udp", &net.UDPAddr{Port: Port}) }))(t)
	defer conn.Close()
	for _, d := range []Datagram{
		{To: netip.MustParseAddr("192.0.2.1"), From: netip.MustParseAddr("192.0.2.7"), Content: "even"},
		{To: netip.MustParseAddr("192.0.2.1"), From: netip.MustParseAddr("192.0.2.8"), Content: "odd"},
		{To: netip.MustParseAddr("2001:db8::1"), From: netip.MustParseAddr("2001:db8::7"), Content: "odd"},
	} {
		d.MAC, d.Hops = to.HardwareAddr, 1
		testkit.Eventually(t, 10*time.Second, fmt.Sprintf("%s is heard", d.From), func() error {
			if err := Send(pod.NS, from.Index, d); err != nil {
				return err
			}
			b := make([]byte, 100)
			testkit.Check(t, conn.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
			n, peer, err := conn.ReadFromUDPAddrPort(b)
			if err == nil && (string(b[:n]) != d.Content || peer.Addr().Unmap() != d.From || peer.Port() != Port) {
				err = fmt.Errorf("%q comes from %s", b[:n], peer)
			}
			return err
		})
	}
	for _, d := range []Datagram{
		{}, {MAC: to.HardwareAddr, From: netip.MustParseAddr("192.0.2.1"), To: netip.MustParseAddr("fd00::1")},
		{MAC: to.HardwareAddr[:3], From: netip.MustParseAddr("192.0.2.1"), To: netip.MustParseAddr("192.0.2.2")},
	} {
		if err := Send(pod.NS, from.Index, d); err == nil {
			t.Errorf("%+v was sent", d)
		}
	}
	if err := Send(pod.NS, 1<<20, Datagram{MAC: to.HardwareAddr, From: netip.MustParseAddr("192.0.2.1"), To: netip.MustParseAddr("192.0.2.2")}); err == nil {
		t.Error("it was sent by a link that isn't there")
	}
}
