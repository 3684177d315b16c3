package pools

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
)

// Reasons of the conditions of an AddressPool.
const (
	// ReasonBlocksAvailable: Exhausted is False.
	ReasonBlocksAvailable = "BlocksAvailable"
	// ReasonAllBlocksTaken: Exhausted is True.
	ReasonAllBlocksTaken = "AllBlocksTaken"
	// ReasonNoOverlap: Overlapping is False.
	ReasonNoOverlap = "NoOverlap"
	// ReasonOverlap: Overlapping is True.
	ReasonOverlap = "AddressesUsedByOthers"
	// ReasonBlocksInUse: Terminating is True because nodes hold blocks.
	ReasonBlocksInUse = "BlocksInUse"
	// ReasonNoBlocks: Terminating is True, and nothing is in the way of the end.
	ReasonNoBlocks = "NoBlocks"
)

// Facts is all that the status of a pool depends on.
type Facts struct {
	Pool *v2.AddressPool
	// Blocks are those of the pool.
	Blocks []*v2.AddressBlock
	// LastIndex is the index carved last, nil if that isn't known better than by
	// the present status.
	LastIndex *int32
	// Overlapping is the condition that Overlapping returns.
	Overlapping metav1.Condition
	// Claims are those of the pool's blocks.
	Claims Claims
	// Now is the time of a transition.
	Now metav1.Time
}

// Status returns the status that a pool should have. It equals the present one
// when nothing has changed.
func Status(f Facts) v2.AddressPoolStatus {
	st := *f.Pool.Status.DeepCopy()
	st.ObservedGeneration = f.Pool.Generation
	if f.LastIndex != nil {
		st.LastIndex = new(*f.LastIndex)
	}
	set := func(c metav1.Condition) {
		c.ObservedGeneration = f.Pool.Generation
		c.LastTransitionTime = f.Now // kept as it was unless the status changes
		meta.SetStatusCondition(&st.Conditions, c)
	}

	var total, size, used int64
	p, err := Parse(f.Pool.Spec)
	if err == nil {
		total, size = p.Available(), int64(p.BlockSize())
	}
	closer := NewCloser(f.Pool)
	var excluded []*v2.AddressBlock
	st.Floating = v2.FloatingUsage{}
	for _, b := range f.Blocks {
		used += int64(b.Status.Allocated)
		if closer.Excluded(b) {
			excluded = append(excluded, b)
			total++ // it exists all the same
		}
		switch {
		case b.Floating == nil || !IsFloating(b):
		case b.Floating.ReleasedAt == nil:
			st.Floating.Used++
		default:
			st.Floating.Cooling++
		}
	}
	st.Blocks = usage(int64(len(f.Blocks)), total)
	st.Addresses = usage(used, total*size)

	set(exhausted(f.Pool, int64(len(f.Blocks)), total, err))
	set(f.Overlapping)
	suspended, _ := Suspended(f.Pool, f.Claims, f.Now.Time)
	if suspended.Status == metav1.ConditionTrue || meta.FindStatusCondition(st.Conditions, v2.PoolSuspended) != nil {
		set(suspended)
	}
	if c, ok := excludedInUse(f.Pool, excluded); ok {
		set(c)
	}
	if f.Pool.Spec.Drain {
		set(drained(f.Blocks))
	} else {
		meta.RemoveStatusCondition(&st.Conditions, v2.PoolDrained)
	}
	if f.Pool.DeletionTimestamp != nil {
		set(terminating(f.Blocks))
	} else {
		meta.RemoveStatusCondition(&st.Conditions, v2.PoolTerminating)
	}
	return st
}

func usage(used, total int64) v2.Usage {
	return v2.Usage{Used: used, Total: total, Summary: fmt.Sprintf("%d/%d", used, total)}
}

func exhausted(p *v2.AddressPool, used, total int64, invalid error) metav1.Condition {
	c := metav1.Condition{Type: v2.PoolExhausted}
	switch {
	case invalid != nil:
		c.Status, c.Reason = metav1.ConditionUnknown, v2.ReasonPoolInvalid
		c.Message = "No block can be carved: " + strings.ReplaceAll(invalid.Error(), "\n", "; ")
	case used >= total:
		c.Status, c.Reason = metav1.ConditionTrue, ReasonAllBlocksTaken
		c.Message = fmt.Sprintf("All %d blocks are taken: append a subnet to spec.subnets", total)
		if len(p.Spec.Exclude) > 0 {
			c.Message = fmt.Sprintf("All %d blocks are taken that spec.exclude leaves: append a subnet to spec.subnets", total)
		}
	case p.Spec.Drain:
		c.Status, c.Reason = metav1.ConditionFalse, ReasonBlocksAvailable
		c.Message = "Not all blocks are taken, but none is carved as long as spec.drain is set"
	default:
		c.Status, c.Reason = metav1.ConditionFalse, ReasonBlocksAvailable
		c.Message = "Blocks can be carved"
	}
	return c
}

func terminating(blocks []*v2.AddressBlock) metav1.Condition {
	if len(blocks) == 0 {
		return metav1.Condition{
			Type: v2.PoolTerminating, Status: metav1.ConditionTrue, Reason: ReasonNoBlocks,
			Message: "No block is left: the pool is about to go",
		}
	}
	return metav1.Condition{Type: v2.PoolTerminating, Status: metav1.ConditionTrue, Reason: ReasonBlocksInUse, Message: strings.Join(holdersOf(blocks), "; ")}
}

// holdersOf says who has blocks.
func holdersOf(blocks []*v2.AddressBlock) []string {
	var holders, owners []string
	reserved := 0
	for _, b := range blocks {
		if b.Floating != nil && IsFloating(b) {
			owner := b.Floating.Owner.Summary
			if b.Floating.ReleasedAt != nil {
				owner += " (cools down)"
			}
			owners = append(owners, owner)
			continue
		}
		node := b.Labels[v2.LabelNode]
		if node == "" {
			node = "(no node: " + b.Name + ")"
		}
		holders = append(holders, node)
		if b.Labels[v2.LabelReserved] == v2.ReservedValue {
			reserved++
		}
	}
	var left []string
	if n := len(holders); n > 0 {
		slices.Sort(holders)
		left = append(left, fmt.Sprintf("%s held by %s; a node gives a block back when no pod has an address of it",
			plan.Count(n, "block is", "blocks are"), plan.Enumerate(slices.Compact(holders))))
	}
	if reserved > 0 {
		left = append(left, plan.Count(reserved, "of them is", "of them are")+" reserved, which only an admin deletes")
	}
	if n := len(owners); n > 0 {
		slices.Sort(owners)
		left = append(left, fmt.Sprintf("%s to %s", plan.Count(n, "floating address belongs", "floating addresses belong"), plan.Enumerate(slices.Compact(owners))))
	}
	return left
}
