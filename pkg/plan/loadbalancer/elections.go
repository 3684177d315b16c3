package loadbalancer

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// master is the state of the gateway that has the addresses of an election, as keepalived tells it.
const master = "MASTER"

// Election is one by which gateways agree who has addresses of a pool.
type Election struct {
	// Pool is empty if none has the virtual router ID.
	Pool   string
	ID     int32
	Family corev1.IPFamily
}

// Masters returns of each election in which gateways take part those that say that they are its master. silent are gateways of which nothing was heard for too long: what
// they said isn't known to be so any more.
func Masters(gateways []*v2.LoadBalancerGateway, pool func(name string) *v2.AddressPool, silent func(gateway string) bool) map[Election][]string {
	all := map[Election][]string{}
	for _, g := range gateways {
		for _, v := range g.Status.VRRP {
			e := Election{poolOf(g, v.RouterID, pool), v.RouterID, v.Family}
			if v.State == master && !silent(g.Name) {
				all[e] = append(all[e], g.Name)
			} else {
				all[e] = append(all[e], nil...) // it is known, without this one
			}
		}
	}
	return all
}

// poolOf is the pool of a gateway that has an election; empty for none.
func poolOf(g *v2.LoadBalancerGateway, id int32, pool func(name string) *v2.AddressPool) string {
	i := slices.IndexFunc(g.Spec.Pools, func(name string) bool {
		p := pool(name)
		return p != nil && p.Spec.VRRP != nil && id >= p.Spec.VRRP.RouterID && id < p.Spec.VRRP.RouterID+p.Spec.VRRP.Instances
	})
	if i < 0 {
		return ""
	}
	return g.Spec.Pools[i]
}
