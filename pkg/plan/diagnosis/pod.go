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
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// PodFacts are what a walk about a pod knows.
type PodFacts struct {
	Facts
	Pod       *corev1.Pod
	Namespace *corev1.Namespace
	// Events are the texts of the latest warnings about the pod's network, the newest first.
	Events []string
}

// podWalk is a walk about a pod.
type podWalk struct {
	walk
	Pod       *corev1.Pod
	Namespace *corev1.Namespace
	Events    []string
	// poolName is the pool of new pods of the namespace; empty if it has none.
	poolName string
	// at is the pod's attachment; nil if there is none, or none is known.
	at *inspection.Attachment
}

// Pod walks through all that gives a pod its network.
func Pod(f PodFacts) Diagnosis {
	w := &podWalk{walk: walk{Facts: f.Facts}, Pod: f.Pod, Namespace: f.Namespace, Events: f.Events}
	d := Diagnosis{Subject: "Pod " + f.Pod.Namespace + "/" + f.Pod.Name}
	if w.pod() {
		w.at = w.attachment()
		if f.Pod.Spec.NodeName != "" {
			w.node(f.Pod.Spec.NodeName)
		}
		if f.Answer == nil && !f.NoPools || f.Answer != nil && f.Answer.Node.IPAM {
			w.assignment()
		} else {
			w.record()
		}
		w.kernel()
		w.egress()
		w.conntrack()
		w.address()
	}
	d.Steps = w.steps
	return d
}

// waiting says that the pod has no address yet.
func (w *podWalk) waiting() bool { return w.at == nil && len(w.Pod.Status.PodIPs) == 0 }

// pod judges the Pod, and says whether Coil has anything to do with it.
func (w *podWalk) pod() bool {
	p := w.Pod
	switch {
	case p.Spec.HostNetwork:
		w.right(StepPod, "the pod has the network of its node: Coil does nothing for it")
		return false
	case p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed:
		w.right(StepPod, "the pod has ended, and has given its address back")
		return false
	case p.Spec.NodeName == "":
		w.wrong(StepPod, fmt.Sprintf("see kubectl -n %s describe pod %s", p.Namespace, p.Name), "the pod isn't bound to a node: that is the scheduler's task")
	case p.DeletionTimestamp != nil && w.late(p.DeletionTimestamp.Time):
		w.wrong(StepPod, "see that the kubelet of its node runs, and what its finalizers wait for", "the pod is deleted, and hasn't ended in time")
	default:
		w.right(StepPod, "the pod is bound to node %s", p.Spec.NodeName)
	}
	return true
}

// attachment is the pod's in coild's record: the newest that is of its UID.
func (w *podWalk) attachment() *inspection.Attachment {
	if w.Answer == nil {
		return nil
	}
	var newest *inspection.Attachment
	for i, a := range w.Answer.Attachments {
		same := a.Namespace == w.Pod.Namespace && a.Pod == w.Pod.Name && (a.PodUID == "" || a.PodUID == plan.PodUID(w.Pod))
		if same && (newest == nil || a.Since.After(newest.Since)) {
			newest = &w.Answer.Attachments[i]
		}
	}
	return newest
}

// assignment walks from the namespace to the record.
func (w *podWalk) assignment() {
	w.namespace()
	w.poolStep()
	if w.Pod.Spec.NodeName == "" {
		return
	}
	w.requests(w.poolName, w.waiting())
	w.blockStep()
	w.record()
}

func (w *podWalk) namespace() {
	if w.unread(StepNamespace, KindNamespace) {
		return
	}
	name := w.Pod.Namespace
	if w.Namespace == nil {
		w.wrong(StepNamespace, "", "there is no Namespace %s", name)
		return
	}
	var err error
	switch w.poolName, err = plan.PoolOf(name, w.Namespace.Annotations); {
	case err != nil:
		w.wrong(StepNamespace, fmt.Sprintf("kubectl annotate namespace %s --overwrite %s=POOL", name, v2.AnnotationPool), "%v", err)
	case w.at != nil && w.at.Pool != w.poolName:
		w.right(StepNamespace, "new pods of the namespace get addresses of pool %s; this one got its address when that was %s", w.poolName, w.at.Pool)
		w.poolName = w.at.Pool
	case w.Namespace.Annotations[v2.AnnotationPool] == "":
		w.right(StepNamespace, "the namespace has no annotation %s: its pool is %s", v2.AnnotationPool, w.poolName)
	default:
		w.right(StepNamespace, "the annotation of the namespace names pool %s", w.poolName)
	}
}

