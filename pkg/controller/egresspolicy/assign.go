package egresspolicy

import (
	"cmp"
	"context"
	"math/rand/v2"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/floating"
	"github.com/coil-net/coil/pkg/plan/policy"
)

// assignment is what the policies of an Egress have got, by key.
type assignment map[types.NamespacedName]given

// given is what a policy has got, and the address that it named then, as policy.Wanted returns it.
type given struct {
	floating.Given
	wants string
}

// syncAssignment gives the policies of an Egress their addresses. Their status says which, and is written by another loop: until the cache
// shows it, the assignment is here.
func (c *Controller) syncAssignment(_ context.Context, key types.NamespacedName) error {
	e := c.egresses.Find(key.String())
	if e == nil || !e.Spec.Addresses.For(v2.EgressAddressOfClient) {
		c.assigned.Delete(key)
		return nil
	}
	before := c.assigned.Get(key)
	users, others := c.users(e)
	wants := make([]floating.Policy, 0, len(users)+1)
	if first := plan.AddressOf(e, ""); first != nil && len(c.naming.Under(key.String())) > 0 {
		wants = append(wants, floating.Policy{Has: first.Block}) // all pods with the annotation together
	}
	annotated := len(wants)
	for _, s := range users {
		p := floating.Policy{Namespace: cmp.Or(s.Name.Namespace, ofCluster), Name: s.Name.Name, Wants: policy.Wanted(e, s.use.Address), Has: before[s.Name].Address}
		if p.Has == "" {
			p.Has = s.Block
		}
		wants = append(wants, p)
	}
	now := assignment{}
	for _, s := range others {
		now[s.Name] = given{wants: policy.Wanted(e, s.use.Address)} // its status says something else
	}
	wants, got := wants[annotated:], assignmentOf(e).Assign(addressesOf(e), wants)[annotated:]
	for i, s := range users {
		now[s.Name] = given{got[i], wants[i].Wants}
	}
	c.assigned.Set(key, now)
	for name, g := range now {
		if had, known := before[name]; !known || had != g {
			c.status.Add(name)
		}
	}
	return nil
}

// ofCluster stands for the namespace of EgressClusterPolicies: no namespace has the name.
const ofCluster = "(cluster)"

// users returns the policies that use an Egress, the oldest first: those that may have an address, and others, which select no pod or
// aren't allowed.
func (c *Controller) users(e *v2.Egress) (users, others []*subject) {
	all := append(c.policies.using(keyOf(e).String()), c.policies.using(byDefault)...)
	slices.SortFunc(all, func(a, b *subject) int { return policy.Compare(a.Policy, b.Policy) })
	all = slices.Compact(all) // those without spec.egress whose default was resolved are in both
	for _, s := range all {
		used := c.facts(s).Uses()
		if used == nil || keyOf(used) != keyOf(e) {
			continue
		}
		allowed, _ := plan.AllowsNamespace(e, c.namespaceLabels(s.Name.Namespace))
		if s.invalid == nil && (allowed || s.ofCluster()) {
			users = append(users, s)
		} else {
			others = append(others, s)
		}
	}
	return users, others
}

// assignmentOf returns the strategy of an Egress.
func assignmentOf(e *v2.Egress) floating.Assignment {
	a := cmp.Or(e.Spec.Addresses.Assignment, &v2.EgressAssignment{})
	return floating.Assignment{
		Strategy:    floating.Strategy(cmp.Or(a.Strategy, v2.EgressAssignmentUnused)),
		MaxPolicies: int(a.MaxPolicies), Refuse: a.WhenFull == v2.EgressWhenFullRefuse, Draw: rand.IntN,
	}
}

// addressesOf returns the addresses of an Egress by their blocks.
func addressesOf(e *v2.Egress) []floating.Address {
	shared := map[netip.Addr]bool{}
	for _, text := range e.Spec.Addresses.Shared {
		if a, err := netip.ParseAddr(text); err == nil {
			shared[a] = true
		}
	}
	is := func(text string) bool {
		a, err := netip.ParseAddr(text)
		return err == nil && shared[a]
	}
	all := make([]floating.Address, 0, len(e.Status.Addresses))
	for _, s := range e.Status.Addresses {
		all = append(all, floating.Address{Name: s.Block, Shared: is(s.IPv4) || is(s.IPv6)})
	}
	return all
}

// given returns what a policy has got of its Egress. It returns false if that isn't known yet, as after the policy has named another address.
func (c *Controller) given(s *subject, e *v2.Egress) (floating.Given, bool) {
	g, known := c.assigned.Get(keyOf(e))[s.Name]
	return g.Given, known && g.wants == policy.Wanted(e, s.use.Address)
}
