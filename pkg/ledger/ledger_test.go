package ledger

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/plantest"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/testkit"
)

func mustPool(t *testing.T, bits int, cidr string) ipam.Pool {
	t.Helper()
	p, err := pools.Parse(plantest.Pool("", int32(bits), cidr).Spec)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Random prefixes against the plain definition of overlapping.
func TestHoldersAgainstModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	random := func() netip.Prefix {
		if rng.IntN(2) == 0 {
			a := netip.AddrFrom4([4]byte{10, byte(rng.IntN(2)), byte(rng.IntN(4)), byte(rng.IntN(256))})
			return netip.PrefixFrom(a, 14+rng.IntN(19)).Masked()
		}
		a := netip.MustParseAddr("fd00::").As16()
		a[13], a[14], a[15] = byte(rng.IntN(2)), byte(rng.IntN(4)), byte(rng.IntN(256))
		return netip.PrefixFrom(netip.AddrFrom16(a), 110+rng.IntN(19)).Masked()
	}
	var h holders
	members := map[string][]netip.Prefix{}
	for step := range 20000 {
		if name := string('a' + byte(rng.IntN(6))); rng.IntN(20) < 9 {
			h.hold(name, nil)
			delete(members, name)
		} else {
			members[name] = []netip.Prefix{random(), random()}[:1+rng.IntN(2)]
			h.hold(name, members[name])
		}
		var block ipam.Block
		p := random()
		if p.Addr().Is4() {
			block.IPv4 = p
		} else {
			block.IPv6 = p
		}
		want := false
		for _, ps := range members {
			want = want || slices.ContainsFunc(ps, p.Overlaps)
		}
		if got := h.overlap(block); got != want {
			t.Fatalf("step %d: %s overlaps one of %v: %t, want %t", step, p, members, got, want)
		}
	}
	for name := range members {
		h.hold(name, nil)
	}
	if n := len(h.by) + h.number.Size(); n != 0 {
		t.Errorf("%d names and prefixes are left of none", n)
	}
}

