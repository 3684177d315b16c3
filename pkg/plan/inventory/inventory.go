// Package inventory lists, for people, what a cluster has of Coil's objects, and who has what.
//
// It owns the rows of such lists. It must not know where objects come from, nor how lists are shown.
package inventory

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// Objects are those of a cluster at one moment.
type Objects struct {
	Pools           []*v2.AddressPool
	Blocks          []*v2.AddressBlock
	Claims          []*v2.AddressClaim
	Egresses        []*v2.Egress
	Policies        []*v2.EgressPolicy
	ClusterPolicies []*v2.EgressClusterPolicy
	Gateways        []*v2.LoadBalancerGateway
	// Services may be all of the cluster: those that Coil doesn't serve have nothing of Coil's.
	Services []*corev1.Service
	Nodes    []*corev1.Node
	// Coilds are the pods of coild.
	Coilds []*corev1.Pod
	// Leases are those by which controllers elect their leaders.
	Leases []*coordinationv1.Lease
	Now    time.Time
}

// Changed is when somebody last changed an object, its status included; zero if that isn't known.
func Changed(o metav1.Object) metav1.Time {
	at := o.GetCreationTimestamp()
	for _, m := range o.GetManagedFields() {
		if m.Time != nil && m.Time.After(at.Time) {
			at = *m.Time
		}
	}
	return at
}

// Node is a node with what it has.
type Node struct {
	Name string `json:"name"`
	// Ready is what kubelet says of the node, Coild whether a coild on it is ready.
	Ready bool `json:"ready"`
	Coild bool `json:"coild"`
	// Blocks is how many AddressBlocks it holds, Allocated how many of their Addresses pods have.
	Blocks    int   `json:"blocks"`
	Allocated int64 `json:"allocated"`
	Addresses int64 `json:"addresses"`
	// Cooling is how many of the Addresses were freed and aren't reused yet.
	Cooling int64 `json:"cooling"`
	// Floating is how many floating addresses are on it.
	Floating int `json:"floating"`
	// InternalIPs are those of the Node.
	InternalIPs []string `json:"internalIPs,omitempty"`
}

// Nodes returns the nodes, sorted by name. A name without a Node is that of a deleted one whose AddressBlocks are still there.
func Nodes(o Objects) []Node {
	rows := map[string]*Node{}
	row := func(name string) *Node {
		if rows[name] == nil {
			rows[name] = &Node{Name: name}
		}
		return rows[name]
	}
	for _, n := range o.Nodes {
		for _, a := range plan.NodeInternalIPs(n) {
			row(n.Name).InternalIPs = append(row(n.Name).InternalIPs, a.String())
		}
		row(n.Name).Ready = slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		})
	}
	for _, p := range o.Coilds {
		if PodReady(p) && rows[p.Spec.NodeName] != nil {
			row(p.Spec.NodeName).Coild = true
		}
	}
	for _, b := range o.Blocks {
		switch node := b.Labels[v2.LabelNode]; {
		case pools.IsFloating(b) && b.Floating != nil:
			if holder := b.Floating.Holding.Holder; holder != "" {
				row(holder).Floating++
			}
		case node != "":
			n := row(node)
			n.Blocks++
			n.Allocated += int64(b.Status.Allocated)
			n.Cooling += int64(b.Status.Cooling)
			n.Addresses += size(b)
		}
	}
	all := make([]Node, 0, len(rows))
	for _, n := range rows {
		all = append(all, *n)
	}
	slices.SortFunc(all, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// PodReady says whether a pod is ready.
func PodReady(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue })
}

// size is how many addresses a block has, pairs as one; 0 if it can't be understood.
func size(b *v2.AddressBlock) int64 {
	parsed, err := ipam.ParseBlock(b.IPv4, b.IPv6)
	if err != nil {
		return 0
	}
	return int64(parsed.Size())
}

// States of an address.
const (
	// StateHeld: a node has the address.
	StateHeld = "held"
	// StateNoHolder: nodes may have it, and none has.
	StateNoHolder = "no holder"
	// StateNowhere: no node is to have it, as of a pool of gateways.
	StateNowhere = "on no node"
	// StateCooling: it was released, and is given to nobody yet.
	StateCooling = "cooling down"
)

// Address is a floating address, or the pair of a dual-stack pool.
type Address struct {
	// Address is such as "192.0.2.7" or "192.0.2.7,2001:db8::7".
	Address string `json:"address"`
	Block   string `json:"block"`
	Pool    string `json:"pool"`
	// Owner is such as "Egress internet/nat".
	Owner string `json:"owner"`
	State string `json:"state"`
	// Holder is the node that has it, and Since is when it came there.
	Holder string       `json:"holder,omitempty"`
	Since  *metav1.Time `json:"since,omitempty"`
	// Ports are such as "TCP 80 shop/web", of Services.
	Ports []string `json:"ports,omitempty"`
	// Attention are the messages of conditions that somebody should look at.
	Attention []string `json:"attention,omitempty"`
}

// attention has the status of conditions that somebody should look at.
var attention = map[string]metav1.ConditionStatus{
	v2.BlockConflicting: metav1.ConditionTrue, v2.BlockForwardingBlocked: metav1.ConditionTrue, v2.BlockStandbyInStep: metav1.ConditionFalse,
}

