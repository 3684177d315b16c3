package ipam_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/ipam"
)

func TestAddressOf(t *testing.T) {
	for _, tc := range []struct {
		addrs []string
		want  string
		err   string // substring of what Validate says; "" is nothing
	}{
		{nil, "invalid IP", ""},
		{[]string{"10.0.0.1"}, "10.0.0.1", ""},
		{[]string{"fd00::1"}, "fd00::1", ""},
		{[]string{"fd00::1", "10.0.0.1"}, "10.0.0.1,fd00::1", ""},
		{[]string{"10.0.0.2", "10.0.0.1", "fd00::2", "fd00::1"}, "10.0.0.2,fd00::2", ""},
		{[]string{"::ffff:10.0.0.1"}, "::ffff:10.0.0.1", "::ffff:10.0.0.1 is not an IPv6 address"},
		{[]string{"10.0.0.1", "fe80::1%eth0"}, "10.0.0.1,fe80::1%eth0", "fe80::1%eth0 is not an IPv6 address without zone"},
	} {
		var addrs []netip.Addr
		for _, a := range tc.addrs {
			addrs = append(addrs, netip.MustParseAddr(a))
		}
		a := ipam.AddressOf(append(addrs, netip.Addr{})...)
		if got := a.String(); got != tc.want {
			t.Errorf("%v: %s, want %s", tc.addrs, got, tc.want)
		}
		err := a.Validate()
		if tc.err == "" && err != nil || tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)) {
			t.Errorf("%v: error %v, want %q", tc.addrs, err, tc.err)
		}
		if swapped := (ipam.Address{IPv4: a.IPv6, IPv6: a.IPv4}); swapped != a && swapped.Validate() == nil {
			t.Errorf("%v: the other way round is right, too", tc.addrs)
		}
	}
}

func TestParseBlock(t *testing.T) {
	str := func(s string) *string { return &s }
	for _, tc := range []struct {
		name       string
		ipv4, ipv6 *string
		want       ipam.Block
		err        string // substring; "" is no error
	}{
		{"IPv4", str("10.0.0.0/27"), nil, block("10.0.0.0/27", ""), ""},
		{"IPv6", nil, str("fd00::20/123"), block("", "fd00::20/123"), ""},
		{"dual", str("10.0.0.32/27"), str("fd00::20/123"), block("10.0.0.32/27", "fd00::20/123"), ""},
		{"empty is absent", str("10.0.0.0/32"), str(""), block("10.0.0.0/32", ""), ""},
		{"biggest", str("10.1.0.0/16"), str("fd00::/112"), block("10.1.0.0/16", "fd00::/112"), ""},
		{"neither", nil, str(""), ipam.Block{}, "neither an IPv4 nor an IPv6 prefix"},
		{"not a CIDR", str("10.0.0.0"), nil, ipam.Block{}, "parse block"},
		{"zone", nil, str("fe80::%eth0/64"), ipam.Block{}, "parse block"},
		{"host bits", str("10.0.0.1/27"), nil, ipam.Block{}, "10.0.0.0/27 is meant"},
		{"IPv6 as IPv4", str("fd00::/123"), nil, ipam.Block{}, "is not an IPv4 prefix"},
		{"IPv4 as IPv6", nil, str("10.0.0.0/27"), ipam.Block{}, "is not an IPv6 prefix"},
		{"unequal", str("10.0.0.0/27"), str("fd00::/122"), ipam.Block{}, "different size"},
		{"too big", str("10.0.0.0/15"), nil, ipam.Block{}, "more than 65536 addresses"},
		{"far too big", nil, str("::/0"), ipam.Block{}, "more than 65536 addresses"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b, err := ipam.ParseBlock(tc.ipv4, tc.ipv6)
			if tc.err == "" && err != nil || tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)) {
				t.Fatalf("error %v, want %q", err, tc.err)
			}
			if b != tc.want {
				t.Errorf("block %s, want %s", b, tc.want)
			}
		})
	}
}

