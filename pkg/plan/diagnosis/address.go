package diagnosis

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// BlockOf returns the block that has an address, nil if none has.
func BlockOf(all []*v2.AddressBlock, a netip.Addr) *v2.AddressBlock {
	if i := slices.IndexFunc(all, func(b *v2.AddressBlock) bool { return contains(b, a) }); i >= 0 {
		return all[i]
	}
	return nil
}

// PoolOf returns the pool that has an address, nil if none has.
func PoolOf(all []*v2.AddressPool, a netip.Addr) *v2.AddressPool {
	for _, p := range all {
		if slices.ContainsFunc(pools.Prefixes(p), func(r netip.Prefix) bool { return r.Contains(a) }) {
			return p
		}
	}
	return nil
}

// BehindFloatingIP returns the claim with a as floating IP of OpenStack, and the address to which that leads; nil if no claim has it.
func BehindFloatingIP(claims []*v2.AddressClaim, a netip.Addr) (*v2.AddressClaim, netip.Addr) {
	for _, c := range claims {
		if p := c.Status.Provided; p != nil && p.FloatingIP == a.String() {
			if inner, err := netip.ParseAddr(p.IPv4); err == nil {
				return c, inner
			}
		}
	}
	return nil, a
}

// Address walks from an address to who has it.
func Address(a netip.Addr, f Facts) Diagnosis {
	w := &walk{Facts: f}
	d := Diagnosis{Subject: "Address " + a.String()}
	if c := f.FloatingIP; c != nil {
		_, inner := BehindFloatingIP([]*v2.AddressClaim{c}, a)
		w.right(StepOpenStack, "%s is the floating IP of port %s: it leads to %s of AddressClaim %s/%s", a, c.Status.Provided.PortID, inner, c.Namespace, c.Name)
		a = inner
	}
	if w.poolOf(a) {
		if b := w.blockOf(a); b != nil && b.Labels[v2.LabelNode] != "" {
			w.node(b.Labels[v2.LabelNode])
			w.holder(a)
		}
		w.servicesAt()
	}
	d.Steps = w.steps
	return d
}

// poolOf judges the pool of an address, and says whether there is one.
func (w *walk) poolOf(a netip.Addr) bool {
	if w.unread(StepPool, KindPools) {
		return true
	}
	if p := PoolOf(w.Pools, a); p != nil {
		w.right(StepPool, "AddressPool %s has %s", p.Name, a)
		return true
	}
	if w.unread(StepOpenStack, KindClaims) {
		return false // it may be a floating IP
	}
	w.wrong(StepPool, "if it is to be an address of pods, append its subnet to an AddressPool", "no AddressPool has %s, and no AddressClaim has it as floating IP: Coil gives it to nobody", a)
	return false
}

// blockOf judges the block of an address.
func (w *walk) blockOf(a netip.Addr) *v2.AddressBlock {
	if w.unread(StepBlock, KindBlocks) {
		return nil
	}
	b := BlockOf(w.Blocks, a)
	var having []string
	for _, b := range w.Blocks {
		if contains(b, a) {
			having = append(having, b.Name)
		}
	}
	switch {
	case len(having) > 1:
		slices.Sort(having)
		w.wrong(StepBlock, "AddressPools overlap: their conditions say which; coilctl pools drain moves the pods of one of them", "AddressBlocks %s have it: it may be given twice", plan.Enumerate(having))
	case b == nil:
		w.right(StepBlock, "no AddressBlock has %s: nobody has the address", a)
	case pools.IsFloating(b):
		w.floatingBlock(b)
	case b.Labels[v2.LabelNode] == "":
		w.wrong(StepBlock, fmt.Sprintf("delete it if no node has it: kubectl delete addressblock %s", b.Name), "AddressBlock %s is no node's", b.Name)
	default:
		w.right(StepBlock, "AddressBlock %s of node %s has it", b.Name, b.Labels[v2.LabelNode])
	}
	return b
}