// Addresses returns the floating addresses, in the order of their pools and blocks.
func Addresses(o Objects) []Address {
	var blocks []*v2.AddressBlock
	for _, b := range o.Blocks {
		if b.Floating != nil && pools.IsFloating(b) {
			blocks = append(blocks, b)
		}
	}
	slices.SortFunc(blocks, func(a, b *v2.AddressBlock) int {
		return cmp.Or(cmp.Compare(a.Labels[v2.LabelPool], b.Labels[v2.LabelPool]), cmp.Compare(a.Index, b.Index))
	})
	all := make([]Address, 0, len(blocks))
	for _, b := range blocks {
		f := b.Floating
		a := Address{Block: b.Name, Pool: b.Labels[v2.LabelPool], Owner: fmt.Sprintf("%s %s/%s", f.Owner.Kind, f.Owner.Namespace, f.Owner.Name), Holder: f.Holding.Holder, Since: f.Holding.Since}
		if parsed, err := ipam.ParseBlock(b.IPv4, b.IPv6); err == nil {
			a.Address = parsed.At(0).String()
		}
		switch {
		case f.ReleasedAt != nil:
			a.State, a.Since = StateCooling, f.ReleasedAt
		case f.Holding.Holder != "":
			a.State = StateHeld
		case len(f.Successors) > 0:
			a.State = StateNoHolder
		default:
			a.State = StateNowhere
		}
		for _, p := range f.Ports {
			a.Ports = append(a.Ports, strings.TrimSpace(fmt.Sprint(p.Protocol, " ", p.Port, " ", p.Service)))
		}
		for kind, bad := range attention {
			if c := meta.FindStatusCondition(b.Status.Conditions, kind); c != nil && c.Status == bad {
				a.Attention = append(a.Attention, strings.ReplaceAll(c.Message, "\n", "; "))
			}
		}
		slices.Sort(a.Attention)
		all = append(all, a)
	}
	return all
}

// Egress is an Egress with its use.
type Egress struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Peering   string `json:"peering"`
	// Routers is how many there are, and Wanted how many there are to be.
	Routers int32 `json:"routers"`
	Wanted  int32 `json:"wanted"`
	Clients int32 `json:"clients"`
	// Addresses is how many floating addresses it has, Policies how many policies lead to it.
	Addresses int `json:"addresses"`
	Policies  int `json:"policies"`
	// Available says whether a router serves clients.
	Available    bool        `json:"available"`
	Destinations []string    `json:"destinations"`
	Created      metav1.Time `json:"created"`
}

// Egresses returns the Egresses, sorted by namespace and name.
func Egresses(o Objects) []Egress {
	policies := map[string]int{}
	count := func(r *v2.ResolvedPolicy) {
		if r != nil && r.Egress != nil {
			policies[r.Egress.Namespace+"/"+r.Egress.Name]++
		}
	}
	for _, p := range o.Policies {
		count(p.Status.Resolved)
	}
	for _, p := range o.ClusterPolicies {
		count(p.Status.Resolved)
	}
	all := make([]Egress, 0, len(o.Egresses))
	for _, e := range o.Egresses {
		all = append(all, Egress{
			Namespace: e.Namespace, Name: e.Name, Peering: string(cmp.Or(e.Spec.Peering, v2.EgressPeeringService)), Routers: e.Status.Replicas, Wanted: e.Spec.Replicas,
			Clients: e.Status.Clients, Addresses: len(e.Status.Addresses), Policies: policies[e.Namespace+"/"+e.Name],
			Available: meta.IsStatusConditionTrue(e.Status.Conditions, v2.EgressAvailable), Destinations: e.Spec.Destinations, Created: e.CreationTimestamp,
		})
	}
	slices.SortFunc(all, func(a, b Egress) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return all
}

// Service is a Service of the type LoadBalancer that Coil serves, or should: of its class, or with something from Coil.
type Service struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Addresses are those that it tells.
	Addresses []string `json:"addresses"`
	// Ports are such as "80/TCP".
	Ports []string `json:"ports"`
	// Reason and Message are of the condition that says how far it is.
	Reason  string      `json:"reason"`
	Message string      `json:"message"`
	Created metav1.Time `json:"created"`
}

// Services returns the Services, sorted by namespace and name.
func Services(o Objects) []Service {
	all := make([]Service, 0)
	for _, s := range o.Services {
		if !loadbalancer.Taken(s) && !loadbalancer.Managed(s, false) {
			continue
		}
		row := Service{Namespace: s.Namespace, Name: s.Name, Addresses: []string{}, Ports: []string{}, Reason: "Pending", Created: s.CreationTimestamp}
		for _, p := range s.Spec.Ports {
			row.Ports = append(row.Ports, fmt.Sprintf("%d/%s", p.Port, cmp.Or(p.Protocol, corev1.ProtocolTCP)))
		}
		for _, i := range s.Status.LoadBalancer.Ingress {
			row.Addresses = append(row.Addresses, cmp.Or(i.IP, i.Hostname))
		}
		for _, kind := range []string{loadbalancer.ConditionAssigned, loadbalancer.ConditionServed, loadbalancer.ConditionPolicies} {
			c := meta.FindStatusCondition(s.Status.Conditions, kind)
			if c == nil {
				break
			}
			if row.Reason, row.Message = c.Reason, c.Message; c.Status != metav1.ConditionTrue {
				break
			}
		}
		all = append(all, row)
	}
	slices.SortFunc(all, func(a, b Service) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return all
}
