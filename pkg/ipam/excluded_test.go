package ipam_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/ipam"
)

func mustRange(tb testing.TB, text string) ipam.Range {
	tb.Helper()
	r, err := ipam.ParseRange(text)
	if err != nil {
		tb.Fatal(err)
	}
	return r
}

func ranges(tb testing.TB, texts ...string) (all []ipam.Range) {
	tb.Helper()
	for _, text := range texts {
		all = append(all, mustRange(tb, text))
	}
	return all
}

func TestParseRange(t *testing.T) {
	for text, want := range map[string]string{
		"10.1.2.5":            "10.1.2.5",
		"10.1.2.5-10.1.2.5":   "10.1.2.5",
		"10.1.2.10-10.1.2.20": "10.1.2.10-10.1.2.20",
		"10.1.2.0/28":         "10.1.2.0-10.1.2.15",
		"0.0.0.0/0":           "0.0.0.0-255.255.255.255",
		"10.1.2.5/32":         "10.1.2.5",
		"fd00::/126":          "fd00::-fd00::3",
		"FD00:0::A-fd00::b":   "fd00::a-fd00::b",
	} {
		if r, err := ipam.ParseRange(text); err != nil || r.String() != want {
			t.Errorf("%s is %s, %v; want %s", text, r, err, want)
		}
	}
	for text, want := range map[string]string{
		"":                    "no address, range or CIDR",
		"default":             "no address, range or CIDR",
		"10.1.2":              "no address, range or CIDR",
		"10.1.2.5/28":         "it has host bits: 10.1.2.0/28 is meant, or the single address 10.1.2.5",
		"10.1.2.0/33":         "no CIDR",
		"10.1.2.5-":           "no range",
		"10.1.2.5-fd00::":     "aren't of one family",
		"10.1.2.20-10.1.2.10": "10.1.2.20 comes after 10.1.2.10",
	} {
		if r, err := ipam.ParseRange(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is %s, %v; want an error with %q", text, r, err, want)
		}
	}
}

func TestRangeWithout(t *testing.T) {
	for _, tc := range []struct {
		from    string
		without []string
		want    string
	}{
		{"10.0.0.0/24", nil, "[10.0.0.0-10.0.0.255]"},
		{"10.0.0.0/24", []string{"10.0.1.0/24", "fd00::/64"}, "[10.0.0.0-10.0.0.255]"},
		{"10.0.0.0/24", []string{"10.0.0.0/16"}, "[]"},
		{"10.0.0.0/24", []string{"10.0.0.0", "10.0.0.255"}, "[10.0.0.1-10.0.0.254]"},
		{"10.0.0.0/24", []string{"10.0.0.10-10.0.0.20", "10.0.0.15-10.0.0.30", "10.0.0.100"}, "[10.0.0.0-10.0.0.9 10.0.0.31-10.0.0.99 10.0.0.101-10.0.0.255]"},
		{"0.0.0.0/0", []string{"0.0.0.0/1", "255.255.255.255"}, "[128.0.0.0-255.255.255.254]"},
		{"fd00::/127", []string{"fd00::1"}, "[fd00::]"},
	} {
		if got := fmt.Sprint(mustRange(t, tc.from).Without(ranges(t, tc.without...))); got != tc.want {
			t.Errorf("%s without %v is %s, want %s", tc.from, tc.without, got, tc.want)
		}
	}
}

