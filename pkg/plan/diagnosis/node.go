package diagnosis

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// Node walks through what the pods of a node depend on.
func Node(name string, f Facts) Diagnosis {
	w := &walk{Facts: f}
	w.node(name)
	w.requests("", true)
	w.blocksOfNode()
	if a := w.answer(StepRecord); a != nil {
		w.recordsOfNode(a)
		w.host(a)
	}
	return Diagnosis{Subject: "Node " + name, Steps: w.steps}
}

// repaired is what to do about what coild restores by itself.
func repaired(node, more string) string {
	return fmt.Sprintf("coild restores it, mostly within a second; if it stays or comes back, see the Events of the Node (kubectl describe node %s) and coild's log: %s", node, more)
}

// node judges the Node and its coild.
func (w *walk) node(name string) {
	if w.unread(StepNode, KindNode) {
		return
	}
	see := fmt.Sprintf("see kubectl describe node %s", name)
	if w.Node == nil {
		w.wrong(StepNode, "start the kubelet of the node, or delete its pods", "there is no Node %s", name)
		return
	}
	ready := slices.IndexFunc(w.Node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady })
	if ready >= 0 && w.Node.Status.Conditions[ready].Status != corev1.ConditionTrue {
		w.wrong(StepNode, see, "the Node %s isn't ready: %s", name, w.Node.Status.Conditions[ready].Message)
		return
	}
	if w.unread(StepNode, KindCoilds) {
		return
	}
	switch i := slices.IndexFunc(w.Coilds, plan.Ready); {
	case len(w.Coilds) == 0:
		w.wrong(StepNode, "see kubectl -n kube-system describe daemonset coild: it may not tolerate a taint of the node", "no pod of coild is on the node %s", name)
	case w.Answer != nil && w.Answer.Node.NotReady != "":
		w.wrong(StepNode, "see When ADD is served on the page of coild", "coild of the node %s isn't ready: %s", name, w.Answer.Node.NotReady)
	case i < 0:
		c := w.Coilds[0]
		w.wrong(StepNode, fmt.Sprintf("see kubectl -n %s logs %s", c.Namespace, c.Name), "coild of the node %s isn't ready", name)
	default:
		w.right(StepNode, "the Node %s and its coild are ready", name)
	}
}

// answer is coild's; nil, with a step that says so, if there is none.
func (w *walk) answer(step string) *inspection.Answer {
	switch {
	case w.Answer != nil:
		return w.Answer
	case w.faulty(StepNode):
		w.unknown(step, "", "coild doesn't say what it has recorded and what is in the kernel, as long as the node isn't right")
	case w.Unanswered != "":
		w.unknown(step, "run it again with the right to make pods/exec in the namespace of coild", "coild doesn't say what it has recorded and what is in the kernel: %s", w.Unanswered)
	default:
		w.unknown(step, "", "no coild was asked what it has recorded and what is in the kernel")
	}
	return nil
}

// requests judges the node's BlockRequests for a pool, or for all. Without waiting nobody needs a block now.
func (w *walk) requests(pool string, waiting bool) {
	if w.unread(StepRequest, KindRequests) {
		return
	}
	asked := 0
	for _, r := range w.Requests {
		if pool != "" && r.Spec.PoolName != pool {
			continue
		}
		asked++
		failed := slices.IndexFunc(r.Status.Conditions, func(c v2.BlockRequestCondition) bool {
			return c.Type == v2.BlockRequestFailed && c.Status == corev1.ConditionTrue
		})
		answered := r.Status.AddressBlockName != "" || failed >= 0
		switch {
		case failed >= 0 && waiting && w.faulty(StepPool):
			w.unknown(StepRequest, "", "BlockRequest %s failed because of the pool", r.Name)
			return
		case failed >= 0 && waiting:
			c := r.Status.Conditions[failed]
			w.wrong(StepRequest, "do what the message says; coild asks again by itself", "BlockRequest %s for pool %s failed (%s): %s", r.Name, r.Spec.PoolName, c.Reason, c.Message)
			return
		case !answered && w.late(r.CreationTimestamp.Time):
			w.wrong(StepRequest, "see that one runs and leads: kubectl -n kube-system get pods -l app.kubernetes.io/component=coil-ipam-controller",
				"no coil-ipam-controller has answered BlockRequest %s for pool %s", r.Name, r.Spec.PoolName)
			return
		case !answered && waiting:
			w.unknown(StepRequest, "look again in a moment", "BlockRequest %s for pool %s isn't answered yet", r.Name, r.Spec.PoolName)
			return
		}
	}
	if asked == 0 {
		w.right(StepRequest, "the node asks for no block")
	} else {
		w.right(StepRequest, "%s", plan.Count(asked, "BlockRequest doesn't hold anything up", "BlockRequests don't hold anything up"))
	}
}

