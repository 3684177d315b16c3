// Package claims derives which floating addresses each AddressClaim is to have, and when those that it has released are free.
//
// It owns the choice: addresses stay as long as the claim asks for them, come back to the claim that had them last, and the youngest
// one goes first. It must not know which other blocks are free, nor what addresses are for.
package claims

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// Facts are all that a decision depends on.
type Facts struct {
	Claim *v2.AddressClaim
	// Pool has the blocks that can be had. The zero Pool has none.
	Pool ipam.Pool
	// Blocks are those of the claim, also of one of its name before, in whatever state.
	Blocks []*v2.AddressBlock
}

// Decision is what to do for a claim.
type Decision struct {
	// Keep are the blocks that it has and keeps, in the order of its status.
	Keep []*v2.AddressBlock
	// Retake are blocks that cool down, and that it gets again.
	Retake []*v2.AddressBlock
	// Release are blocks that it is to have no longer, and that cool down from now on.
	Release []*v2.AddressBlock
	// Carve are the indexes of blocks to be made, in order, and Any the number of those with whatever index beside them.
	Carve []int32
	Any   int
	// Order are the indexes that it is to have in the order of its list. Empty if it has a count.
	Order []int32
	// Problems say which entries of its list can't be had.
	Problems []Problem
}

// Done says that there is nothing to do.
func (d Decision) Done() bool {
	return len(d.Retake)+len(d.Release)+len(d.Carve)+d.Any == 0
}

// Decide says which blocks a claim keeps, gets and gives up.
func Decide(f Facts) Decision {
	var d Decision
	told := map[string]int{} // position in the status, by name
	for i, a := range f.Claim.Status.Addresses {
		told[a.Block] = i
	}
	var have, cooling []*v2.AddressBlock
	for _, b := range f.Blocks {
		switch {
		case b.DeletionTimestamp != nil: // an admin's wish: it goes
		case !f.has(b): // of another pool that the claim's name had before
			if b.Floating.ReleasedAt == nil {
				d.Release = append(d.Release, b)
			}
		case b.Floating.ReleasedAt == nil:
			have = append(have, b)
		case f.Pool.Excluded(b.Index): // nobody gets it again
		default:
			cooling = append(cooling, b)
		}
	}
	place := func(b *v2.AddressBlock) int {
		if i, ok := told[b.Name]; ok {
			return i
		}
		return len(told)
	}
	// The cache has them in any order.
	oldest := func(a, b *v2.AddressBlock) int {
		return cmp.Or(cmp.Compare(place(a), place(b)), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Index, b.Index))
	}
	slices.SortFunc(have, oldest)
	slices.SortFunc(cooling, oldest)

	if f.Claim.Spec.Count == nil {
		d.listed(f, have, cooling)
	} else {
		d.counted(f, int(*f.Claim.Spec.Count), have, cooling)
	}
	return d
}

// has says whether a block is one of the pool as it is now.
func (f Facts) has(b *v2.AddressBlock) bool {
	if b.Name != pools.BlockName(f.Claim.Spec.Pool, b.Index) {
		return false
	}
	want, err := f.Pool.Block(b.Index)
	have, e := ipam.ParseBlock(b.IPv4, b.IPv6)
	return err == nil && e == nil && have == want
}

// listed decides for a claim that lists its addresses.
func (d *Decision) listed(f Facts, have, cooling []*v2.AddressBlock) {
	d.Order, d.Problems = Indexes(f.Claim.Spec.Addresses, f.Pool)
	missing := map[int32]bool{}
	for _, i := range d.Order {
		missing[i] = true
	}
	for _, b := range have {
		if missing[b.Index] {
			d.Keep = append(d.Keep, b)
			delete(missing, b.Index)
		} else {
			d.Release = append(d.Release, b)
		}
	}
	for _, b := range cooling {
		if missing[b.Index] {
			d.Retake = append(d.Retake, b)
			delete(missing, b.Index)
		}
	}
	for _, i := range d.Order {
		if missing[i] {
			d.Carve = append(d.Carve, i)
		}
	}
}

