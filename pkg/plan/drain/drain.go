// Package drain derives which pods have addresses of a pool, and which of them can be moved to another pool by their eviction.
//
// It owns the reasons why a pod isn't evicted. It must not know how one is.
package drain

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// Facts are all that a plan depends on, but for the pods.
type Facts struct {
	// Pool is the name of the AddressPool.
	Pool string
	// Blocks may be those of other pools, too.
	Blocks     []*v2.AddressBlock
	Namespaces []*corev1.Namespace
	// Force has pods evicted that nobody makes again.
	Force bool
}

// Pod is a pod that has an address of the pool.
type Pod struct {
	Node      string    `json:"node"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
	Address   string    `json:"address"`
	// Ending says that it is being deleted.
	Ending bool `json:"ending,omitempty"`
	// Stays is why it isn't evicted; empty if it is.
	Stays string `json:"stays,omitempty"`
}

// String is namespace/name of the pod.
func (p Pod) String() string { return p.Namespace + "/" + p.Name }

// Plan is what has something of a pool.
type Plan struct {
	// Naming are the namespaces whose pods get addresses of the pool, sorted. New ones can't start while it drains.
	Naming []string `json:"naming,omitempty"`
	// Pods have addresses of the pool, sorted by node: so blocks become empty one after the other.
	Pods []Pod `json:"pods"`
	// Blocks is how many blocks nodes hold that go back when they are empty, Nodes how many nodes.
	Blocks int `json:"blocks"`
	Nodes  int `json:"nodes"`
	// Reserved are the blocks that only an admin deletes, sorted.
	Reserved []string `json:"reserved,omitempty"`
	// Owners are those of floating addresses, sorted. Empty if these only cool down.
	Owners []string `json:"owners,omitempty"`
	// Cooling is how many floating addresses were released, and go by themselves.
	Cooling int `json:"cooling,omitempty"`
}

// Planner collects the pods of a plan one by one: a cluster may have a hundred thousand.
type Planner struct {
	plan     Plan
	force    bool
	naming   map[string]bool
	pool     string
	prefixes map[string][]netip.Prefix // by node
}

// New returns a Planner that has seen no pod.
func New(f Facts) *Planner {
	p := &Planner{force: f.Force, naming: map[string]bool{}, pool: f.Pool, prefixes: map[string][]netip.Prefix{}}
	p.plan.Pods = []Pod{}
	for _, n := range f.Namespaces {
		if cmp.Or(n.Annotations[v2.AnnotationPool], v2.DefaultPool) == f.Pool {
			p.naming[n.Name] = true
			p.plan.Naming = append(p.plan.Naming, n.Name)
		}
	}
	for _, b := range f.Blocks {
		if !slices.Contains(pools.BlockPools(b), f.Pool) {
			continue
		}
		node := b.Labels[v2.LabelNode]
		switch {
		case pools.IsFloating(b) && b.Floating != nil && b.Floating.ReleasedAt != nil:
			p.plan.Cooling++
		case pools.IsFloating(b) && b.Floating != nil:
			p.plan.Owners = append(p.plan.Owners, b.Floating.Owner.Summary)
		case node == "" || b.Labels[v2.LabelReserved] == v2.ReservedValue:
			p.plan.Reserved = append(p.plan.Reserved, b.Name)
		default:
			p.plan.Blocks++
		}
		if node != "" {
			p.prefixes[node] = append(p.prefixes[node], ipam.Prefixes(b.IPv4, b.IPv6)...)
		}
	}
	p.plan.Nodes = len(p.prefixes)
	slices.Sort(p.plan.Naming)
	slices.Sort(p.plan.Reserved)
	slices.Sort(p.plan.Owners)
	p.plan.Owners = slices.Compact(p.plan.Owners)
	return p
}

// Add adds a pod to the plan if it has an address of the pool. The network of a pod whose containers have all ended is gone.
func (p *Planner) Add(pod *corev1.Pod) {
	if pod.Spec.HostNetwork || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return
	}
	for _, ip := range pod.Status.PodIPs {
		addr, err := netip.ParseAddr(ip.IP)
		if err != nil || !slices.ContainsFunc(p.prefixes[pod.Spec.NodeName], func(prefix netip.Prefix) bool { return prefix.Contains(addr.Unmap()) }) {
			continue
		}
		has := Pod{Node: pod.Spec.NodeName, Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, Address: ip.IP, Ending: pod.DeletionTimestamp != nil}
		if !has.Ending {
			has.Stays = p.stays(pod)
		}
		p.plan.Pods = append(p.plan.Pods, has)
		return
	}
}

// stays says why a pod isn't evicted.
func (p *Planner) stays(pod *corev1.Pod) string {
	_, static := pod.Annotations[corev1.MirrorPodAnnotationKey]
	switch {
	case static:
		return "it is a static pod: move its manifest on the node away"
	case p.naming[pod.Namespace]:
		return fmt.Sprintf("its namespace still names the pool, so its successor wouldn't start: name another one in the annotation %s of Namespace %s", v2.AnnotationPool, pod.Namespace)
	case !p.force && metav1.GetControllerOf(pod) == nil:
		return "it has no controller, so nobody makes it again: delete it, or use --force"
	}
	return ""
}

// Plan returns what the pods so far make.
func (p *Planner) Plan() Plan {
	slices.SortFunc(p.plan.Pods, func(a, b Pod) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return p.plan
}

// Moves are the pods to be evicted.
func (p Plan) Moves() []Pod {
	return p.choose(func(pod Pod) bool { return !pod.Ending && pod.Stays == "" })
}

// Stay are the pods that aren't evicted.
func (p Plan) Stay() []Pod { return p.choose(func(pod Pod) bool { return pod.Stays != "" }) }

// Ending are the pods that go by themselves.
func (p Plan) Ending() []Pod { return p.choose(func(pod Pod) bool { return pod.Ending }) }

func (p Plan) choose(is func(Pod) bool) (all []Pod) {
	for _, pod := range p.Pods {
		if is(pod) {
			all = append(all, pod)
		}
	}
	return all
}