func TestLedgerPicksEachIndexOnce(t *testing.T) {
	l := New(time.Now)
	p := mustPool(t, 0, "10.0.0.0/22")
	var mu sync.Mutex
	seen := map[int32]bool{}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 128 {
				c, err := l.Pick("p", p, "node")
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if seen[c.Index] {
					t.Errorf("index %d is picked twice", c.Index)
				}
				seen[c.Index] = true
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	var full *NoneFree
	if _, err := l.Pick("p", p, "node"); !errors.As(err, &full) || full.total != 1024 || full.overlapping != 0 {
		t.Errorf("a full pool gives %v", err)
	}
	l.Release("p", 77)
	if c, err := l.Pick("p", p, "node"); err != nil || c.Index != 77 {
		t.Errorf("pick after a release is %d, %v", c.Index, err)
	}
}

func TestLedgerMarksEnd(t *testing.T) {
	now := time.Unix(0, 0)
	l := New(func() time.Time { return now })
	p := mustPool(t, 0, "10.0.0.0/31")
	for range 2 {
		if _, err := l.Pick("p", p, "node"); err != nil {
			t.Fatal(err)
		}
	}
	l.See(plantest.Block("p", 0, "10.0.0.0/32", "node")) // index 1 was never made
	now = now.Add(MarkLife)
	if _, err := l.Pick("p", p, "node"); err == nil {
		t.Fatal("a mark ended before its time")
	}
	now = now.Add(time.Second)
	if c, err := l.Pick("p", p, "node"); err != nil || c.Index != 1 {
		t.Errorf("pick is %d, %v; want 1, whose mark has ended", c.Index, err)
	}
	now = now.Add(2 * MarkLife)
	l.See(plantest.Block("p", 1, "10.0.0.1/32", "node"))
	if _, err := l.Pick("p", p, "node"); err == nil {
		t.Error("an index that an event has confirmed is free")
	}
}

func TestLedgerOverlap(t *testing.T) {
	l := New(time.Now)
	p := mustPool(t, 1, "10.0.0.0/28") // 8 blocks
	l.See(plantest.Block("wide", 0, "10.0.0.0/30", "node"))
	l.See(plantest.Block("single", 3, "10.0.0.9/32", "node"))
	var got []int32
	for {
		c, err := l.Pick("p", p, "node")
		if err != nil {
			if full := (*NoneFree)(nil); !errors.As(err, &full) || full.overlapping != 3 {
				t.Errorf("in the end: %v", err)
			}
			break
		}
		got = append(got, c.Index)
	}
	if fmt.Sprint(got) != "[2 3 5 6 7]" {
		t.Errorf("picked %v", got)
	}
	l.Miss("wide-0")
	if c, err := l.Pick("p", p, "node"); err != nil || c.Index != 0 {
		t.Errorf("pick is %d, %v after the other block is gone", c.Index, err)
	}
}

// A single large block over a huge pool must not be stepped over one by one for ever.
func TestLedgerOverlapIsBounded(t *testing.T) {
	l := New(time.Now)
	p := mustPool(t, 0, "10.0.0.0/8")
	l.See(plantest.Block("old", 0, "10.0.0.0/14", "node")) // too large for a block of today
	var c Candidate
	var err error
	for range 5 {
		if c, err = l.Pick("p", p, "node"); err == nil {
			break
		}
	}
	if err != nil || c.Index != 1<<18 {
		t.Errorf("pick is %d, %v; want the first index behind the block", c.Index, err)
	}
}

func TestLedgerForgets(t *testing.T) {
	l := New(time.Now)
	p := plantest.Pool("p", 0, "10.0.0.0/30")
	p.UID = "a"
	end := l.Begin("p")
	l.Open(p)
	if !l.Busy("p") {
		t.Error("a pool is not busy while a request is at work")
	}
	if _, err := l.Pick("p", mustPool(t, 0, "10.0.0.0/30"), "node"); err != nil {
		t.Fatal(err)
	}
	if i := l.LastIndex("p", "a"); i == nil || *i != 0 {
		t.Errorf("last index is %v, want 0", i)
	}
	if l.LastIndex("p", "b") != nil {
		t.Error("a pool made again has the last index of the one before")
	}
	end()
	if l.Busy("p") {
		t.Error("a pool is busy with nothing at work")
	}
	l.Forget("p")
	l.Miss("p-0")
	if len(l.pools)+len(l.blocks.by)+l.blocks.number.Size() != 0 {
		t.Errorf("left are %d pools, %d blocks, %d ranges", len(l.pools), len(l.blocks.by), l.blocks.number.Size())
	}
}

// A block with the address of a Node would take that address from the node; an address that a
// Node has no longer can be given.
func TestPickLeavesNodesOut(t *testing.T) {
	l := New(time.Now)
	p := mustPool(t, 4, "10.1.0.0/26") // four blocks
	l.SeeNode("a", []netip.Addr{netip.MustParseAddr("10.1.0.3")})
	l.SeeNode("b", []netip.Addr{netip.MustParseAddr("10.1.0.40"), netip.MustParseAddr("2001:db8::1")})
	var got []int32
	for range 2 {
		c, err := l.Pick("default", p, "node")
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, c.Index)
	}
	if !slices.Equal(got, []int32{1, 3}) {
		t.Errorf("blocks %v were chosen, want 1 and 3: nodes have addresses of 0 and 2", got)
	}
	_, err := l.Pick("default", p, "node")
	if none := (*NoneFree)(nil); !errors.As(err, &none) || none.overlapping != 2 {
		t.Errorf("with nodes in the other blocks: %v, want none free, two that overlap", err)
	}
	l.SeeNode("b", nil)
	if c, err := l.Pick("default", p, "node"); err != nil || c.Index != 2 {
		t.Errorf("without the second node block %d was chosen (%v), want 2", c.Index, err)
	}
	block, err := p.Block(0)
	if err != nil {
		t.Fatal(err)
	}
	if name, addr, ok := l.NodeWithin(block, "node"); !ok || name != "a" || addr != netip.MustParseAddr("10.1.0.3") {
		t.Errorf("the Node of block 0 is %q with %s (%t)", name, addr, ok)
	}
	if name, _, ok := l.NodeWithin(block, "a"); ok {
		t.Errorf("Node %s is in the way of a block with Node a's own address", name)
	}
	// An admin may have allowed it.
	if !l.Claim("default", 0, block, "node") {
		t.Error("the ledger refused the claim of a block since a Node has an address of it")
	}
}