// floatingBlock judges a floating address.
func (w *walk) floatingBlock(b *v2.AddressBlock) {
	for _, kind := range []string{v2.BlockConflicting, v2.BlockForwardingBlocked} {
		if c := meta.FindStatusCondition(b.Status.Conditions, kind); c != nil && c.Status == metav1.ConditionTrue {
			w.wrong(StepBlock, "do what the message says", "floating address %s: %s", b.Name, c.Message)
			return
		}
	}
	switch f := b.Floating; {
	case f == nil:
		w.wrong(StepBlock, "", "AddressBlock %s has the label of a floating address, and isn't one", b.Name)
	case loadbalancer.OfGateways(b):
		w.right(StepBlock, "floating address %s of %s %s/%s is at gateways", b.Name, f.Owner.Kind, f.Owner.Namespace, f.Owner.Name)
	case f.Holding.Holder == "":
		w.unknown(StepBlock, "see the status of its owner", "floating address %s of %s %s/%s is at no node", b.Name, f.Owner.Kind, f.Owner.Namespace, f.Owner.Name)
	default:
		w.right(StepBlock, "floating address %s of %s %s/%s is at node %s", b.Name, f.Owner.Kind, f.Owner.Namespace, f.Owner.Name, f.Holding.Holder)
	}
}

// ServicesAt are the Services that are reached by the address of a block, as namespace/name, each once.
func ServicesAt(b *v2.AddressBlock) (all []string) {
	if b == nil || b.Floating == nil || b.Floating.ReleasedAt != nil {
		return nil
	}
	for _, p := range b.Floating.Ports {
		if p.Service != "" && !slices.Contains(all, p.Service) {
			all = append(all, p.Service)
		}
	}
	return all
}

// servicesAt judges the Services that are reached by the address, each in a step.
func (w *walk) servicesAt() {
	for _, d := range w.Services {
		see := "see coilctl why service " + strings.TrimPrefix(d.Subject, "Service ")
		switch wrong := d.Wrong(); {
		case len(wrong) > 0:
			i := slices.IndexFunc(d.Steps, func(s Step) bool { return s.State == Wrong })
			w.wrong(StepService, see, "%s is reached by it; its %s isn't right: %s", d.Subject, plan.Enumerate(wrong), d.Steps[i].Seen)
		case slices.ContainsFunc(d.Steps, func(s Step) bool { return s.State == Unknown }):
			w.unknown(StepService, see, "%s is reached by it; not all is known of it", d.Subject)
		default:
			w.right(StepService, "%s is reached by it, and nothing is wrong with it", d.Subject)
		}
	}
}

// holder judges what the node of the address has for it.
func (w *walk) holder(a netip.Addr) {
	answer := w.answer(StepRecord)
	if answer == nil {
		return
	}
	var pods []string
	for _, at := range answer.Attachments {
		pods = append(pods, at.Namespace+"/"+at.Pod)
	}
	switch len(pods) {
	case 0:
		w.right(StepRecord, "no pod has %s: it is free, or cools down", a)
		return
	case 1:
	default:
		w.wrong(StepRecord, "delete all of these pods but one", "several pods have %s: %s", a, strings.Join(pods, ", "))
		return
	}
	at := &answer.Attachments[0]
	p := &podWalk{walk: *w, Pod: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: at.Namespace, Name: at.Pod}}, at: at}
	p.recordOf(a)
	p.kernel()
	*w = p.walk
}

// recordOf says which pod has an address.
func (w *podWalk) recordOf(a netip.Addr) {
	if w.at.NetnsGone {
		w.wrong(StepRecord, "wait until coild has looked twice (--sweep-interval), or see its log", "pod %s/%s has %s in the record, and its network namespace is gone", w.at.Namespace, w.at.Pod, a)
		return
	}
	w.right(StepRecord, "pod %s/%s has %s, %s since %s", w.at.Namespace, w.at.Pod, a, w.at.State, w.at.Since.UTC().Format("2006-01-02 15:04:05 MST"))
}
