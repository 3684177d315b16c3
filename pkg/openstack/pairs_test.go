package openstack

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"

	"github.com/coil-net/coil/pkg/testkit"
)

func prefixesOf(texts string) (all []netip.Prefix) {
	for _, text := range strings.Fields(texts) {
		if p, ok := parsePair(text); ok {
			all = append(all, p)
		}
	}
	return all
}

func TestPlanPairs(t *testing.T) {
	const mac, other = "fa:16:3e:00:00:01", "00:00:5e:00:01:01"
	for _, tt := range []struct {
		name            string
		has, want, seen string // a pair with * has another MAC address
		next            string // empty: no change
		limit           int
		tooMany         bool
	}{
		{"first", "", "10.1.0.9 fd00::9", "", "10.1.0.9 fd00::9", 10, false},
		{"there", "10.1.0.9 fd00::9", "fd00::9 10.1.0.9", "", "", 10, false},
		{"there in other words", "10.1.0.9/32 FD00:0::0009", "10.1.0.9 fd00::9", "", "", 10, false},
		{"there twice", "10.1.0.9/32 10.1.0.9", "10.1.0.9", "", "", 10, false},
		{"wanted twice", "", "10.1.0.9 10.1.0.9/32", "", "10.1.0.9", 10, false},
		{"unmasked", "10.1.0.3/24", "10.1.0.0/24", "", "", 10, false},
		{"foreign stay", "192.0.2.1/24 nonsense 10.1.0.9*", "10.1.0.9", "10.1.0.9", "192.0.2.1/24 nonsense 10.1.0.9* 10.1.0.9", 10, false},
		{"former ones go", "10.1.0.8 10.1.0.9 10.1.0.7", "10.1.0.9", "10.1.0.8 10.1.0.9", "10.1.0.7 10.1.0.9", 10, false},
		{"former prefix goes", "10.1.0.8/31", "10.1.0.9", "10.1.0.8 10.1.0.9", "10.1.0.9", 10, false},
		{"prefix with a foreign address stays", "10.1.0.8/30", "10.1.0.9", "10.1.0.8 10.1.0.9", "10.1.0.8/30 10.1.0.9", 10, false},
		{"all go", "10.1.0.9", "", "10.1.0.9", "none", 10, false},
		{"joined", "192.0.2.1", "10.1.0.8 10.1.0.9 fd00::9", "", "192.0.2.1 10.1.0.8/31 fd00::9", 3, false},
		{"joined and there", "10.1.0.8/31", "10.1.0.8 10.1.0.9", "", "", 1, false},
		{"range and address", "", "10.1.0.0/24 10.1.0.9", "", "10.1.0.0/24", 1, false},
		{"foreign in a range stay", "10.1.0.200 10.1.0.9", "10.1.0.0/24", "10.1.0.9", "10.1.0.200 10.1.0.0/24", 10, false},
		{"range is there", "10.1.0.200 10.1.0.7/24", "10.1.0.0/24", "", "", 10, false},
		{"former range stays", "10.1.0.0/24", "10.1.0.9", "10.1.0.9", "10.1.0.0/24 10.1.0.9", 10, false},
		{"too many", "192.0.2.1", "10.1.0.7 10.1.0.9", "", "", 2, true},
		{"no room", "192.0.2.1 192.0.2.2 192.0.2.3", "10.1.0.7", "", "", 2, true},
	} {
		g := gateway{ID: "g", MAC: mac}
		for _, text := range strings.Fields(tt.has) {
			p := ports.AddressPair{IPAddress: text, MACAddress: mac}
			if ip, ok := strings.CutSuffix(text, "*"); ok {
				p = ports.AddressPair{IPAddress: ip, MACAddress: other}
			}
			g.Pairs = append(g.Pairs, p)
		}
		var seen []Address
		for _, p := range prefixesOf(tt.seen) {
			seen = append(seen, Address{Fixed: []netip.Addr{p.Addr()}})
		}
		want := prefixesOf(tt.want)
		w := wantedPairs{want, testkit.Must(ownAddresses(want, seen))(t), tt.limit}
		next, change, err := w.plan(&g)
		if (ReasonOf(err) == TooManyPairs) != tt.tooMany || change != (tt.next != "") {
			t.Errorf("%s: change %t, error %v", tt.name, change, err)
			continue
		}
		var got []string
		for _, p := range next {
			if p.MACAddress == other {
				p.IPAddress += "*"
			}
			got = append(got, p.IPAddress)
		}
		if change && next == nil {
			t.Errorf("%s: nil doesn't clear the pairs", tt.name)
		}
		if text := strings.Join(got, " "); change && text != strings.TrimPrefix(tt.next, "none") {
			t.Errorf("%s: the pairs are %q, want %q", tt.name, text, tt.next)
		}
		// Neutron fills in the MAC address; then nothing changes any more.
		for i := range next {
			if next[i].MACAddress == "" {
				next[i].MACAddress = mac
			}
		}
		if g.Pairs = next; change {
			if _, again, err := w.plan(&g); again || err != nil {
				t.Errorf("%s: it changes twice: %v", tt.name, err)
			}
		}
	}
}

// FuzzFit joins addresses: the prefixes have the wanted ones and no others, and there are no more of them than allowed.
func FuzzFit(f *testing.F) {
	f.Add([]byte{1, 2, 3, 4, 9, 200}, 3)
	f.Fuzz(func(t *testing.T, last []byte, room int) {
		wanted := map[netip.Addr]bool{}
		var want []netip.Prefix
		for i, b := range last {
			a := netip.MustParseAddr(fmt.Sprint("10.1.0.", b))
			if i%2 == 1 {
				a = netip.MustParseAddr(fmt.Sprintf("fd00::%x", b))
			}
			wanted[a] = true
			want = append(want, netip.PrefixFrom(a, a.BitLen()))
		}
		room %= 20
		got, err := fit(want, room)
		if err != nil {
			return
		}
		n := 0
		for _, p := range got {
			for a := p.Addr(); p.Contains(a); a = a.Next() {
				if n++; !wanted[a] {
					t.Fatalf("%s of %v isn't wanted", a, got)
				}
			}
		}
		if n != len(wanted) || len(got) > room && room >= 0 || !slices.IsSortedFunc(got, netip.Prefix.Compare) {
			t.Fatalf("%v of %d addresses, wanted %d in %d prefixes", got, n, len(wanted), room)
		}
	})
}