// blocksOfNode judges the node's blocks.
func (w *walk) blocksOfNode() {
	if w.unread(StepBlock, KindBlocks) || w.Node == nil {
		return
	}
	for _, b := range w.Blocks {
		if uid := b.Annotations[v2.AnnotationNodeUID]; uid != "" && uid != string(w.Node.UID) && w.late(b.CreationTimestamp.Time) {
			w.wrong(StepBlock, "see the Events of the Node; coild adopts a block that its pods use", "AddressBlock %s is of an earlier Node of this name", b.Name)
			return
		}
	}
	w.right(StepBlock, "%s", plan.Count(len(w.Blocks), "AddressBlock is the node's", "AddressBlocks are the node's"))
}

// recordsOfNode judges the record, and what pods have in the kernel.
func (w *walk) recordsOfNode(a *inspection.Answer) {
	var bad []inspection.Comparison
	var pods []string
	for _, at := range a.Attachments {
		switch {
		case at.NetnsGone:
			pods = append(pods, fmt.Sprintf("%s/%s (its network namespace is gone)", at.Namespace, at.Pod))
		case len(inspection.Wrong(at.Objects)) > 0:
			bad = append(bad, at.Objects...)
			pods = append(pods, at.Namespace+"/"+at.Pod)
		}
	}
	switch {
	case len(pods) > 0:
		w.wrong(StepRecord, "see coilctl why pod of each", "%s: %s", plan.Enumerate(pods), shown(bad))
	case len(a.Problems) > 0:
		w.unknown(StepRecord, "ask again", "%s", plan.Enumerate(a.Problems))
	default:
		w.right(StepRecord, "%s in the record of addresses, and in the kernel", plan.Count(len(a.Attachments), "pod is", "pods are"))
	}
}

// host judges what the pods of a node share.
func (w *walk) host(a *inspection.Answer) {
	if !a.Node.IPAM {
		return
	}
	w.rules(a)
	w.guard(a, nil)
	w.sysctls(a, nil)
	w.export(a)
}

func (w *walk) rules(a *inspection.Answer) {
	w.compare(StepRules, "rules lead to the tables of pods and of unassigned addresses",
		repaired(a.Node.Name, "systemd-networkd deletes rules unless networkd.conf says ManageForeignRoutingPolicyRules=no"), of(a.Host, inspection.Rules))
}

func (w *walk) guard(a *inspection.Answer, pod []inspection.Comparison) {
	w.compare(StepGuard, "the table inet coil of nftables is as coild makes it",
		repaired(a.Node.Name, "a program that flushes all of nftables, such as nftables.service, must flush its own tables only"),
		slices.Concat(of(pod, inspection.Guard), of(a.Host, inspection.Guard)))
}

func (w *walk) sysctls(a *inspection.Answer, pod []inspection.Comparison) {
	w.compare(StepSysctls, "kernel parameters are as coild sets them",
		repaired(a.Node.Name, "look for these parameters in /etc/sysctl.d, /usr/lib/sysctl.d and in what manages the node's configuration"),
		slices.Concat(of(pod, inspection.Sysctls), of(a.Host, inspection.Sysctls)))
}

func (w *walk) export(a *inspection.Answer) {
	blocks := of(a.Host, inspection.Blocks)
	if len(blocks) == 0 {
		w.right(StepExport, "no block is to be announced")
		return
	}
	w.compare(StepExport, "routing daemons find the routes of the node's blocks in the table of exports",
		repaired(a.Node.Name, "a routing daemon must only import these tables, and systemd-networkd needs ManageForeignRoutes=no"), blocks)
}

// ofNode says whether a block is a node's.
func ofNode(b metav1.Object, node string) bool { return b.GetLabels()[v2.LabelNode] == node }
