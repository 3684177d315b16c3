package egress

import (
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/reconcile"
)

// users has the policies whose pods leave by floating addresses, indexed by the blocks of these.
type users struct {
	policies kube.Index[v2.EgressPolicy]
	cluster  kube.Index[v2.EgressClusterPolicy]
}

func newUsers(i *FloatingInformers) *users {
	if i.Policies == nil {
		return nil
	}
	return &users{
		policies: kube.CacheOf[v2.EgressPolicy](i.Policies).IndexBy(func(p *v2.EgressPolicy) []string { return blockOf(p.Status) }),
		cluster:  kube.CacheOf[v2.EgressClusterPolicy](i.ClusterPolicies).IndexBy(func(p *v2.EgressClusterPolicy) []string { return blockOf(p.Status) }),
	}
}

func blockOf(st v2.EgressPolicyStatus) []string {
	if st.Resolved == nil || st.Resolved.Address == nil {
		return nil
	}
	return []string{st.Resolved.Address.Block}
}

// policiesOf returns, for each of some blocks, the names of the policies whose pods leave by its address.
func (c *Controller) policiesOf(blocks []*v2.AddressBlock) map[string][]string {
	if c.addresses == nil || c.addresses.users == nil {
		return nil
	}
	all := map[string][]string{}
	for _, b := range blocks {
		for _, p := range c.addresses.users.policies.Under(b.Name) {
			all[b.Name] = append(all[b.Name], p.Namespace+"/"+p.Name)
		}
		for _, p := range c.addresses.users.cluster.Under(b.Name) {
			all[b.Name] = append(all[b.Name], p.Name)
		}
	}
	return all
}

// userSources are the informers of policies.
func (c *Controller) userSources(i *FloatingInformers) []reconcile.Source {
	if i.Policies == nil {
		return nil
	}
	return []reconcile.Source{
		reconcile.On(i.Policies, reconcile.Changes(func(a, b *v2.EgressPolicy) {
			c.userChanged(leaving(a, func() v2.EgressPolicyStatus { return a.Status }), leaving(b, func() v2.EgressPolicyStatus { return b.Status }))
		})),
		reconcile.On(i.ClusterPolicies, reconcile.Changes(func(a, b *v2.EgressClusterPolicy) {
			c.userChanged(leaving(a, func() v2.EgressPolicyStatus { return a.Status }), leaving(b, func() v2.EgressPolicyStatus { return b.Status }))
		})),
	}
}

// use is an address by which a policy's pods leave.
type use struct {
	egress types.NamespacedName
	block  string
}

// leaving is the address that a policy's status has, the zero value without one.
func leaving[T any](p *T, status func() v2.EgressPolicyStatus) use {
	if p == nil {
		return use{}
	}
	st := status()
	if len(blockOf(st)) == 0 || st.Resolved.Egress == nil {
		return use{}
	}
	return use{types.NamespacedName{Namespace: st.Resolved.Egress.Namespace, Name: st.Resolved.Egress.Name}, st.Resolved.Address.Block}
}

// userChanged has the status of an Egress looked at soon, when a policy gets or loses one of its addresses.
func (c *Controller) userChanged(before, after use) {
	if before == after {
		return
	}
	for _, u := range []use{before, after} {
		if u != (use{}) {
			c.objects.AddAfter(u.egress, settle)
		}
	}
}
