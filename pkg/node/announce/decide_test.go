package announce

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// of are addresses of pools: "p:192.0.2.200", and "p:192.0.2.200?" is uncertain.
func of(all ...string) []Address {
	var as []Address
	for _, s := range all {
		pool, addr, _ := strings.Cut(s, ":")
		addr, uncertain := strings.CutSuffix(addr, "?")
		as = append(as, Address{netip.MustParseAddr(addr), pool, uncertain})
	}
	return as
}

func TestDecide(t *testing.T) {
	on := func(index int, subnets ...string) map[int]link {
		l := link{index: index}
		for _, s := range subnets {
			l.subnets = append(l.subnets, netip.MustParsePrefix(s))
		}
		return map[int]link{index: l}
	}
	both := func(a, b map[int]link) map[int]link {
		for i, l := range b {
			a[i] = l
		}
		return a
	}
	for _, c := range []struct {
		name           string
		links          map[int]link
		addrs          []Address
		held           []string // "link address"
		want, homeless []string
	}{
		{"both families", on(2, "192.0.2.0/24", "2001:db8::/64"), of("p:192.0.2.200", "p:2001:db8::200"), nil, []string{"2 192.0.2.200", "2 2001:db8::200"}, nil},
		{"one family of the link", on(2, "192.0.2.0/24"), of("p:192.0.2.200", "p:2001:db8::200"), nil, []string{"2 192.0.2.200"}, []string{"2001:db8::200"}},
		{"beside the subnet", on(2, "192.0.2.0/25"), of("p:192.0.2.200"), nil, nil, []string{"192.0.2.200"}},
		{"no link", nil, of("p:192.0.2.200"), nil, nil, []string{"192.0.2.200"}},
		{"two links, two subnets", both(on(3, "198.51.100.0/24"), on(2, "192.0.2.0/24")), of("p:192.0.2.200", "q:198.51.100.7"), nil, []string{"2 192.0.2.200", "3 198.51.100.7"}, nil},
		{"two links in one subnet", both(on(3, "192.0.2.0/24"), on(2, "192.0.2.0/24")), of("p:192.0.2.200"), nil, []string{"2 192.0.2.200", "3 192.0.2.200"}, nil},
		{"subnets within each other", on(2, "192.0.2.0/24", "192.0.2.128/25"), of("p:192.0.2.200"), nil, []string{"2 192.0.2.200"}, nil},
		{"an address twice", on(2, "192.0.2.0/24"), of("p:192.0.2.200", "p:192.0.2.200"), nil, []string{"2 192.0.2.200"}, nil},
		{"uncertain, and there", on(2, "192.0.2.0/24"), of("p:192.0.2.200?"), []string{"2 192.0.2.200"}, []string{"2 192.0.2.200"}, nil},
		{"uncertain, and not there", on(2, "192.0.2.0/24"), of("p:192.0.2.200?"), []string{"2 192.0.2.201", "3 192.0.2.200"}, nil, nil},
		{"uncertain, without a link", nil, of("p:192.0.2.200?"), []string{"2 192.0.2.200"}, nil, nil},
		{"nothing is wanted", on(2, "192.0.2.0/24"), nil, []string{"2 192.0.2.200"}, nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			held := map[spot]string{}
			for _, h := range c.held {
				var s spot
				var addr string
				if _, err := fmt.Sscan(h, &s.link, &addr); err != nil {
					t.Fatal(err)
				}
				s.addr = netip.MustParseAddr(addr)
				held[s] = ""
			}
			want, homeless := decide(c.links, c.addrs, held)
			var got, left []string
			for _, s := range want {
				got = append(got, fmt.Sprint(s.link, " ", s.addr))
			}
			for _, a := range homeless {
				left = append(left, a.Addr.String())
			}
			if diff := cmp.Diff([][]string{c.want, c.homeless}, [][]string{got, left}); diff != "" {
				t.Errorf("spots, and addresses without a link (-want +got):\n%s", diff)
			}
		})
	}
}

func TestSuits(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	for name, c := range map[string]struct {
		link rtnl.Link
		want bool
	}{
		"hardware":                    {rtnl.Link{Up: true, Ethernet: true, MAC: mac}, true},
		"bridge":                      {rtnl.Link{Up: true, Ethernet: true, MAC: mac, Kind: "bridge"}, true},
		"down":                        {rtnl.Link{Ethernet: true, MAC: mac}, false},
		"without ARP":                 {rtnl.Link{Up: true, MAC: mac}, false},
		"IP tunnel":                   {rtnl.Link{Up: true, Kind: "ipip", MAC: mac[:4]}, false},
		"no MAC address yet":          {rtnl.Link{Up: true, Ethernet: true, MAC: make([]byte, 6)}, false},
		"loopback":                    {rtnl.Link{Up: true, Ethernet: true, Loopback: true, MAC: mac}, false},
		"of a pod":                    {rtnl.Link{Up: true, Ethernet: true, MAC: mac, Group: dataplane.LinkGroup}, false},
		"of a pod that isn't guarded": {rtnl.Link{Up: true, Ethernet: true, MAC: mac, Group: dataplane.LinkGroupUnguarded}, false},
		"of a pod of Coil 2.x":        {rtnl.Link{Up: true, Ethernet: true, MAC: mac, Alias: "COIL:default:c:eth0"}, false},
	} {
		if got := suits(c.link); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestSubnetOf(t *testing.T) {
	for p, want := range map[string]bool{
		"192.0.2.1/24": true, "2001:db8::1/64": true, "192.0.2.1/31": true, "192.0.2.1/32": false, "2001:db8::1/128": false,
		"fe80::1/64": false, "169.254.0.1/16": false, "127.0.0.1/8": false,
	} {
		if got := subnetOf(netip.MustParsePrefix(p)); got != want {
			t.Errorf("%s: %t", p, got)
		}
	}
}

// Each announcement is repeated after 1, 2 and 5 seconds, whatever comes in between.
func TestTurns(t *testing.T) {
	a, b := []spot{{link: 1}}, []spot{{link: 2}}
	start := time.Now()
	var all turns
	if !all.next().IsZero() || len(all.due(start)) > 0 {
		t.Error("there are turns at the beginning")
	}
	all.add(start, a)
	all.add(start.Add(500*time.Millisecond), b)
	var got []string
	for !all.next().IsZero() {
		now := all.next()
		for _, s := range all.due(now) {
			got = append(got, fmt.Sprintf("%s %d", now.Sub(start), s.link))
		}
	}
	if diff := cmp.Diff([]string{"1s 1", "1.5s 2", "2s 1", "2.5s 2", "5s 1", "5.5s 2"}, got); diff != "" {
		t.Errorf("turns (-want +got):\n%s", diff)
	}
}
