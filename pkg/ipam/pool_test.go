package ipam_test

import (
	"iter"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/ipam"
)

// subnet makes a Subnet of one or two CIDRs; "" is a family that isn't there.
func subnet(ipv4, ipv6 string) ipam.Subnet {
	var s ipam.Subnet
	if ipv4 != "" {
		s.IPv4 = netip.MustParsePrefix(ipv4)
	}
	if ipv6 != "" {
		s.IPv6 = netip.MustParsePrefix(ipv6)
	}
	return s
}

func block(ipv4, ipv6 string) ipam.Block { return ipam.Block(subnet(ipv4, ipv6)) }

func mustPool(tb testing.TB, bits int, subnets ...ipam.Subnet) ipam.Pool {
	tb.Helper()
	p, err := ipam.NewPool(bits, subnets)
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

func TestNewPoolErrors(t *testing.T) {
	for _, tc := range []struct {
		name    string
		bits    int
		subnets []ipam.Subnet
		want    []string // one substring per line of the error
	}{
		{"no subnet", 5, nil, []string{"there is no subnet"}},
		{"negative size", -1, []ipam.Subnet{subnet("10.0.0.0/8", "")},
			[]string{"-1 bits is not within 0 and 16"}},
		{"size beyond the bound", 17, []ipam.Subnet{subnet("10.0.0.0/8", "")},
			[]string{"17 bits is not within 0 and 16"}},
		{"absurd size doesn't hide other faults", 1000, []ipam.Subnet{subnet("10.0.0.1/8", "")},
			[]string{"1000 bits is not within", "subnet 0: 10.0.0.1/8 has host bits: 10.0.0.0/8 is meant"}},
		{"no prefix", 0, []ipam.Subnet{{}}, []string{"subnet 0: it has neither"}},
		{"no prefix, among others", 0, []ipam.Subnet{{}, subnet("10.0.0.0/24", ""), subnet("", "fd00::/120")},
			[]string{"subnet 0: it has neither", "subnet 2: its address families differ from those of subnet 1"}},
		{"host bits in IPv4", 0, []ipam.Subnet{subnet("10.0.0.1/24", "")}, []string{"10.0.0.0/24 is meant"}},
		{"host bits in IPv6", 0, []ipam.Subnet{subnet("", "fd00::1/64")}, []string{"fd00::/64 is meant"}},
		{"IPv6 as IPv4", 0, []ipam.Subnet{subnet("fd00::/64", "")}, []string{"fd00::/64 is not an IPv4 prefix"}},
		{"IPv4 as IPv6", 0, []ipam.Subnet{subnet("", "10.0.0.0/24")}, []string{"10.0.0.0/24 is not an IPv6 prefix"}},
		{"mapped IPv4 as IPv6", 0, []ipam.Subnet{subnet("", "::ffff:10.0.0.0/120")}, []string{"is not an IPv6 prefix"}},
		{"mapped IPv4 as IPv4", 0, []ipam.Subnet{subnet("::ffff:10.0.0.0/120", "")}, []string{"is not an IPv4 prefix"}},
		{"smaller than a block", 9, []ipam.Subnet{subnet("10.0.0.0/24", "")},
			[]string{"10.0.0.0/24 is smaller than a block of 512 addresses"}},
		{"IPv6 smaller than a block", 5, []ipam.Subnet{subnet("", "fd00::/124")},
			[]string{"fd00::/124 is smaller than a block of 32 addresses"}},
		{"unequal size", 0, []ipam.Subnet{subnet("10.0.0.0/24", "fd00::/119")},
			[]string{"10.0.0.0/24 and fd00::/119 are of different size"}},
		{"mixed families", 0, []ipam.Subnet{subnet("10.0.0.0/24", ""), subnet("", "fd00::/120"), subnet("10.0.1.0/24", "fd00::100/120")},
			[]string{"subnet 1: its address families differ", "subnet 2: its address families differ"}},
		{"the same twice", 0, []ipam.Subnet{subnet("10.0.0.0/24", ""), subnet("10.0.0.0/24", "")},
			[]string{"subnet 1: it overlaps subnet 0"}},
		{"one in another", 0, []ipam.Subnet{subnet("10.0.0.0/24", ""), subnet("10.1.0.0/24", ""), subnet("10.0.0.0/8", "")},
			[]string{"subnet 2: it overlaps subnet 0", "subnet 2: it overlaps subnet 1"}},
		{"overlap in IPv6 only", 0, []ipam.Subnet{subnet("10.0.0.0/24", "fd00::/120"), subnet("10.0.1.0/24", "fd00::/120")},
			[]string{"subnet 1: it overlaps subnet 0"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, err := ipam.NewPool(tc.bits, tc.subnets)
			if err == nil {
				t.Fatal("no error")
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != len(tc.want) {
				t.Fatalf("%d problems, want %d:\n%v", len(lines), len(tc.want), err)
			}
			for i, w := range tc.want {
				if !strings.Contains(lines[i], w) {
					t.Errorf("problem %d is %q, want %q", i, lines[i], w)
				}
			}
			if p.Total() != 0 {
				t.Errorf("a pool of %d blocks comes with the error", p.Total())
			}
		})
	}
}

func TestZeroPoolHasNoBlocks(t *testing.T) {
	var p ipam.Pool
	if p.Total() != 0 {
		t.Errorf("Total() = %d", p.Total())
	}
	if _, err := p.Block(0); err == nil {
		t.Error("Block(0) is no error")
	}
	if i, ok := nextFree(p, -1, nil); ok {
		t.Errorf("index %d is free", i)
	}
}

func TestPoolKeepsItsOwnSubnets(t *testing.T) {
	subnets := []ipam.Subnet{subnet("10.0.0.0/24", "")}
	p := mustPool(t, 0, subnets...)
	subnets[0] = subnet("10.9.0.0/24", "")
	b, err := p.Block(0)
	if err != nil || b != block("10.0.0.0/32", "") {
		t.Errorf("Block(0) = %s, %v after the caller changed its slice", b, err)
	}
}

func TestBlockIndexes(t *testing.T) {
	dual := []ipam.Subnet{
		subnet("10.0.0.0/29", "fd00::/125"),
		subnet("192.168.0.0/28", "fd01::/124"),
		subnet("172.16.0.0/30", "fd02::fffe:fffc/126"),
	}
	for _, tc := range []struct {
		name    string
		bits    int
		subnets []ipam.Subnet
		total   int64
		blocks  map[int32]ipam.Block
	}{
		{"across subnets", 2, dual, 2 + 4 + 1, map[int32]ipam.Block{
			0: block("10.0.0.0/30", "fd00::/126"),
			1: block("10.0.0.4/30", "fd00::4/126"),
			2: block("192.168.0.0/30", "fd01::/126"),
			5: block("192.168.0.12/30", "fd01::c/126"),
			6: block("172.16.0.0/30", "fd02::fffe:fffc/126"),
		}},
		{"blocks of one address", 0, dual, 8 + 16 + 4, map[int32]ipam.Block{
			0:  block("10.0.0.0/32", "fd00::/128"),
			7:  block("10.0.0.7/32", "fd00::7/128"),
			8:  block("192.168.0.0/32", "fd01::/128"),
			27: block("172.16.0.3/32", "fd02::fffe:ffff/128"),
		}},
		{"one block of 65536 addresses", 16, []ipam.Subnet{subnet("10.1.0.0/16", "fd00::1:0/112")}, 1,
			map[int32]ipam.Block{0: block("10.1.0.0/16", "fd00::1:0/112")}},
		{"carry across the groups of IPv6", 16, []ipam.Subnet{subnet("", "fd00::/79")}, math.MaxInt32 + 1,
			map[int32]ipam.Block{
				0:             block("", "fd00::/112"),
				1:             block("", "fd00::1:0/112"),
				math.MaxInt32: block("", "fd00::7fff:ffff:0/112"),
			}},
		{"whole IPv4", 0, []ipam.Subnet{subnet("0.0.0.0/0", "")}, ipam.MaxBlocks,
			map[int32]ipam.Block{0: block("0.0.0.0/32", ""), math.MaxInt32: block("127.255.255.255/32", "")}},
		{"whole IPv4 in big blocks", 16, []ipam.Subnet{subnet("0.0.0.0/0", "")}, 65536,
			map[int32]ipam.Block{65535: block("255.255.0.0/16", "")}},
		{"whole IPv6", 16, []ipam.Subnet{subnet("", "::/0")}, ipam.MaxBlocks,
			map[int32]ipam.Block{0: block("", "::/112"), math.MaxInt32: block("", "::7fff:ffff:0/112")}},
		{"exactly 2^31 blocks", 0, []ipam.Subnet{subnet("", "fd00::/97")}, ipam.MaxBlocks,
			map[int32]ipam.Block{math.MaxInt32: block("", "fd00::7fff:ffff/128")}},
		{"the bound is inside the second subnet", 0, []ipam.Subnet{subnet("", "fd00::/98"), subnet("", "fd01::/64")}, ipam.MaxBlocks,
			map[int32]ipam.Block{
				1<<30 - 1:     block("", "fd00::3fff:ffff/128"),
				1 << 30:       block("", "fd01::/128"),
				math.MaxInt32: block("", "fd01::3fff:ffff/128"),
			}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := mustPool(t, tc.bits, tc.subnets...)
			if p.Total() != tc.total {
				t.Errorf("Total() = %d, want %d", p.Total(), tc.total)
			}
			if want := 1 << tc.bits; p.BlockSize() != want {
				t.Errorf("BlockSize() = %d, want %d", p.BlockSize(), want)
			}
			for i, want := range tc.blocks {
				b, err := p.Block(i)
				if err != nil || b != want {
					t.Errorf("Block(%d) = %s, %v; want %s", i, b, err, want)
				}
			}
			for _, i := range []int64{-1, math.MinInt32, tc.total} {
				if i > math.MaxInt32 {
					continue
				}
				if b, err := p.Block(int32(i)); err == nil {
					t.Errorf("Block(%d) = %s, want an error", i, b)
				}
			}
		})
	}
}

// A block's name has its index, so an index must mean the same block forever.
func TestAppendedSubnetKeepsIndexes(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		bits := r.IntN(4)
		var subnets []ipam.Subnet
		for i := range 1 + r.IntN(5) {
			n := bits + r.IntN(6)
			subnets = append(subnets, ipam.Subnet{
				IPv4: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i), 0, 0}), 32-n),
				IPv6: netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, byte(i)}), 128-n),
			})
		}
		whole := mustPool(t, bits, subnets...)
		seen := map[ipam.Block]bool{}
		for i := range int32(whole.Total()) {
			b, err := whole.Block(i)
			if err != nil {
				t.Fatal(err)
			}
			if seen[b] {
				t.Fatalf("block %d, %s, has another index too", i, b)
			}
			seen[b] = true
			if err := b.Validate(); err != nil {
				t.Fatalf("block %d: %v", i, err)
			}
		}
		part := mustPool(t, bits, subnets[:1+r.IntN(len(subnets))]...)
		for i := range int32(part.Total()) {
			a, _ := part.Block(i)
			b, _ := whole.Block(i)
			if a != b {
				t.Fatalf("block %d was %s and is %s with more subnets", i, a, b)
			}
		}
	}
}

