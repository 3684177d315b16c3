package loadbalancer

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/floating"
)

// mostSuccessors is how many nodes may have an address at a time. They all ask each other how they are.
const mostSuccessors = 5

// taintToBeDeleted is on Nodes that the cluster's autoscaler is about to delete.
const taintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

// Nodes are the nodes that may have addresses of Services, sorted by name, with the addresses at which nodes ask each other.
type Nodes []v2.FloatingNode

// NodesOf returns those of a cluster that are ready, that aren't about to be deleted, and that their owner doesn't exclude. If none is ready, the others stay:
// kubelets that don't reach the API server are no reason to take addresses from nodes that forward.
func NodesOf(all []*corev1.Node) Nodes {
	var ready, others Nodes
	for _, n := range all {
		addrs := ipam.AddressOf(plan.NodeInternalIPs(n)...).Addrs()
		if excluded(n) || len(addrs) == 0 {
			continue
		}
		node := v2.FloatingNode{Node: n.Name}
		for _, a := range addrs {
			node.Addresses = append(node.Addresses, a.String())
		}
		if ReadyNode(n) {
			ready = append(ready, node)
		} else {
			others = append(others, node)
		}
	}
	if len(ready) == 0 {
		ready = others
	}
	slices.SortFunc(ready, func(a, b v2.FloatingNode) int { return cmp.Compare(a.Node, b.Node) })
	return ready
}

// Has says whether a node is one of them.
func (n Nodes) Has(name string) bool { return n.find(name) != nil }

// find returns a node, nil if it isn't one of them.
func (n Nodes) find(name string) *v2.FloatingNode {
	i, ok := slices.BinarySearchFunc(n, name, func(node v2.FloatingNode, name string) int { return cmp.Compare(node.Node, name) })
	if !ok {
		return nil
	}
	return &n[i]
}

// excluded says whether a Node is about to be deleted, or its owner doesn't want addresses of Services there.
func excluded(n *corev1.Node) bool {
	_, labelled := n.Labels[corev1.LabelNodeExcludeBalancers]
	return labelled || n.DeletionTimestamp != nil || slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == taintToBeDeleted })
}

// Serves says whether addresses of Services may be on a Node.
func Serves(n *corev1.Node) bool { return ReadyNode(n) && !excluded(n) }

// Any says whether one of some nodes is among them.
func (n Nodes) Any(some map[string]bool) bool { return len(n.among(some)) > 0 }

// ReadyNode says whether a Node is ready.
func ReadyNode(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// Announcers are the nodes that announce an address by routes: all, or those among some that may have it.
func (n Nodes) Announcers(only map[string]bool) v2.FloatingAnnouncers {
	if only == nil {
		return v2.FloatingAnnouncers{All: true}
	}
	n = n.among(only)
	return v2.FloatingAnnouncers{Nodes: n[:min(len(n), v2.MaxFloatingAnnouncers)].names()}
}

// Equal says whether two clusters have the same nodes.
func (n Nodes) Equal(o Nodes) bool {
	return slices.EqualFunc(n, o, func(a, b v2.FloatingNode) bool { return a.Node == b.Node && slices.Equal(a.Addresses, b.Addresses) })
}

// SameNode says whether a change of a Node, such as a heartbeat, is none for the addresses of Services.
func SameNode(a, b *corev1.Node) bool {
	return ReadyNode(a) == ReadyNode(b) && NodesOf([]*corev1.Node{a}).Equal(NodesOf([]*corev1.Node{b}))
}

// WithEndpoints returns the nodes that have an endpoint of a Service that is ready. If no node has, it returns those with one that still serves while it ends,
// as a Service proxy uses these then.
func WithEndpoints(all []*discoveryv1.EndpointSlice) map[string]bool {
	ready, serving := map[string]bool{}, map[string]bool{}
	for _, s := range all {
		for _, e := range s.Endpoints {
			switch c := e.Conditions; {
			case e.NodeName == nil:
			case c.Ready == nil || *c.Ready:
				ready[*e.NodeName] = true
			case c.Serving != nil && *c.Serving:
				serving[*e.NodeName] = true
			}
		}
	}
	if len(ready) == 0 {
		return serving
	}
	return ready
}

// Spot is an address that is to be on a node.
type Spot struct {
	// Block is the name of its AddressBlock, and Holder the node that has it; empty if none has.
	Block, Holder string
	// Only are the nodes that may have it. Nil is any.
	Only map[string]bool
}

// First returns the node that is to have an address, empty if none may. A node that has it keeps it as long as it may: connections end when an address moves. Another
// address goes to a node with few of them. load is how many addresses nodes have.
func (n Nodes) First(s Spot, load map[string]int) string {
	n = n.among(s.Only)
	switch {
	case len(n) == 0:
		return ""
	case n.Has(s.Holder):
		return s.Holder
	}
	return slices.MinFunc(n, func(a, b v2.FloatingNode) int { return cmp.Compare(load[a.Node], load[b.Node]) }).Node
}

// Successors returns the nodes that may have an address, in order. first is the first of them.
func (n Nodes) Successors(s Spot, first string) (all []v2.FloatingNode) {
	if first == "" {
		return nil
	}
	order := floating.Order(first, s.Block, n.among(s.Only).names())
	for _, name := range order[:min(mostSuccessors, len(order))] {
		all = append(all, *n.find(name))
	}
	return all
}

// among are those among some; nil is all.
func (n Nodes) among(some map[string]bool) Nodes {
	if some == nil {
		return n
	}
	return slices.DeleteFunc(slices.Clone(n), func(node v2.FloatingNode) bool { return !some[node.Node] })
}

// names are their names.
func (n Nodes) names() []string {
	all := make([]string, len(n))
	for i, node := range n {
		all[i] = node.Node
	}
	return all
}