// CIDRs that can't be understood, or aren't there, have no prefix.
func TestPrefixes(t *testing.T) {
	got := ipam.Prefixes(nil, new(""), new("10.0.0.1/24"), new("10.0.0.0/33"), new("fd00::1/64"), new("fe80::%eth0/64"))
	if want := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("fd00::/64")}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestBlockAddresses(t *testing.T) {
	for _, tc := range []struct {
		block ipam.Block
		size  int
		text  string
		at    map[int]string
	}{
		{block("10.0.0.32/27", ""), 32, "10.0.0.32/27",
			map[int]string{0: "10.0.0.32", 31: "10.0.0.63"}},
		{block("", "fd00::ffe0/123"), 32, "fd00::ffe0/123",
			map[int]string{0: "fd00::ffe0", 31: "fd00::ffff"}},
		{block("10.0.0.7/32", "fd00::7/128"), 1, "10.0.0.7/32,fd00::7/128",
			map[int]string{0: "10.0.0.7,fd00::7"}},
		{block("10.255.0.0/16", "fd00::ffff:ffff:ffff:0/112"), 65536, "10.255.0.0/16,fd00::ffff:ffff:ffff:0/112",
			map[int]string{0: "10.255.0.0,fd00::ffff:ffff:ffff:0", 256: "10.255.1.0,fd00::ffff:ffff:ffff:100", 65535: "10.255.255.255,fd00::ffff:ffff:ffff:ffff"}},
		{ipam.Block{}, 0, "", nil},
	} {
		t.Run(tc.text, func(t *testing.T) {
			if tc.block.Size() != tc.size {
				t.Errorf("Size() = %d, want %d", tc.block.Size(), tc.size)
			}
			if tc.block.String() != tc.text {
				t.Errorf("String() = %q", tc.block)
			}
			for o, want := range tc.at {
				if got := tc.block.At(o).String(); got != want {
					t.Errorf("At(%d) = %s, want %s", o, got, want)
				}
			}
			seen := map[ipam.Address]bool{}
			for o := range tc.size {
				a := tc.block.At(o)
				if seen[a] {
					t.Fatalf("At(%d) = %s is at another offset too", o, a)
				}
				seen[a] = true
				for _, x := range a.Addrs() {
					if got, ok := tc.block.Offset(x); !ok || got != o {
						t.Fatalf("Offset(%s) = %d, %t; want %d", x, got, ok, o)
					}
				}
			}
		})
	}
}

func TestOffsetOfForeignAddress(t *testing.T) {
	dual := block("10.0.0.32/27", "fd00::20/123")
	for _, a := range []string{"10.0.0.31", "10.0.0.64", "fd00::1f", "fd00::40", "::ffff:10.0.0.33", "fd00::21%eth0"} {
		if o, ok := dual.Offset(netip.MustParseAddr(a)); ok {
			t.Errorf("Offset(%s) = %d in %s", a, o, dual)
		}
	}
	if o, ok := block("10.0.0.32/27", "").Offset(netip.MustParseAddr("fd00::21")); ok {
		t.Errorf("IPv6 has offset %d in a block of IPv4", o)
	}
	if _, ok := dual.Offset(netip.Addr{}); ok {
		t.Error("no address has an offset")
	}
}

func TestAddress(t *testing.T) {
	v4, v6 := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	for _, tc := range []struct {
		a     ipam.Address
		addrs []netip.Addr
		text  string
	}{
		{ipam.Address{IPv4: v4}, []netip.Addr{v4}, "10.0.0.1"},
		{ipam.Address{IPv6: v6}, []netip.Addr{v6}, "fd00::1"},
		{ipam.Address{IPv4: v4, IPv6: v6}, []netip.Addr{v4, v6}, "10.0.0.1,fd00::1"},
	} {
		if d := cmp.Diff(tc.addrs, tc.a.Addrs(), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
			t.Errorf("Addrs() (-want +got):\n%s", d)
		}
		if tc.a.String() != tc.text {
			t.Errorf("String() = %q, want %q", tc.a, tc.text)
		}
	}
}

func FuzzParseBlock(f *testing.F) {
	f.Add("10.0.0.0/27", "fd00::/123")
	f.Add("::ffff:0:0/112", "10.0.0.0/16")
	f.Add("", "::/0")
	f.Add("", "0::/124") // not the shortest form, and the other family empty
	f.Fuzz(func(t *testing.T, v4, v6 string) {
		b, err := ipam.ParseBlock(&v4, &v6)
		if err != nil {
			return
		}
		if n := b.Size(); n < 1 || n > 1<<ipam.MaxBlockSizeBits {
			t.Fatalf("%s has %d addresses", b, n)
		}
		a := b.At(b.Size() - 1)
		if a.IPv4.IsValid() && !a.IPv4.Is4() || a.IPv6.IsValid() && (!a.IPv6.Is6() || a.IPv6.Is4In6()) {
			t.Fatalf("the last address of %s is %s", b, a)
		}
		for _, p := range b.Prefixes() {
			written := map[bool]string{true: v4, false: v6}[p.Addr().Is4()]
			if parsed, err := netip.ParsePrefix(written); err != nil || p != parsed {
				t.Fatalf("%s became %s", v4+","+v6, b)
			}
		}
	})
}
