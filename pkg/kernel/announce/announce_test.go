package announce

import (
	"encoding/hex"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/testkit"
)

// The packets, as Wireshark names their fields.
func TestFrames(t *testing.T) {
	mac := testkit.Must(net.ParseMAC("02:00:5e:00:53:01"))(t)
	for _, c := range []struct {
		addr string
		want []string
	}{
		{"192.0.2.200", []string{
			"ffffffffffff 02005e005301 0806" + // broadcast, ARP
				"0001 0800 06 04 0001" + // Ethernet, IPv4, request
				"02005e005301 c00002c8 000000000000 c00002c8",
			"ffffffffffff 02005e005301 0806" +
				"0001 0800 06 04 0002" + // reply
				"02005e005301 c00002c8 02005e005301 c00002c8",
		}},
		{"2001:db8::200", []string{
			"333300000001 02005e005301 86dd" + // all nodes, IPv6
				"60000000 0020 3a ff" + // 32 bytes of ICMPv6, hop limit 255
				"20010db8000000000000000000000200 ff020000000000000000000000000001" +
				"88 00 442c 20000000" + // neighbour advertisement, override
				"20010db8000000000000000000000200" +
				"02 01 02005e005301", // target link-layer address
		}},
	} {
		var got []string
		for _, f := range (Announcement{Link: 1, MAC: mac, Addr: netip.MustParseAddr(c.addr)}).frames() {
			got = append(got, hex.EncodeToString(f))
		}
		for i := range c.want {
			c.want[i] = strings.ReplaceAll(c.want[i], " ", "")
		}
		if strings.Join(got, "\n") != strings.Join(c.want, "\n") {
			t.Errorf("%s: frames\n%s\nwant\n%s", c.addr, strings.Join(got, "\n"), strings.Join(c.want, "\n"))
		}
	}
}

// A link without Ethernet, and one that isn't there, are told; others get theirs.
func TestSendTellsWhatFailed(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	mac := testkit.Must(net.ParseMAC("02:00:5e:00:53:01"))(t)
	err := Send(nil, []Announcement{
		{Link: 1 << 30, MAC: mac, Addr: netip.MustParseAddr("192.0.2.200")},
		{Link: 1, Addr: netip.MustParseAddr("192.0.2.201")},
		{Link: 1, MAC: mac, Addr: netip.MustParseAddr("::ffff:192.0.2.202")},
	})
	if err == nil || !strings.Contains(err.Error(), "192.0.2.200 at 02:00:5e:00:53:01") || !strings.Contains(err.Error(), "192.0.2.201") || !strings.Contains(err.Error(), "192.0.2.202") {
		t.Errorf("the error is %v", err)
	}
	testkit.Check(t, Send(nil, nil))
}