// counted decides for a claim of any n addresses.
func (d *Decision) counted(f Facts, n int, have, cooling []*v2.AddressBlock) {
	d.Keep = have[:min(n, len(have))]
	d.Release = append(d.Release, have[len(d.Keep):]...)
	n -= len(d.Keep)
	d.Retake = cooling[:min(n, len(cooling))]
	n -= len(d.Retake)
	// Its status remembers blocks that were lost, as after etcd was restored from a backup.
	for _, a := range Lost(f.Claim, f.Blocks) {
		if index, ok := f.indexOf(a); ok && n > 0 {
			d.Carve = append(d.Carve, index)
			n--
		}
	}
	d.Any = n
}

// indexOf returns the index of the block of an entry of the status, if the pool still has this block.
func (f Facts) indexOf(a v2.ClaimedAddress) (int32, bool) {
	pool, index, ok := pools.SplitBlockName(a.Block)
	if !ok || pool != f.Claim.Spec.Pool {
		return 0, false
	}
	b, err := f.Pool.Block(index)
	return index, err == nil && address(a.Block, b) == a && !f.Pool.Excluded(index)
}

// address is the entry of a block of one address in the status of a claim.
func address(name string, b ipam.Block) v2.ClaimedAddress {
	a := v2.ClaimedAddress{Block: name}
	if b.IPv4.IsValid() {
		a.IPv4 = b.IPv4.Addr().String()
	}
	if b.IPv6.IsValid() {
		a.IPv6 = b.IPv6.Addr().String()
	}
	return a
}

// Lost returns the entries of a claim's status whose blocks don't exist any more: etcd was restored from a backup that is older than they are.
func Lost(claim *v2.AddressClaim, blocks []*v2.AddressBlock) []v2.ClaimedAddress {
	return slices.DeleteFunc(slices.Clone(claim.Status.Addresses), func(a v2.ClaimedAddress) bool {
		return slices.ContainsFunc(blocks, func(b *v2.AddressBlock) bool { return b.Name == a.Block })
	})
}

// Status returns the status of a claim that has blocks and problems. It equals the present one when nothing has changed. lost are addresses
// that the claim is to get back.
func Status(claim *v2.AddressClaim, d Decision, has []*v2.AddressBlock, lost []v2.ClaimedAddress, problems []Problem, now metav1.Time) v2.AddressClaimStatus {
	st := *claim.Status.DeepCopy()
	st.ObservedGeneration = claim.Generation
	st.Addresses = nil
	for _, b := range has {
		block, err := ipam.ParseBlock(b.IPv4, b.IPv6)
		if err != nil {
			problems = append(problems, problemf(v2.ReasonPoolInvalid, "AddressBlock %s can't be understood: %v", b.Name, err))
			continue
		}
		st.Addresses = append(st.Addresses, address(b.Name, block))
	}
	st.Addresses = ordered(append(st.Addresses, lost...), d, claim)
	wanted := max(len(d.Order)+len(d.Problems), len(claim.Spec.Addresses))
	if claim.Spec.Count != nil {
		wanted = int(*claim.Spec.Count)
	}
	st.Summary = fmt.Sprintf("%d/%d", len(st.Addresses), wanted)
	c := metav1.Condition{
		Type: v2.ClaimReady, Status: metav1.ConditionTrue, Reason: v2.ReasonAddressesHeld, Message: "The claim has all addresses",
		ObservedGeneration: claim.Generation, LastTransitionTime: now, // kept as it was unless the status changes
	}
	if len(problems) > 0 {
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, problems[0].Reason, messages(problems)
	}
	meta.SetStatusCondition(&st.Conditions, c)
	return st
}

// ordered returns addresses in the order of the claim's list or, if that isn't known, as they were, new ones last.
func ordered(addresses []v2.ClaimedAddress, d Decision, claim *v2.AddressClaim) []v2.ClaimedAddress {
	place := map[string]int{}
	for i, a := range claim.Status.Addresses {
		place[a.Block] = i - len(claim.Status.Addresses)
	}
	if len(d.Order) > 0 {
		clear(place)
	}
	for i, index := range d.Order {
		place[pools.BlockName(claim.Spec.Pool, index)] = i - len(d.Order)
	}
	slices.SortStableFunc(addresses, func(a, b v2.ClaimedAddress) int { return cmp.Compare(place[a.Block], place[b.Block]) })
	return addresses
}

