package prefixes

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/plan/plantest"
)

func TestAggregate(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"nothing", "", ""},
		{"twice", "10.0.0.0/8 10.0.0.0/8", "10.0.0.0/8"},
		{"inside", "10.1.0.0/16 10.0.0.0/8 10.0.0.0/32", "10.0.0.0/8"},
		{"two halves", "10.0.1.0/24 10.0.0.0/24", "10.0.0.0/23"},
		{"neighbours that aren't halves", "10.0.1.0/24 10.0.2.0/24", "10.0.1.0/24 10.0.2.0/24"},
		{"quarters", "10.0.0.0/26 10.0.0.128/26 10.0.0.64/26 10.0.0.192/26", "10.0.0.0/24"},
		{"a half and what is inside the other", "10.0.0.0/25 10.0.0.128/26", "10.0.0.0/25 10.0.0.128/26"},
		{"both families", "fd00::1/128 fd00::/128 0.0.0.0/1 128.0.0.0/1", "0.0.0.0/0 fd00::/127"},
		{"all", "::/0 fd00::/8 0.0.0.0/0 10.0.0.0/8", "0.0.0.0/0 ::/0"},
	} {
		if got := Aggregate(plantest.Prefixes(tt.in)); !slices.Equal(got, plantest.Prefixes(tt.want)) {
			t.Errorf("%s: %v, want %s", tt.name, got, tt.want)
		}
	}
}

// TestNarrow holds that too many ranges become fewer: near ones are joined first.
func TestNarrow(t *testing.T) {
	if got, want := narrow(plantest.Prefixes("10.0.0.1/32 10.0.0.2/32 192.0.2.0/24 fd00::/64"), 3), plantest.Prefixes("10.0.0.0/30 192.0.2.0/24 fd00::/64"); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// Whatever the texts are, Aggregate has the same addresses in the fewest prefixes, and Cover has all of them within its
// limit, private ones by private ones alone.
func FuzzCover(f *testing.F) {
	f.Add("10.0.0.0/8 10.0.0.0/8 ::/0 fd00::/8 0.0.0.0/0", 3)
	f.Add("10.0.0.0/26 10.0.0.128/26 10.0.0.64/26 10.0.0.192/26 192.0.2.7/24", 1)
	f.Add("255.255.255.255/32 ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128 0.0.0.0/32 ::/128 172.16.0.0/12 172.32.0.0/12", 2)
	f.Add("::ffff:10.0.0.0/104 ::ffff:0:0/96 fe80::1%eth0/64 10.0.0.0/33 100.64.0.0/10", 8)
	f.Fuzz(func(t *testing.T, text string, limit int) {
		limit = 8 + int(uint(limit)%64) // each family has three private ranges at most
		in := Valid(strings.Fields(text))
		for _, p := range in {
			if !p.IsValid() || p != p.Masked() {
				t.Fatalf("%q is valid: %s", text, p)
			}
		}
		all := Aggregate(in)
		mustBeFewest(t, all)
		if got, want := setOf(t, all), setOf(t, in); !got.Equal(want) {
			t.Errorf("Aggregate(%v) has %v, want %v", in, got.Ranges(), want.Ranges())
		}
		cover := Cover(in, limit)
		if len(cover) > 2*limit {
			t.Errorf("Cover(%v, %d) has %d prefixes", in, limit, len(cover))
		}
		for _, p := range in {
			if !Within(p, Aggregate(cover)) {
				t.Errorf("Cover(%v, %d) is %v, without %s", in, limit, cover, p)
			}
		}
		private := Private(cover)
		mustBeFewest(t, private)
		mustBeFewest(t, cover[len(private):])
		for _, p := range Private(in) {
			if !Within(p, private) {
				t.Errorf("Cover(%v, %d) is %v: %s isn't in a private one", in, limit, cover, p)
			}
		}
	})
}

// mustBeFewest fails the test unless prefixes are sorted, IPv4 first, and no two can be replaced by one.
func mustBeFewest(t *testing.T, all []netip.Prefix) {
	t.Helper()
	for i, p := range all {
		if p != p.Masked() {
			t.Errorf("%s has host bits", p)
		}
		if i == 0 {
			continue
		}
		before := all[i-1]
		sorted := before.Addr().BitLen() < p.Addr().BitLen() || before.Addr().BitLen() == p.Addr().BitLen() && netipx.PrefixLastIP(before).Less(p.Addr())
		halves := before.Bits() == p.Bits() && p.Bits() > 0 && common(before, p).Bits() == p.Bits()-1
		if !sorted || halves {
			t.Errorf("%s comes before %s, which may overlap or be joined, in %v", before, p, all)
		}
	}
}

// setOf returns the addresses of prefixes. Go knows an IPv4 address in IPv6 as another one than that address.
func setOf(t *testing.T, all []netip.Prefix) *netipx.IPSet {
	t.Helper()
	var b netipx.IPSetBuilder
	for _, p := range all {
		b.AddRange(netipx.RangeOfPrefix(p))
	}
	s, err := b.IPSet()
	if err != nil {
		t.Fatal(err)
	}
	return s
}