// nextFree returns the first free index after last; false if there is none.
func nextFree(p ipam.Pool, last int32, taken map[int32]struct{}) (int32, bool) {
	next, stop := iter.Pull(p.Free(last, taken))
	defer stop()
	return next()
}

func TestFreeGoesRoundOnce(t *testing.T) {
	p := mustPool(t, 0, subnet("10.0.0.0/30", ""), subnet("10.0.1.0/31", ""))
	if got, want := slices.Collect(p.Free(3, map[int32]struct{}{1: {}, 5: {}})), []int32{4, 0, 2, 3}; !slices.Equal(got, want) {
		t.Errorf("free are %v, want %v", got, want)
	}
}

func TestNextFree(t *testing.T) {
	taken := func(is ...int32) map[int32]struct{} {
		m := map[int32]struct{}{}
		for _, i := range is {
			m[i] = struct{}{}
		}
		return m
	}
	four := mustPool(t, 0, subnet("10.0.0.0/31", ""), subnet("10.0.1.0/31", ""))
	huge := mustPool(t, 0, subnet("", "fd00::/32"))
	for _, tc := range []struct {
		name  string
		pool  ipam.Pool
		last  int32
		taken map[int32]struct{}
		want  int32
		ok    bool
	}{
		{"first of all", four, -1, nil, 0, true},
		{"after the last", four, 0, taken(0), 1, true},
		{"a returned one is last", four, 1, taken(1), 2, true},
		{"goes round", four, 3, taken(3), 0, true},
		{"over taken ones", four, 1, taken(0, 1, 2), 3, true},
		{"round and over taken ones", four, 2, taken(3, 0), 1, true},
		{"none left", four, 2, taken(0, 1, 2, 3), 0, false},
		{"only the last itself", four, 2, taken(0, 1, 3), 2, true},
		{"taken ones beyond the pool don't count", four, -1, taken(4, 5, 6, 7, -1), 0, true},
		{"last beyond a pool", four, 1000, nil, 1, true},
		{"last is nonsense", four, -77, taken(0), 1, true},
		{"last is the smallest number", four, math.MinInt32, nil, 0, true},
		{"the end of the numbers", huge, math.MaxInt32 - 1, nil, math.MaxInt32, true},
		{"round at the end of the numbers", huge, math.MaxInt32, taken(0), 1, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if i, ok := nextFree(tc.pool, tc.last, tc.taken); i != tc.want || ok != tc.ok {
				t.Errorf("the first free one after %d is %d, %t; want %d, %t", tc.last, i, ok, tc.want, tc.ok)
			}
		})
	}
}

