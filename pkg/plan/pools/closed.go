package pools

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
)

// Reasons of the conditions ExcludedInUse and Drained of an AddressPool.
const (
	// ReasonExcludedFree: ExcludedInUse is False.
	ReasonExcludedFree = "ExcludedFree"
	// ReasonExcludedHeld: ExcludedInUse is True.
	ReasonExcludedHeld = "ExcludedHeld"
)

// excluded returns the ranges of spec.exclude. The ends of one may be in either order, as CEL can't compare addresses.
func excluded(spec v2.AddressPoolSpec) ([]ipam.Range, error) {
	var ranges []ipam.Range
	for _, text := range spec.Exclude {
		r, err := ipam.ParseRange(text)
		if first, last, ok := strings.Cut(text, "-"); ok && err != nil {
			if turned, e := ipam.ParseRange(last + "-" + first); e == nil {
				r, err = turned, nil
			}
		}
		if err != nil {
			return nil, fmt.Errorf("exclude %q: %w", text, err)
		}
		ranges = append(ranges, r)
	}
	return ranges, nil
}

// Ranges returns the addresses of a pool that can be understood and that aren't excluded.
func Ranges(p *v2.AddressPool) []ipam.Range {
	without, err := excluded(p.Spec)
	if err != nil {
		without = nil
	}
	var left []ipam.Range
	for _, prefix := range Prefixes(p) {
		left = append(left, ipam.RangeOf(prefix).Without(without)...)
	}
	return left
}

// Closer says which blocks of a pool give no address any more.
type Closer struct {
	pool  *v2.AddressPool
	whole ipam.Pool
}

// NewCloser returns the Closer of a pool. If that can't be understood, no block of it is excluded.
func NewCloser(pool *v2.AddressPool) Closer {
	c := Closer{pool: pool}
	if len(pool.Spec.Exclude) > 0 {
		c.whole, _ = Parse(pool.Spec) // the zero Pool excludes nothing
	}
	return c
}

// Excluded says whether a block has an excluded address of the pool.
func (c Closer) Excluded(b *v2.AddressBlock) bool {
	return b.Name == BlockName(c.pool.Name, b.Index) && c.whole.Excluded(b.Index)
}

// Label returns the value of v2.LabelClosed that a block of the pool should have; empty if it should have no such label. Blocks that no node holds
// give no addresses anyhow.
func (c Closer) Label(b *v2.AddressBlock) string {
	switch {
	case b.Labels[v2.LabelNode] == "":
		return ""
	case c.pool.Spec.Drain:
		return v2.ClosedDrain
	case c.Excluded(b):
		return v2.ClosedExcluded
	}
	return ""
}

// excludedInUse returns the condition that names the blocks with excluded addresses, and false if nobody needs it.
func excludedInUse(p *v2.AddressPool, blocks []*v2.AddressBlock) (metav1.Condition, bool) {
	c := metav1.Condition{Type: v2.PoolExcludedInUse, Status: metav1.ConditionFalse, Reason: ReasonExcludedFree, Message: "No block has excluded addresses"}
	if len(blocks) > 0 {
		c.Status, c.Reason = metav1.ConditionTrue, ReasonExcludedHeld
		names := make([]string, len(blocks))
		for i, b := range blocks {
			names[i] = b.Name
		}
		slices.Sort(names)
		c.Message = fmt.Sprintf("Excluded addresses are in %s: %s", plan.Enumerate(names), whoHas(blocks))
	}
	return c, len(p.Spec.Exclude) > 0 || meta.FindStatusCondition(p.Status.Conditions, v2.PoolExcludedInUse) != nil
}

// Draining says, in the words of whoever is refused, that a pool gives nothing new.
func Draining(pool string) string {
	return fmt.Sprintf("AddressPool %s drains and gives nothing new (spec.drain)", pool)
}

// drained returns the condition that says what is left of a pool that drains.
func drained(blocks []*v2.AddressBlock) metav1.Condition {
	if len(blocks) == 0 {
		return metav1.Condition{Type: v2.PoolDrained, Status: metav1.ConditionTrue, Reason: ReasonNoBlocks, Message: "Nobody has anything of the pool any more: it can be deleted"}
	}
	return metav1.Condition{Type: v2.PoolDrained, Status: metav1.ConditionFalse, Reason: ReasonBlocksInUse, Message: whoHas(blocks)}
}

// whoHas says how much of some blocks is in use, and who has them.
func whoHas(blocks []*v2.AddressBlock) string {
	var allocated, cooling int
	nodes := map[string]bool{}
	for _, b := range blocks {
		allocated, cooling = allocated+int(b.Status.Allocated), cooling+int(b.Status.Cooling)
		if node := b.Labels[v2.LabelNode]; node != "" {
			nodes[node] = true
		}
	}
	text := strings.Join(holdersOf(blocks), "; ")
	if len(nodes) == 0 {
		return text
	}
	return fmt.Sprintf("%s on %s, and %d more cool down; %s", plan.Count(allocated, "address is in use", "addresses are in use"), plan.Count(len(nodes), "node", "nodes"), cooling, text)
}