// MaxMessages bounds how many problems the message of a condition tells; the others are counted.
const MaxMessages = 10

func messages(problems []Problem) string {
	text, more := "", ""
	if len(problems) > MaxMessages {
		problems, more = problems[:MaxMessages], fmt.Sprintf("; and %d more", len(problems)-MaxMessages)
	}
	for i, p := range problems {
		if i > 0 {
			text += "; "
		}
		text += p.Message
	}
	return text + more
}

// Owner returns the object that the addresses of a claim belong to: its controller, or the claim itself.
func Owner(c *v2.AddressClaim) v2.FloatingOwner {
	o := v2.FloatingOwner{Kind: "AddressClaim", Namespace: c.Namespace, Name: c.Name, UID: c.UID}
	if r := metav1.GetControllerOf(c); r != nil {
		o.Kind, o.Name, o.UID = r.Kind, r.Name, r.UID
	}
	o.Summary = fmt.Sprintf("%s %s/%s", o.Kind, o.Namespace, o.Name)
	return o
}

// Key names the claim that a floating block is of, as namespace/name. Empty if the block is no floating one.
func Key(b *v2.AddressBlock) string {
	if b.Floating == nil || !pools.IsFloating(b) {
		return ""
	}
	return b.Floating.Owner.Namespace + "/" + b.Floating.Claim
}

// ownWait is the least time that a process waits by its own clock: the note in a block may be by another machine's.
const ownWait = 10 * time.Minute

// Release is what a process knows of a block's release.
type Release struct {
	// Seen is since when it has seen the block released.
	Seen time.Time
	// Fresh says that it had seen the block before.
	Fresh bool
}

// Cooling returns for how long a released block is still given to nobody else. A process that has seen the release counts from there, by its
// own clock. Another process counts from the note in the block. It waits for ten minutes at least, or for the whole cool-down if that is
// shorter, and for the whole cool-down at most.
func Cooling(b *v2.AddressBlock, r Release, now time.Time) time.Duration {
	period := time.Duration(b.Floating.CoolDownSeconds) * time.Second
	own := period - now.Sub(r.Seen)
	if r.Fresh {
		return max(0, own)
	}
	note := b.Floating.ReleasedAt.Add(period + time.Second).Sub(now) // it has no fractions of a second
	return max(0, min(note, own), min(period, ownWait)-now.Sub(r.Seen))
}

// Floating is what a block of a claim says of it.
func Floating(c *v2.AddressClaim) v2.Floating {
	return v2.Floating{Owner: Owner(c), Claim: c.Name, CoolDownSeconds: c.Spec.CoolDownSeconds}
}

// Outdated says whether a block of a claim says something else of it, or lacks a label by which programs of all versions know what it is.
func Outdated(b *v2.AddressBlock, c *v2.AddressClaim) bool {
	want := Floating(c)
	return b.Floating == nil || b.Floating.Owner != want.Owner || b.Floating.Claim != want.Claim || b.Floating.CoolDownSeconds != want.CoolDownSeconds ||
		b.Floating.ReleasedAt != nil || len(missingLabels(b)) > 0
}

// Taken is the JSON merge patch after which a block isn't outdated.
func Taken(b *v2.AddressBlock, c *v2.AddressClaim) map[string]any {
	f := Floating(c)
	floating := map[string]any{"owner": f.Owner, "claim": f.Claim, "coolDownSeconds": f.CoolDownSeconds, "releasedAt": nil}
	if b.Floating != nil && b.Floating.Owner.UID != f.Owner.UID {
		floating["successors"], floating["movingTo"] = nil, nil // where the former owner wanted it
	}
	patch := map[string]any{"floating": floating}
	if missing := missingLabels(b); len(missing) > 0 {
		patch["metadata"] = map[string]any{"labels": missing}
	}
	return patch
}

// missingLabels are those that a floating block must have, and hasn't.
func missingLabels(b *v2.AddressBlock) map[string]string {
	pool, _, _ := pools.SplitBlockName(b.Name)
	want := map[string]string{v2.LabelPool: pool, v2.LabelReserved: v2.ReservedValue, v2.LabelFloating: v2.FloatingValue}
	maps.DeleteFunc(want, func(k, v string) bool { return b.Labels[k] == v })
	return want
}