// TestFreeHistories carves and returns blocks at random and compares with a
// model that looks at each index: never one that is taken, and of the free ones
// always the one that comes soonest after the last.
func TestFreeHistories(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 7))
		p := mustPool(t, 0, subnet("10.0.0.0/28", ""), subnet("10.1.0.0/30", ""), subnet("10.2.0.0/32", ""))
		total := int32(p.Total())
		taken := map[int32]struct{}{}
		last := int32(-1)
		for range 500 {
			if r.IntN(5) < 2 && len(taken) > 0 {
				for i := range taken { // any one
					delete(taken, i)
					break
				}
				continue
			}
			want, wantOK := int32(0), false
			for n := int32(1); n <= total && !wantOK; n++ {
				i := (last + n) % total
				if _, is := taken[i]; !is {
					want, wantOK = i, true
				}
			}
			i, ok := nextFree(p, last, taken)
			if i != want || ok != wantOK {
				t.Fatalf("seed %d: the first free one after %d, with %v taken, is %d, %t; want %d, %t", seed, last, taken, i, ok, want, wantOK)
			}
			if ok {
				taken[i] = struct{}{}
				last = i
			}
		}
	}
}

func TestReturnedBlockIsCarvedLast(t *testing.T) {
	p := mustPool(t, 4, subnet("10.0.0.0/24", ""))
	taken := map[int32]struct{}{}
	last := int32(-1)
	var order []int32
	for range 3 * p.Total() {
		i, ok := nextFree(p, last, taken)
		if !ok {
			t.Fatal("no block although each one is returned at once")
		}
		order = append(order, i)
		last = i
	}
	var want []int32
	for n := range int32(3 * p.Total()) {
		want = append(want, n%int32(p.Total()))
	}
	if d := cmp.Diff(want, order); d != "" {
		t.Errorf("order of carving (-want +got):\n%s", d)
	}
}