func (w *podWalk) poolStep() {
	if w.unread(StepPool, KindPools) || w.poolName == "" {
		return
	}
	p := w.pool(w.poolName)
	if p == nil {
		w.wrong(StepPool, fmt.Sprintf("make it, or let the namespace use another one: kubectl annotate namespace %s --overwrite %s=POOL", w.Pod.Namespace, v2.AnnotationPool),
			"there is no AddressPool %s", w.poolName)
		return
	}
	var bad []metav1.Condition
	for _, kind := range []string{v2.PoolTerminating, v2.PoolSuspended, v2.PoolExhausted} {
		if c := meta.FindStatusCondition(p.Status.Conditions, kind); c != nil && c.Status == metav1.ConditionTrue {
			bad = append(bad, *c)
		}
	}
	switch {
	case p.Spec.Purpose == v2.PurposeFloating && w.waiting():
		w.wrong(StepPool, fmt.Sprintf("kubectl annotate namespace %s --overwrite %s=POOL", w.Pod.Namespace, v2.AnnotationPool),
			"AddressPool %s has no addresses for pods (spec.purpose is %s)", p.Name, p.Spec.Purpose)
	case len(bad) == 0 && p.DeletionTimestamp != nil && w.waiting():
		w.wrong(StepPool, "let the namespace use another pool", "AddressPool %s is deleted: it gives nothing new", p.Name)
	case len(bad) == 0:
		w.right(StepPool, "AddressPool %s has %s blocks in use", p.Name, p.Status.Blocks.Summary)
	case w.waiting() && !(bad[0].Type == v2.PoolExhausted && w.free(p.Name)):
		w.wrong(StepPool, doOfPool(bad[0].Type), "AddressPool %s gives no block: %s", p.Name, bad[0].Message)
	default:
		w.right(StepPool, "AddressPool %s gives no new block (%s), which this pod doesn't need", p.Name, bad[0].Reason)
	}
}

// doOfPool is what to do about a pool that gives nothing.
func doOfPool(condition string) string {
	switch condition {
	case v2.PoolExhausted:
		return "append a subnet to spec.subnets of the pool, or delete pods that use it"
	case v2.PoolSuspended:
		return "do what the message says"
	}
	return "let the namespace use another pool"
}

// free says whether a block of the node has an address of a pool left.
func (w *podWalk) free(pool string) bool {
	return w.Answer != nil && slices.ContainsFunc(w.Answer.Blocks, func(b inspection.Block) bool { return b.Pool == pool && b.Allocated < b.Size })
}

func (w *podWalk) blockStep() {
	if w.unread(StepBlock, KindBlocks) {
		return
	}
	node := w.Pod.Spec.NodeName
	if w.at == nil {
		addr, has := w.first()
		if !has {
			held := slices.ContainsFunc(w.Blocks, func(b *v2.AddressBlock) bool {
				return ofNode(b, node) && slices.Contains(pools.BlockPools(b), w.poolName)
			})
			if held {
				w.right(StepBlock, "the node has blocks of pool %s", w.poolName)
			} else {
				w.unknown(StepBlock, "", "the node has no block of pool %s yet", w.poolName)
			}
			return
		}
		i := slices.IndexFunc(w.Blocks, func(b *v2.AddressBlock) bool { return has && contains(b, addr) })
		if i < 0 {
			w.unknown(StepBlock, "", "no AddressBlock that was read has %s", addr)
			return
		}
		w.judgeBlock(w.Blocks[i], []netip.Addr{addr})
		return
	}
	var addrs []netip.Addr
	for _, text := range w.at.Addresses {
		if a, err := netip.ParseAddr(text); err == nil {
			addrs = append(addrs, a)
		}
	}
	b := w.block(w.at.Block)
	if b == nil {
		w.wrong(StepBlock, "see the Events of the Node and of the pool: coild claims a block that its pods use",
			"the pod has an address of AddressBlock %s, which doesn't exist", w.at.Block)
		return
	}
	w.judgeBlock(b, addrs)
}