func TestWithout(t *testing.T) {
	four := []ipam.Subnet{subnet("10.0.0.0/28", ""), subnet("10.0.1.0/28", "")}
	dual := []ipam.Subnet{subnet("10.0.0.0/28", "fd00::/124"), subnet("10.0.1.0/28", "fd00::10/124")}
	for _, tc := range []struct {
		name     string
		bits     int
		subnets  []ipam.Subnet
		without  []string
		excluded []int32
	}{
		{"nothing", 2, four, nil, nil},
		{"an address takes its block", 2, four, []string{"10.0.0.5"}, []int32{1}},
		{"a range over a border", 2, four, []string{"10.0.0.7-10.0.0.8"}, []int32{1, 2}},
		{"a whole subnet", 2, four, []string{"10.0.0.0/28"}, []int32{0, 1, 2, 3}},
		{"the second subnet", 2, four, []string{"10.0.1.15", "10.0.1.0"}, []int32{4, 7}},
		{"ranges that overlap and touch", 0, four, []string{"10.0.0.8/31", "10.0.0.9-10.0.0.10", "10.0.0.11", "10.0.0.8"}, []int32{8, 9, 10, 11}},
		{"each family of a pair", 2, dual, []string{"10.0.0.0", "fd00::1f"}, []int32{0, 7}},
		{"both families of one pair", 2, dual, []string{"10.0.0.0", "fd00::"}, []int32{0}},
		{"the first and the last block", 0, []ipam.Subnet{subnet("", "fd00::/64")}, []string{"fd00::", "fd00::7fff:ffff"}, []int32{0, math.MaxInt32}},
		{"beyond the blocks of a large subnet", 0, []ipam.Subnet{subnet("", "fd00::/32")}, []string{"fd00::8000:0", "fd00::1:0:0:0/80", "fd00:0:1::/48"}, nil},
		{"beyond the blocks of a pool", 0, []ipam.Subnet{subnet("", "fd00::/64"), subnet("", "fd01::/64")}, []string{"fd01::"}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			whole := mustPool(t, tc.bits, tc.subnets...)
			p, err := whole.Without(ranges(t, tc.without...))
			if err != nil {
				t.Fatal(err)
			}
			if p.Total() != whole.Total() || p.Available() != whole.Total()-int64(len(tc.excluded)) {
				t.Errorf("%d of %d blocks are available, want all of %d but %d", p.Available(), p.Total(), whole.Total(), len(tc.excluded))
			}
			for i := range int32(min(p.Total(), 64)) {
				if got := p.Excluded(i); got != slices.Contains(tc.excluded, i) {
					t.Errorf("block %d is excluded: %t", i, got)
				}
				a, _ := whole.Block(i)
				if b, err := p.Block(i); err != nil || a != b {
					t.Errorf("block %d was %s and is %s, %v", i, a, b, err)
				}
			}
			for _, i := range tc.excluded {
				if !p.Excluded(i) {
					t.Errorf("block %d isn't excluded", i)
				}
			}
		})
	}
	p := mustPool(t, 2, four...)
	for _, outside := range []string{"10.0.2.0", "10.0.0.0/24", "10.0.0.15-10.0.0.16", "fd00::", "10.0.0.0-10.0.1.15"} {
		if _, err := p.Without(ranges(t, outside)); err == nil || !strings.Contains(err.Error(), "isn't within one subnet") {
			t.Errorf("a pool without %s: %v", outside, err)
		}
	}
}

// Two billion excluded blocks are passed over at once.
func TestFreePassesExcludedBlocks(t *testing.T) {
	p, err := mustPool(t, 0, subnet("", "fd00::/64")).Without(ranges(t, "fd00::1-fd00::7fff:fffe"))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := slices.Collect(p.Free(-1, nil)), []int32{0, math.MaxInt32}; !slices.Equal(got, want) {
		t.Errorf("free are %v, want %v", got, want)
	}
	if got, want := slices.Collect(p.Free(5, nil)), []int32{math.MaxInt32, 0}; !slices.Equal(got, want) {
		t.Errorf("from the middle of the excluded ones, free are %v, want %v", got, want)
	}
	none, err := p.Without(ranges(t, "fd00::/64"))
	if err != nil || none.Available() != 0 || len(slices.Collect(none.Free(7, nil))) != 0 {
		t.Errorf("of a pool that is excluded as a whole, %d blocks are available, %v", none.Available(), err)
	}
}

// TestWithoutHistories excludes random ranges and compares with a model that looks at each address.
func TestWithoutHistories(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 11))
		bits := r.IntN(4)
		subnets := []ipam.Subnet{subnet("10.0.0.0/26", "fd00::/122"), subnet("10.0.9.0/28", "fd00:9::/124"), subnet("10.0.1.8/29", "fd00:1::8/125")}
		whole := mustPool(t, bits, subnets...)
		var out []ipam.Range
		for range r.IntN(5) {
			s := subnets[r.IntN(len(subnets))]
			of := []netip.Prefix{s.IPv4, s.IPv6}[r.IntN(2)]
			size := 1 << (of.Addr().BitLen() - of.Bits())
			first := r.IntN(size)
			last := first + r.IntN(size-first)
			out = append(out, ipam.Range{First: nth(of.Addr(), first), Last: nth(of.Addr(), last)})
		}
		p, err := whole.Without(out)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		taken := map[int32]struct{}{}
		var want []int32
		last := int32(r.IntN(int(p.Total())))
		for n := range int32(p.Total()) {
			i := (last + 1 + n) % int32(p.Total())
			b, _ := p.Block(i)
			covered := slices.ContainsFunc(b.Prefixes(), func(x netip.Prefix) bool { return slices.ContainsFunc(out, ipam.RangeOf(x).Overlaps) })
			if p.Excluded(i) != covered {
				t.Fatalf("seed %d: block %d, %s, without %v: excluded is %t", seed, i, b, out, p.Excluded(i))
			}
			if n := p.ExcludedWithin(int64(i), 1); (n == 1) != covered || n > 1 {
				t.Fatalf("seed %d: of block %d, %d blocks are excluded", seed, i, n)
			}
			if r.IntN(4) == 0 {
				taken[i] = struct{}{}
			} else if !covered {
				want = append(want, i)
			}
		}
		if got := slices.Collect(p.Free(last, taken)); !slices.Equal(got, want) {
			t.Fatalf("seed %d: free after %d are %v, want %v", seed, last, got, want)
		}
	}
}

// nth is the address n after another.
func nth(a netip.Addr, n int) netip.Addr {
	for range n {
		a = a.Next()
	}
	return a
}