func FuzzPool(f *testing.F) {
	f.Add(5, "10.0.0.0/16", "fd00::/112", int32(3), int32(-1))
	f.Add(0, "0.0.0.0/0", "", int32(math.MaxInt32), int32(math.MaxInt32))
	f.Add(16, "", "::/0", int32(math.MaxInt32), int32(math.MinInt32))
	f.Add(-3, "::ffff:1.2.3.4/100", "1.2.3.4/5", int32(0), int32(0))
	f.Fuzz(func(t *testing.T, bits int, v4, v6 string, index, last int32) {
		var s ipam.Subnet
		s.IPv4, _ = netip.ParsePrefix(v4)
		s.IPv6, _ = netip.ParsePrefix(v6)
		p, err := ipam.NewPool(bits, []ipam.Subnet{s})
		if err != nil {
			return
		}
		if p.Total() < 1 || p.Total() > ipam.MaxBlocks {
			t.Fatalf("%v has %d blocks", s, p.Total())
		}
		i, ok := nextFree(p, last, map[int32]struct{}{0: {}, index: {}})
		if ok && (i < 0 || int64(i) >= p.Total() || i == 0 || i == index) {
			t.Fatalf("the first free one after %d is %d of %d blocks", last, i, p.Total())
		}
		b, err := p.Block(index)
		if (err == nil) != (index >= 0 && int64(index) < p.Total()) {
			t.Fatalf("Block(%d) of %d: %v", index, p.Total(), err)
		}
		if err != nil {
			return
		}
		if b.Size() != p.BlockSize() {
			t.Fatalf("block %s has %d addresses, want %d", b, b.Size(), p.BlockSize())
		}
		if i, ok := p.Index(b); !ok || i != index {
			t.Fatalf("Index(Block(%d)) = %d, %t", index, i, ok)
		}
		for _, off := range []int{0, b.Size() / 2, b.Size() - 1} {
			for _, a := range b.At(off).Addrs() {
				if !s.IPv4.Contains(a) && !s.IPv6.Contains(a) {
					t.Fatalf("%s of block %s isn't in the subnet", a, b)
				}
				if o, ok := b.Offset(a); !ok || o != off {
					t.Fatalf("Offset(At(%d)) = %d, %t", off, o, ok)
				}
			}
		}
	})
}