// judgeBlock judges the block of the pod's addresses.
func (w *podWalk) judgeBlock(b *v2.AddressBlock, addrs []netip.Addr) {
	node := w.Pod.Spec.NodeName
	holder := b.Labels[v2.LabelNode]
	switch missing := slices.IndexFunc(addrs, func(a netip.Addr) bool { return !contains(b, a) }); {
	case holder == "":
		w.wrong(StepBlock, fmt.Sprintf("kubectl label addressblock %s %s=%s, if no other node has it", b.Name, v2.LabelNode, node), "AddressBlock %s of the pod's address is no node's", b.Name)
	case holder != node:
		w.wrong(StepBlock, fmt.Sprintf("delete the pod, so that it gets an address of its own node: kubectl -n %s delete pod %s", w.Pod.Namespace, w.Pod.Name),
			"AddressBlock %s of the pod's address is of node %s, and the pod is on %s: others send its packets there", b.Name, holder, node)
	case missing >= 0:
		w.wrong(StepBlock, fmt.Sprintf("delete the pod: kubectl -n %s delete pod %s", w.Pod.Namespace, w.Pod.Name), "AddressBlock %s hasn't %s", b.Name, addrs[missing])
	case w.Node != nil && b.Annotations[v2.AnnotationNodeUID] != "" && b.Annotations[v2.AnnotationNodeUID] != string(w.Node.UID):
		w.wrong(StepBlock, "see the Events of the Node; coild adopts a block that its pods use", "AddressBlock %s is of an earlier Node of the name %s", b.Name, node)
	default:
		w.right(StepBlock, "AddressBlock %s is the node's", b.Name)
	}
}

// contains says whether a block has an address.
func contains(b *v2.AddressBlock, a netip.Addr) bool {
	block, err := ipam.ParseBlock(b.IPv4, b.IPv6)
	if err != nil {
		return false
	}
	_, has := block.Offset(a)
	return has
}

