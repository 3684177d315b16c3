package egress

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/store"
)

// use is an Egress that a pod is to use.
type use struct {
	egress types.NamespacedName
	// by is the policy that says so; nil if an annotation does.
	by *policy.Policy
}

// policy is the name of the policy, empty for an annotation.
func (u use) policy() string {
	if u.by == nil {
		return ""
	}
	return u.by.String()
}

// open says that packets leave as those of other pods do while nothing can forward them.
func (u use) open() bool { return u.by != nil && u.by.OnFailure == v2.EgressFailureNode }

// holderOf returns the router that has the floating address of a block, and whether its node answers for it yet.
type holderOf func(block string) (pod types.UID, settled bool)

// of returns the Egress as the pod uses it.
func (u use) of(e client.Egress, holder holderOf) client.Egress {
	if u.by != nil {
		e = e.By(*u.by)
	}
	e = e.WithAddresses(func(block string) types.UID {
		pod, settled := holder(block)
		if !settled { // while others have addresses that are answered for
			return ""
		}
		return pod
	})
	if e.Blocks == nil {
		return e
	}
	if e.Block == "" {
		return e.At("")
	}
	pod, _ := holder(e.Block) // there is no other one
	return e.At(pod)
}

// String names the Egress and the policy.
func (u use) String() string {
	return client.Egress{Name: u.egress.String(), Policy: u.policy()}.String()
}

// demand is what annotations and policies ask for a pod, by precedence.
type demand struct {
	uses []use
	// problems are those of policies that don't say which Egress, and unknown these policies.
	problems []problem
	unknown  []string
}

// annotated returns the demand of annotations.
func annotated(refs []types.NamespacedName) (d demand) {
	for _, ref := range refs {
		d.uses = append(d.uses, use{egress: ref})
	}
	return d
}

// selecting returns those of some policies that select a pod with addresses, or may, by precedence.
func selecting(policies []policy.Policy, meta *metav1.PartialObjectMetadata, namespaceLabels map[string]string, at node.Sandbox) []policy.Policy {
	pod := policy.Pod{Namespace: meta.Namespace, NamespaceLabels: namespaceLabels, Labels: meta.Labels, Addresses: at.Address.Addrs()}
	all := slices.DeleteFunc(policies, func(p policy.Policy) bool { return !p.Selects(pod) })
	slices.SortFunc(all, policy.Compare)
	return all
}

// add adds what policies ask for. The error is that one isn't resolved.
func (d *demand) add(policies []policy.Policy) error {
	for _, p := range policies {
		if p.Unresolved {
			return fmt.Errorf("%s isn't resolved yet: coil-egress-controller hasn't said which pods it selects, or which Egress they use", p)
		}
		d.addOne(p)
	}
	return nil
}

// addKnown adds what policies ask for a running pod. Of one that isn't resolved it is what the policy asked for last.
func (d *demand) addKnown(policies []policy.Policy, last []store.KnownEgress) {
	for _, p := range policies {
		if !p.Unresolved {
			d.addOne(p)
			continue
		}
		for _, k := range last {
			if k.Policy != p.String() || k.Former {
				continue
			}
			p.Egress, p.Destinations, p.OnFailure = nameOf(k), slices.Concat([]netip.Prefix{}, k.Destinations), v2.EgressFailureClosed
			if k.Open {
				p.OnFailure = v2.EgressFailureNode
			}
			d.addOne(p)
		}
	}
}

func (d *demand) addOne(p policy.Policy) {
	if p.Egress.Name == "" {
		text := fmt.Sprintf("%s names no Egress, and neither the namespace nor the cluster has a default one that allows the namespace", p)
		d.refuse(use{by: &p}, EgressMissing, text)
		return
	}
	d.uses = append(d.uses, use{p.Egress, &p})
}

// refuse notes that a use can't be had.
func (d *demand) refuse(u use, reason, text string) {
	d.problems = append(d.problems, problem{reason, text, u.by != nil})
	d.unknown = append(d.unknown, u.policy())
}

// usable returns what a pod may use of a demand. Names that no Egress can have are as if it didn't exist.
func (d demand) usable() demand {
	usable := demand{problems: slices.Clip(d.problems), unknown: slices.Clip(d.unknown)}
	for _, u := range d.uses[:min(plan.MostEgresses, len(d.uses))] {
		if len(validation.IsDNS1123Label(u.egress.Namespace))+len(validation.IsDNS1123Subdomain(u.egress.Name)) > 0 {
			usable.refuse(u, EgressMissing, fmt.Sprintf("Egress %s can't exist: that is no name of an object", shown(u.egress.String())))
			continue
		}
		usable.uses = append(usable.uses, u)
	}
	for i, u := range d.uses[len(d.uses)-max(0, len(d.uses)-plan.MostEgresses):] {
		if i > 0 {
			usable.unknown = append(usable.unknown, u.policy())
			continue
		}
		text := fmt.Sprintf("the annotations name more than %d Egresses: only the first ones are used, by namespace and in the order of the annotation", plan.MostEgresses)
		if u.by != nil {
			text = fmt.Sprintf("annotations and policies name more than %d Egresses: only the first ones are used, those of annotations before those of policies, and of these the oldest; %s is too much",
				plan.MostEgresses, u)
		}
		usable.refuse(u, EgressTooMany, text)
	}
	return usable
}

// nameOf returns the name of an Egress.
func nameOf(k store.KnownEgress) types.NamespacedName {
	namespace, name, _ := strings.Cut(k.Name, "/")
	return types.NamespacedName{Namespace: namespace, Name: name}
}

// any says whether something is asked for.
func (d demand) any() bool { return len(d.uses)+len(d.problems) > 0 }

// same says whether two demands ask for the same.
func (d demand) same(other demand) bool {
	return slices.Equal(d.problems, other.problems) && slices.EqualFunc(d.uses, other.uses, func(a, b use) bool {
		if a.egress != b.egress || a.policy() != b.policy() || a.open() != b.open() {
			return false
		}
		return a.by == nil || a.by.Block == b.by.Block && (a.by.Destinations == nil) == (b.by.Destinations == nil) && slices.Equal(a.by.Destinations, b.by.Destinations)
	})
}

// demandOf returns what annotations and policies ask for the pod of a sandbox, as far as caches have them.
func (m *Manager) demandOf(ctx context.Context, s *sandbox, meta *metav1.PartialObjectMetadata, refs []types.NamespacedName, last []store.KnownEgress) (demand, error) {
	policies, labels, err := m.cluster.Policies(ctx, meta, false)
	if err != nil {
		return demand{}, err
	}
	d := annotated(refs)
	d.addKnown(selecting(policies, meta, labels, s.Sandbox), last)
	return d, nil
}
