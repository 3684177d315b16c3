// Package fencing says whether an admin may take an AddressBlock from its node, although the node doesn't give it back.
//
// It owns what makes sure that nobody uses the addresses of the block any more, before others get them. It must not know how that is found out, nor how a block is taken.
package fencing

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/store"
)

// Fence is what makes sure that nobody uses a block.
type Fence string

// The fences. A block with none isn't taken.
const (
	None Fence = ""
	// Gone: there is no Node of the name.
	Gone Fence = "the Node doesn't exist"
	// Shutdown: an admin has said that the machine is off.
	Shutdown Fence = "the Node has the taint " + corev1.TaintNodeOutOfService + ", by which an admin says that the machine is off"
	// Replaced: the Node of the name was made later than the block, whose Node is gone.
	Replaced Fence = "the Node that had it doesn't exist any more: the one of its name is another one, perhaps on another machine"
	// Unknown: coild of the node, which works, doesn't know the block.
	Unknown Fence = "coild of the node answers, and neither has the block in its record nor an address of it"
)

// Facts are what is known of a block.
type Facts struct {
	Block *v2.AddressBlock
	// Node is nil if there is none.
	Node *corev1.Node
	// Pods are those of all nodes that may run.
	Pods []*corev1.Pod
	// Database is what coild of the node says; nil if it doesn't answer, and Unanswered says why.
	Database   *inspection.Database
	Unanswered string
}

// Pod is one that has an address of a block.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Node      string `json:"node"`
	Address   string `json:"address"`
}

// Verdict says what may be done.
type Verdict struct {
	Block string `json:"block"`
	Node  string `json:"node"`
	// Held is what is said of the node.
	Held  string `json:"held"`
	Pods  []Pod  `json:"pods"`
	Fence Fence  `json:"fence"`
	// Refused are the reasons not to take the block, each with what to do.
	Refused []string `json:"refused"`
}

// Has returns the address of a block that a pod has.
func Has(b *v2.AddressBlock, p *corev1.Pod) (netip.Addr, bool) {
	if p.Spec.HostNetwork || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
		return netip.Addr{}, false
	}
	for _, ip := range p.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil && contains(b, a) {
			return a, true
		}
	}
	return netip.Addr{}, false
}

func contains(b *v2.AddressBlock, a netip.Addr) bool {
	return slices.ContainsFunc(ipam.Prefixes(b.IPv4, b.IPv6), func(p netip.Prefix) bool { return p.Contains(a.Unmap()) })
}

// Judge says whether a block may be taken.
func Judge(f Facts) Verdict {
	v := Verdict{Block: f.Block.Name, Node: f.Block.Labels[v2.LabelNode], Pods: []Pod{}, Refused: []string{}}
	refuse := func(format string, args ...any) { v.Refused = append(v.Refused, fmt.Sprintf(format, args...)) }
	for _, p := range f.Pods {
		if a, has := Has(f.Block, p); has {
			v.Pods = append(v.Pods, Pod{Namespace: p.Namespace, Name: p.Name, Node: p.Spec.NodeName, Address: a.String()})
		}
	}
	slices.SortFunc(v.Pods, func(a, b Pod) int {
		return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name)
	})
	switch {
	case pools.IsFloating(f.Block):
		v.Held = "it is a floating address"
		refuse("a floating address is released by its owner: delete that, or its AddressClaim")
		return v
	case v.Node == "":
		v.Held = "it names no node"
		refuse("nobody can say whether its addresses are used: give it back the label %s with the name of the node that had it", v2.LabelNode)
		return v
	}
	var why string
	v.Fence, v.Held, why = fence(f, v.Node)
	if v.Fence == None {
		refuse("%s", why)
	}
	if n := len(v.Pods); n > 0 {
		p := v.Pods[0]
		refuse("%d pods have addresses of it: delete them, such as by kubectl -n %s delete pod %s, with --force only if the machine is off", n, p.Namespace, p.Name)
	}
	return v
}

// fence is that of a block, what is said of the node and, if it has none, why and what to do.
func fence(f Facts, node string) (_ Fence, held, why string) {
	out := "turn the machine off and say so: kubectl taint node " + node + " " + corev1.TaintNodeOutOfService + "=nodeshutdown:NoExecute"
	if f.Node == nil {
		return Gone, "there is no Node " + node, ""
	}
	ready := slices.ContainsFunc(f.Node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
	tainted := slices.ContainsFunc(f.Node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeOutOfService })
	uid := f.Block.Annotations[v2.AnnotationNodeUID]
	replaced := uid != "" && uid != string(f.Node.UID) // what is said of the Node says nothing of the one before
	held = fmt.Sprintf("the Node %s isn't ready", node)
	if ready {
		held = fmt.Sprintf("the Node %s is ready", node)
	}
	switch {
	case tainted && ready:
		return None, held, "the Node has the taint " + corev1.TaintNodeOutOfService + ", and its kubelet runs: the taint is wrong, or the machine is on again"
	case tainted && replaced:
		return Replaced, held, ""
	case tainted:
		return Shutdown, held, ""
	case f.Database == nil && f.Unanswered != "":
		return None, held + ", and its coild doesn't answer: " + f.Unanswered, out
	case f.Database == nil:
		return None, held + ", and no coild runs on it", out
	}
	held += ", and its coild answers"
	switch d := f.Database; {
	case d.Meta["node_name"] != node || d.Node.Name != node || d.Meta["node_uid"] != "" && d.Meta["node_uid"] != string(f.Node.UID):
		return None, held, "its record is that of another Node: see coilctl db check " + node
	case d.Meta["rebuilt_at"] == "" || len(d.Damage) > 0 || d.Truncated != "":
		return None, held, "its record isn't whole: see coilctl db check " + node
	case slices.ContainsFunc(d.Blocks, func(b inspection.DatabaseBlock) bool { return b.Name == f.Block.Name }):
		return None, held + ", and has the block in its record", "coild gives a block back by itself when its last address has cooled down. To empty the block, delete its pods; kubectl delete addressblock " +
			f.Block.Name + " has coild give nothing more of it"
	}
	for _, a := range f.Database.Addresses {
		for _, text := range a.Texts() {
			if x, err := netip.ParseAddr(text); a.State != string(store.Cooling) && (err != nil || contains(f.Block, x)) {
				return None, held, fmt.Sprintf("the record has %s for pod %s/%s: delete the pod", text, a.Namespace, a.Pod)
			}
		}
	}
	if replaced {
		return Replaced, held, ""
	}
	return Unknown, held, ""
}
