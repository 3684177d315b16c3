package egresspolicy

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/floating"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// egressWith makes the Egress one with floating addresses, and with a change.
func (sc *scene) egressWith(change func(*v2.Egress), addresses ...string) {
	e := fakeapi.Find[*v2.Egress](sc.s, egressResource, "internet/nat")
	e.Generation++
	e.Spec.Addresses = &v2.EgressAddresses{Use: v2.EgressAddressOfClient, Pool: "partners"}
	e.Status.Addresses = nil
	for _, a := range addresses {
		e.Status.Addresses = append(e.Status.Addresses, v2.EgressAddressStatus{
			Block: "block-of-" + a, EgressAddress: v2.EgressAddress{IPv4: a}, Node: "node-of-" + a, Router: "router-of-" + a,
		})
	}
	if change != nil {
		change(e)
	}
	sc.s.Put(egressResource, e)
}

// accepted is the reason of a policy's condition Accepted.
func (sc *scene) accepted(name string) string {
	if c := meta.FindStatusCondition(sc.statusOf(name).Conditions, v2.PolicyAccepted); c != nil {
		return c.Reason
	}
	return "none"
}

// Two policies that are made at once get two addresses, and keep them while others go and the Egress gets more.
func TestPoliciesGetAddresses(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		nat := types.NamespacedName{Namespace: "internet", Name: "nat"}
		sc.egressWith(nil, "198.51.100.0", "198.51.100.1")
		sc.policy("p", "a", nil)
		sc.policy("q", "b", nil)
		sc.run(5 * time.Second)
		before := sc.assigned.Get(nat)
		p, q := before[shopKey], before[types.NamespacedName{Namespace: "shop", Name: "q"}]
		if len(before) != 2 || p.Address == "" || q.Address == "" || p == q {
			t.Fatalf("%+v", before)
		}
		// What it has got by an older spec isn't what it has by this one.
		changed := *sc.policies.find(shopKey)
		changed.use.Address = &v2.EgressAddress{IPv4: "198.51.100.1"}
		if g, known := sc.given(&changed, sc.egresses.Find("internet/nat")); known {
			t.Errorf("a policy that names an address since just now has %+v", g)
		}
		sc.s.Drop(policyResource, "shop/q")
		sc.egressWith(nil, "198.51.100.9", "198.51.100.0", "198.51.100.1")
		sc.run(5 * time.Second)
		if now := sc.assigned.Get(nat); len(now) != 1 || now[shopKey] != p {
			t.Errorf("%+v, and p had %+v", now, p)
		}
		sc.s.Drop(egressResource, "internet/nat")
		sc.run(5 * time.Second)
		if now := sc.assigned.Get(nat); now != nil {
			t.Errorf("an Egress that is gone has given %+v", now)
		}
	})
}

// A policy of an Egress with addresses that has none has a status all the same, which says why.
func TestPoliciesWithoutAddress(t *testing.T) {
	for _, c := range []struct {
		name   string
		egress func(*v2.Egress)
		policy func(*v2.EgressPolicy)
		want   string
	}{
		{"none left", func(e *v2.Egress) { e.Status.Addresses = nil }, nil, string(floating.NoAddress)},
		{"a namespace that isn't allowed", func(e *v2.Egress) {
			e.Spec.AllowedNamespaces = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "a"}}
		}, nil, policy.ReasonNamespaceNotAllowed},
		{"a selector that can't be understood", nil, func(p *v2.EgressPolicy) {
			p.Spec.Pods = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "app", Operator: "Like"}}}
		}, policy.ReasonSelectorInvalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			inScene(t, func(t *testing.T, sc *scene) {
				sc.egressWith(c.egress, "198.51.100.0")
				sc.pod(1, "a")
				sc.policy("p", "a", c.policy)
				sc.run(5 * time.Second)
				if got := sc.accepted("p"); got != c.want {
					t.Errorf("Accepted for %s, want %s", got, c.want)
				}
				listed := c.want == string(floating.NoAddress) // its pods leave by no other policy's address
				if has := sc.listed(shopKey); len(has) > 0 != listed {
					t.Errorf("clients that routers know: %v", has)
				}
				for _, s := range sc.slices.Under(shopKey.String()) {
					if a, ok := s.Annotations[v2.AnnotationAddress]; ok {
						t.Errorf("they leave by %s", a)
					}
				}
			})
		})
	}
}
