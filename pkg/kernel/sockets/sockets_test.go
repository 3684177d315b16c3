package sockets

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

func TestFlows(t *testing.T) {
	ns := netnstest.New(t)
	ns.IP(t, "link", "set", "lo", "up")
	var want []Flow
	testkit.Check(t, ns.NS.Do(func() error {
		for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
			l, err := net.Listen("tcp", addr)
			if err != nil {
				return err
			}
			t.Cleanup(func() { l.Close() })
			for _, network := range []string{"tcp", "udp"} {
				// Nobody needs to receive what a UDP socket is connected with.
				c, err := net.Dial(network, l.Addr().String())
				if err != nil {
					return err
				}
				t.Cleanup(func() { c.Close() })
				local, remote := netip.MustParseAddrPort(c.LocalAddr().String()), netip.MustParseAddrPort(c.RemoteAddr().String())
				if network == "udp" {
					want = append(want, Flow{unix.IPPROTO_UDP, local, remote})
					continue
				}
				peer, err := l.Accept()
				if err != nil {
					return err
				}
				t.Cleanup(func() { peer.Close() })
				want = append(want, Flow{unix.IPPROTO_TCP, local, remote}, Flow{unix.IPPROTO_TCP, remote, local})
			}
		}
		u, err := net.ListenPacket("udp", "127.0.0.1:0") // isn't connected
		if err == nil {
			t.Cleanup(func() { u.Close() })
		}
		return err
	}))
	got := testkit.Must(Flows(ns.NS))(t)
	if len(got) != len(want) || slices.ContainsFunc(want, func(f Flow) bool { return !slices.Contains(got, f) }) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// Lines as the kernel prints them on a processor that is little endian.
func TestParse(t *testing.T) {
	const head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	line := func(local, remote, state string) string {
		return "   0: " + local + " " + remote + " " + state + " 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0\n"
	}
	mapped := "0000000000000000FFFF00000100007F:0050"
	for _, c := range []struct {
		name, text string
		want       []string
		fails      string
	}{
		{"empty", head, nil, ""},
		{"established", head + line("0101000A:0400", "010200C0:0050", "01"), []string{"6 10.0.1.1:1024 > 192.0.2.1:80"}, ""},
		{"first packet sent", head + line("0101000A:0400", "010200C0:0050", "02"), []string{"6 10.0.1.1:1024 > 192.0.2.1:80"}, ""},
		{"IPv6", head + line("B80D0120000000000000000001000000:0400", "B80D0120000000000000000002000000:01BB", "08"), []string{"6 [2001:db8::1]:1024 > [2001:db8::2]:443"}, ""},
		{"IPv4 by a socket of IPv6", head + line(mapped, mapped, "01"), []string{"6 127.0.0.1:80 > 127.0.0.1:80"}, ""},
		{"over", head + line("0101000A:0400", "010200C0:0050", "06") + line("0101000A:0400", "010200C0:0050", "07"), nil, ""},
		{"listening", head + line("00000000:0050", "00000000:0000", "0A"), nil, ""},
		{"cut off", head + "   0: 0101000A:0400 010200C0\n", nil, "too few fields"},
		{"no address", head + line("xyz:0400", "010200C0:0050", "01"), nil, "invalid byte"},
		{"half an address", head + line("0101:0400", "010200C0:0050", "01"), nil, "address of 2 bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			flows, err := parse(strings.NewReader(c.text), unix.IPPROTO_TCP)
			var got []string
			for _, f := range flows {
				got = append(got, fmt.Sprintf("%d %s > %s", f.Protocol, f.Local, f.Remote))
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
			if (err == nil) != (c.fails == "") || err != nil && !strings.Contains(err.Error(), c.fails) {
				t.Errorf("error %v, want %q", err, c.fails)
			}
		})
	}
}