// A claimed block doesn't exist. The cache may show it all the same, and blocks of other names count.
func TestClaimAheadOfTheCache(t *testing.T) {
	l := New(time.Now)
	p := mustPool(t, 4, "10.1.0.0/26")
	block := func(index int32) ipam.Block {
		b, err := p.Block(index)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	see := func(name string, b ipam.Block) {
		cidr := b.IPv4.String()
		l.See(&v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: name}, IPv4: &cidr})
	}
	see("default-1", block(1))
	see("other-0", block(2))
	if !l.Claim("default", 1, block(1), "node") {
		t.Error("the claim of a block that only the cache has is refused")
	}
	if l.Claim("default", 2, block(2), "node") {
		t.Error("the claim of addresses of another block is granted")
	}
	if !l.blocks.overlap(block(1)) || !l.blocks.overlap(block(2)) {
		t.Error("addresses of claimed blocks are free")
	}
}

// Claims of blocks that other nodes hold keep a bounded number of blocks for their node.
func TestContestsOfANodeAreBounded(t *testing.T) {
	now := time.Now()
	l := New(func() time.Time { return now })
	for i := range int32(2 * maxContests) {
		l.Contest(pools.BlockName("default", i), "node")
	}
	l.Contest("default-7", "node") // once more
	l.Contest("default-1000", "other")
	if n := len(l.contested); n != maxContests+1 {
		t.Errorf("%d blocks are kept, want %d for one node and one for another", n, maxContests)
	}
	now = now.Add(ContestLife + 1)
	l.Contest("default-99", "node")
	if n := len(l.contested); n != 1 {
		t.Errorf("%d blocks are kept for longer than %s", n-1, ContestLife)
	}
}

// A block that is asked for by its index is marked if it is free, and otherwise it can be told who has it.
func TestTake(t *testing.T) {
	now := time.Unix(0, 0)
	l := New(func() time.Time { return now })
	p := mustPool(t, 0, "10.0.0.0/29")
	l.See(plantest.Block("p", 1, "10.0.0.1/32", "node"))
	l.See(plantest.Block("wide", 0, "10.0.0.2/31", "node"))
	l.SeeNode("machine", []netip.Addr{netip.MustParseAddr("10.0.0.4")})
	l.Contest("p-5", "node")
	take := func(index int32) bool {
		_, ok := l.Take("p", index, testkit.Must(p.Block(index))(t))
		return ok
	}
	for _, c := range []struct {
		index         int32
		want          bool
		blocks, nodes []string
	}{
		{0, true, []string{"p-0"}, nil}, // its own mark
		{0, false, []string{"p-0"}, nil},
		{1, false, []string{"p-1"}, nil},
		{2, false, []string{"wide-0"}, nil},
		{4, false, nil, []string{"machine"}},
		{5, false, nil, nil},
		{6, true, []string{"p-6"}, nil},
	} {
		if got := take(c.index); got != c.want {
			t.Errorf("index %d is taken: %t, want %t", c.index, got, c.want)
		}
		blocks, nodes := l.Within(testkit.Must(p.Block(c.index))(t))
		if !slices.Equal(blocks, c.blocks) || !slices.Equal(nodes, c.nodes) {
			t.Errorf("index %d is within %v and %v, want %v and %v", c.index, blocks, nodes, c.blocks, c.nodes)
		}
	}
	now = now.Add(MarkLife + time.Second)
	if !take(6) {
		t.Error("a mark that has ended still holds")
	}
}

// Those who carve wait until all blocks are known.
func TestWaitComplete(t *testing.T) {
	l := New(time.Now)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.WaitComplete(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("it doesn't wait: %v", err)
	}
	l.Complete()
	if err := l.WaitComplete(t.Context()); err != nil {
		t.Error(err)
	}
}
