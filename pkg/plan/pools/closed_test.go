package pools

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
)

// block returns a block of a pool, as a node holds it.
func block(t *testing.T, pool *v2.AddressPool, index int32, node string, allocated, cooling int32) *v2.AddressBlock {
	t.Helper()
	spec := pool.Spec.DeepCopy()
	spec.Exclude = nil
	p, err := Parse(*spec)
	if err != nil {
		t.Fatal(err)
	}
	ranges, err := p.Block(index)
	if err != nil {
		t.Fatal(err)
	}
	b := NewBlock(pool, index, ranges, Holder{NodeName: node})
	b.Status = v2.AddressBlockStatus{Allocated: allocated, Cooling: cooling}
	return b
}

func TestParseExclude(t *testing.T) {
	spec := statusPool("p", subnet("10.0.0.0/24", "fd00::/120")).Spec
	for text, want := range map[string][]int32{
		"10.0.0.5":              {0},
		"10.0.0.40-10.0.0.70":   {1, 2},
		"10.0.0.70-10.0.0.40":   {1, 2}, // as CEL can't refuse
		"fd00::f0-fd00::1f":     {0, 1, 2, 3, 4, 5, 6, 7},
		"fd00::20/123":          {1},
		"10.0.0.255-10.0.0.255": {7},
	} {
		spec.Exclude = []string{text}
		p, err := Parse(spec)
		var got []int32
		for i := range int32(p.Total()) {
			if p.Excluded(i) {
				got = append(got, i)
			}
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("exclude %s: blocks %v, %v; want %v", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"gateway":               `exclude "gateway": it is no address`,
		"10.0.0.5-":             `exclude "10.0.0.5-": it is no range`,
		"10.0.0.9-fd00::":       "aren't of one family",
		"10.0.0.5/28":           "it has host bits: 10.0.0.0/28 is meant",
		"10.0.1.0":              "exclude: 10.0.1.0 isn't within one subnet of the pool",
		"10.0.0.255-10.0.1.255": "exclude: 10.0.0.255-10.0.1.255 isn't within one subnet of the pool",
	} {
		spec.Exclude = []string{"10.0.0.1", text}
		if p, err := Parse(spec); err == nil || !strings.Contains(err.Error(), want) || p.Total() != 0 {
			t.Errorf("exclude %s: %d blocks, %v; want an error with %q", text, p.Total(), err, want)
		}
	}
}

func TestCloser(t *testing.T) {
	pool := statusPool("p", subnet("10.0.0.0/24", ""))
	inside, outside := block(t, pool, 1, "n", 0, 0), block(t, pool, 2, "n", 0, 0)
	other := block(t, statusPool("q", subnet("10.1.0.0/24", "")), 1, "n", 0, 0)
	none := block(t, pool, 1, "", 0, 0)
	labels := func() (all []string) {
		c := NewCloser(pool)
		for _, b := range []*v2.AddressBlock{inside, outside, other, none} {
			all = append(all, c.Label(b))
		}
		return all
	}
	for _, tc := range []struct {
		exclude []string
		drain   bool
		want    []string
	}{
		{nil, false, []string{"", "", "", ""}},
		{[]string{"10.0.0.63"}, false, []string{"excluded", "", "", ""}},
		{[]string{"10.0.0.63"}, true, []string{"drain", "drain", "drain", ""}},
		{[]string{"nonsense", "10.0.0.63"}, false, []string{"", "", "", ""}},
	} {
		pool.Spec.Exclude, pool.Spec.Drain = tc.exclude, tc.drain
		if diff := cmp.Diff(tc.want, labels()); diff != "" {
			t.Errorf("exclude %v, drain %t (-want +got):\n%s", tc.exclude, tc.drain, diff)
		}
		// A lost block that is made again gives no address either.
		if got := block(t, pool, 1, "n", 0, 0).Labels[v2.LabelClosed]; got != tc.want[0] {
			t.Errorf("exclude %v, drain %t: a new block has the label %q", tc.exclude, tc.drain, got)
		}
	}
}

// status returns the status of a pool with some blocks.
func status(pool *v2.AddressPool, blocks ...*v2.AddressBlock) v2.AddressPoolStatus {
	return Status(Facts{Pool: pool, Blocks: blocks, Overlapping: Overlapping(pool, Others{}), Now: metav1.Now()})
}

// says is a condition in a line.
func says(st v2.AddressPoolStatus, kind string) string {
	c := meta.FindStatusCondition(st.Conditions, kind)
	if c == nil {
		return ""
	}
	return fmt.Sprintf("%s %s: %s", c.Status, c.Reason, c.Message)
}

func TestExcludedStatus(t *testing.T) {
	pool := statusPool("p", subnet("10.0.0.0/24", ""))
	free, held, floating := block(t, pool, 0, "n0", 7, 0), block(t, pool, 1, "n1", 3, 2), block(t, pool, 2, "", 0, 0)
	floating.Labels[v2.LabelFloating] = v2.FloatingValue
	floating.Floating = &v2.Floating{Owner: v2.FloatingOwner{Summary: "Egress a/b"}}
	if got := says(status(pool, free, held, floating), v2.PoolExcludedInUse); got != "" {
		t.Errorf("nothing is excluded: %s", got)
	}
	pool.Spec.Exclude = []string{"10.0.0.32-10.0.0.95", "10.0.0.255"} // blocks 1, 2 and 7
	st := status(pool, free, held, floating)
	if st.Blocks.Summary != "3/7" || st.Addresses.Summary != "10/224" {
		t.Errorf("blocks %s, addresses %s: what is excluded counts as long as it exists", st.Blocks.Summary, st.Addresses.Summary)
	}
	want := "True ExcludedHeld: Excluded addresses are in p-1, p-2: 3 addresses are in use on 1 node, and 2 more cool down; " +
		"1 block is held by n1; a node gives a block back when no pod has an address of it; 1 floating address belongs to Egress a/b"
	if got := says(st, v2.PoolExcludedInUse); got != want {
		t.Errorf("-want +got:\n%s", cmp.Diff(want, got))
	}
	pool.Status = st
	st = status(pool, free)
	if st.Blocks.Summary != "1/5" || says(st, v2.PoolExcludedInUse) != "False ExcludedFree: No block has excluded addresses" {
		t.Errorf("blocks %s, %s", st.Blocks.Summary, says(st, v2.PoolExcludedInUse))
	}
	st = status(pool, free, block(t, pool, 3, "n", 0, 0), block(t, pool, 4, "n", 0, 0), block(t, pool, 5, "n", 0, 0), block(t, pool, 6, "n", 0, 0))
	if got := says(st, v2.PoolExhausted); !strings.HasPrefix(got, "True AllBlocksTaken: All 5 blocks are taken that spec.exclude leaves") {
		t.Errorf("all that is left is taken: %s", got)
	}
	pool.Status, pool.Spec.Exclude = st, nil
	if got := says(status(pool, free), v2.PoolExcludedInUse); !strings.HasPrefix(got, "False ") {
		t.Errorf("nothing is excluded any more: %s", got)
	}
}

func TestDrained(t *testing.T) {
	pool := statusPool("p", subnet("10.0.0.0/24", ""))
	a, b, c := block(t, pool, 0, "n1", 7, 1), block(t, pool, 1, "n1", 0, 4), block(t, pool, 2, "n0", 1, 0)
	pool.Spec.Drain = true
	st := status(pool, a, b, c)
	want := "False BlocksInUse: 8 addresses are in use on 2 nodes, and 5 more cool down; 3 blocks are held by n0, n1; a node gives a block back when no pod has an address of it"
	if got := says(st, v2.PoolDrained); got != want {
		t.Errorf("-want +got:\n%s", cmp.Diff(want, got))
	}
	if got := says(st, v2.PoolExhausted); !strings.HasPrefix(got, "False BlocksAvailable: Not all blocks are taken, but none is carved as long as spec.drain is set") {
		t.Errorf("a pool that drains says %s", got)
	}
	pool.Status = st
	if got := says(status(pool), v2.PoolDrained); !strings.HasPrefix(got, "True NoBlocks: ") {
		t.Errorf("nothing is left: %s", got)
	}
	pool.Spec.Drain = false
	if got := says(status(pool, a), v2.PoolDrained); got != "" {
		t.Errorf("the pool doesn't drain any more: %s", got)
	}
}

func TestOverlappingLeavesOutExcluded(t *testing.T) {
	pool := func(name, cidr string, exclude ...string) *v2.AddressPool {
		p := statusPool(name, subnet(cidr, ""))
		p.Spec.Exclude = exclude
		return p
	}
	nodes := nodesAt("10.0.0.1", "10.0.0.2")
	for _, tc := range []struct {
		name   string
		pool   *v2.AddressPool
		others Others
		want   string
	}{
		{"nodes that are excluded", pool("p", "10.0.0.0/24", "10.0.0.0/28"), Others{Nodes: nodes}, "Nothing else uses addresses of the pool"},
		{"one of two nodes", pool("p", "10.0.0.0/24", "10.0.0.2"), Others{Nodes: nodes}, "The same addresses are used by Node n0 (10.0.0.1)"},
		{"an excluded part that another pool has", pool("p", "10.0.0.0/16", "10.0.7.0/24"), Others{Pools: []*v2.AddressPool{pool("q", "10.0.7.0/24")}}, "Nothing else uses addresses of the pool"},
		{"a part that another pool excludes", pool("p", "10.0.7.0/24"), Others{Pools: []*v2.AddressPool{pool("q", "10.0.0.0/16", "10.0.7.0/24")}}, "Nothing else uses addresses of the pool"},
		{"a part that is excluded in part", pool("p", "10.0.0.0/16", "10.0.7.0/25"), Others{Pools: []*v2.AddressPool{pool("q", "10.0.7.0/24")}}, "The same addresses are used by AddressPool q (10.0.7.0/24)"},
	} {
		if got := Overlapping(tc.pool, tc.others).Message; got != tc.want {
			t.Errorf("%s: %s", tc.name, got)
		}
	}
}

// TestStatusHistories carves, returns and excludes at random: what is free by the status is what can be carved.
func TestStatusHistories(t *testing.T) {
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 3))
		pool := statusPool("p", subnet("10.0.0.0/26", ""), subnet("10.0.9.0/28", ""))
		pool.Spec.BlockSizeBits = 2
		held := map[int32]struct{}{}
		for step := range 60 {
			p, err := Parse(pool.Spec)
			if err != nil {
				t.Fatal(err)
			}
			switch r.IntN(4) {
			case 0:
				pool.Spec.Exclude = nil
				for range r.IntN(3) {
					a := fmt.Sprintf("10.0.0.%d", r.IntN(64))
					pool.Spec.Exclude = append(pool.Spec.Exclude, []string{a, a + "-10.0.0.63", "10.0.9.8/29"}[r.IntN(3)])
				}
			case 1:
				for i := range held {
					delete(held, i)
					break
				}
			default:
				for i := range p.Free(int32(r.IntN(20)), held) {
					if p.Excluded(i) {
						t.Fatalf("seed %d, step %d: block %d is carved though %v is excluded", seed, step, i, pool.Spec.Exclude)
					}
					held[i] = struct{}{}
					break
				}
			}
			var blocks []*v2.AddressBlock
			for i := range held {
				blocks = append(blocks, block(t, pool, i, "n", 1, 0))
			}
			pool.Status = status(pool, blocks...)
			free := len(slices.Collect(must(Parse(pool.Spec)).Free(-1, held)))
			if got := pool.Status.Blocks.Total - pool.Status.Blocks.Used; got != int64(free) {
				t.Fatalf("seed %d, step %d: %d blocks are free by the status, %d can be carved; %v excluded", seed, step, got, free, pool.Spec.Exclude)
			}
			if is := meta.IsStatusConditionTrue(pool.Status.Conditions, v2.PoolExhausted); is != (free == 0) {
				t.Fatalf("seed %d, step %d: exhausted is %t with %d free", seed, step, is, free)
			}
		}
	}
}

func must(p ipam.Pool, err error) ipam.Pool {
	if err != nil {
		panic(err)
	}
	return p
}