// first is the first address that kubelet tells.
func (w *podWalk) first() (netip.Addr, bool) {
	if len(w.Pod.Status.PodIPs) == 0 {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(w.Pod.Status.PodIPs[0].IP)
	return a, err == nil
}

func (w *podWalk) record() {
	a := w.answer(StepRecord)
	if a == nil {
		return
	}
	again := fmt.Sprintf("delete the pod, so that it is made anew: kubectl -n %s delete pod %s", w.Pod.Namespace, w.Pod.Name)
	switch cause := w.firstWrong(); {
	case w.at == nil && len(w.Pod.Status.PodIPs) > 0 && !a.Node.IPAM:
		w.unattended(again)
	case w.at == nil && len(w.Pod.Status.PodIPs) > 0:
		w.wrong(StepRecord, again, "kubelet says that the pod has an address, and coild's record doesn't know the pod")
	case w.at == nil && cause != "":
		w.unknown(StepRecord, "", "the pod has no address yet: first put the %s right%s", cause, w.lastEvent())
	case w.at == nil && len(w.Events) > 0:
		w.wrong(StepRecord, "do what the message says; kubelet tries again by itself", "the pod has no address%s", w.lastEvent())
	case w.at == nil && w.late(w.Pod.CreationTimestamp.Time):
		w.wrong(StepRecord, fmt.Sprintf("see kubectl -n %s describe pod %s, and the logs of kubelet and of the container runtime of the node", w.Pod.Namespace, w.Pod.Name),
			"the pod has no address, and nobody has asked coild for one")
	case w.at == nil:
		w.unknown(StepRecord, "look again in a moment", "the pod has no address yet")
	case w.at.NetnsGone:
		w.wrong(StepRecord, again, "the network namespace %s, for which the address is recorded, is gone", w.at.Netns)
	case w.at.State == "":
		w.right(StepRecord, "coild knows the pod, and another plugin has given it %s", strings.Join(w.at.Addresses, ", "))
	case w.at.State != "attached" && w.late(w.at.Since):
		w.wrong(StepRecord, "see the log of coild", "%s is %s in the record for too long", strings.Join(w.at.Addresses, ", "), w.at.State)
	case w.at.State != "attached":
		w.unknown(StepRecord, "look again in a moment", "%s is %s in the record", strings.Join(w.at.Addresses, ", "), w.at.State)
	default:
		w.right(StepRecord, "%s of block %s recorded for the pod's interface %s", strings.Join(w.at.Addresses, ", "), w.at.Block, w.at.IfName)
	}
}

// unattended judges a pod with the addresses of another plugin, of which coild wasn't told, since the pod is older than that: only Egresses need coild.
func (w *podWalk) unattended(again string) {
	uses, trouble := w.uses()
	_, router := plan.RouterOf(w.Pod.Labels)
	switch {
	case w.unread(StepRecord, KindPolicies, KindClusterPolicies, KindNamespace):
	case len(uses) > 0 || trouble != nil || router:
		w.wrong(StepRecord, again, "another plugin has given the pod its addresses, and coild wasn't told: the pod is older than coil in the network configuration of the node")
	default:
		w.right(StepRecord, "another plugin has given the pod its addresses; coild wasn't told, and has nothing to do for the pod")
	}
}

// lastEvent is the newest warning, for the end of a sentence.
func (w *podWalk) lastEvent() string {
	if len(w.Events) == 0 {
		return ""
	}
	return "; kubelet's last word: " + w.Events[0]
}

// kernel walks through what is in the kernel.
func (w *podWalk) kernel() {
	if w.at == nil || w.Answer == nil || w.at.State != "attached" || w.at.NetnsGone {
		return
	}
	a, objects := w.Answer, w.at.Objects
	inside := of(objects, inspection.Inside)
	w.compare(StepVeth, "both ends of the link are as coild made them",
		repaired(a.Node.Name, "a network manager must leave veth* alone"), of(objects, inspection.Veth))
	if !w.faulty(StepVeth) && len(inspection.Wrong(inside)) > 0 {
		w.steps = w.steps[:len(w.steps)-1]
		w.compare(StepVeth, "", fmt.Sprintf("coild changes nothing in a running pod: look for a container that does, or delete the pod: kubectl -n %s delete pod %s", w.Pod.Namespace, w.Pod.Name), inside)
	}
	w.rules(a)
	w.routes(a, objects)
	w.guard(a, objects)
	w.sysctls(a, objects)
	w.export(a)
}

// routes judges the routes to the pod. Without its link it has none.
func (w *podWalk) routes(a *inspection.Answer, objects []inspection.Comparison) {
	table, ways := of(objects, inspection.Routes), of(objects, inspection.Ways)
	do := repaired(a.Node.Name, "systemd-networkd deletes routes unless networkd.conf says ManageForeignRoutes=no")
	switch wrong := inspection.Wrong(table); {
	case len(wrong) > 0 && w.faulty(StepVeth):
		w.unknown(StepRoutes, "", "routes come back with the link: %s", shown(wrong))
	case len(wrong) == 0 && w.faulty(StepRules, StepVeth):
		w.right(StepRoutes, "the table of pods has the routes")
	case len(wrong) == 0 && len(inspection.Wrong(ways)) > 0:
		w.compare(StepRoutes, "", "find the rule or the route of another program that comes before coild's: ip rule; ip route get ADDRESS", ways)
	default:
		w.compare(StepRoutes, "the table of pods has the routes, and the kernel follows them", do, table)
	}
}

// address compares what kubelet tells with the record.
func (w *podWalk) address() {
	var told []string
	for _, ip := range w.Pod.Status.PodIPs {
		told = append(told, ip.IP)
	}
	switch {
	case len(told) == 0 && w.at == nil:
		w.unknown(StepAddress, "", "the pod has no address")
	case len(told) == 0 && w.late(w.at.Since):
		w.wrong(StepAddress, "see the log of kubelet on the node", "kubelet doesn't tell that the pod has %s", strings.Join(w.at.Addresses, ", "))
	case len(told) == 0:
		w.unknown(StepAddress, "look again in a moment", "kubelet doesn't tell yet that the pod has %s", strings.Join(w.at.Addresses, ", "))
	case w.at == nil && w.Answer != nil && !w.Answer.Node.IPAM:
		w.right(StepAddress, "kubelet tells %s, of another plugin", strings.Join(told, ", "))
	case w.at == nil:
		w.unknown(StepAddress, "", "kubelet tells %s, and it isn't known what coild has recorded", strings.Join(told, ", "))
	case slices.ContainsFunc(told, func(a string) bool { return !slices.Contains(w.at.Addresses, a) }):
		w.wrong(StepAddress, fmt.Sprintf("delete the pod: kubectl -n %s delete pod %s", w.Pod.Namespace, w.Pod.Name), "kubelet tells %s, and the record has %s",
			strings.Join(told, ", "), strings.Join(w.at.Addresses, ", "))
	default:
		w.right(StepAddress, "kubelet tells %s", strings.Join(told, ", "))
	}
}
