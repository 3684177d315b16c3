package egresspolicy

import (
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/egress"
)

// leaving returns the lists of a policy at Egresses that it doesn't name any more, and when to ask again; never, if that is 0.
//
// Nodes learn late that a policy names another Egress. Until then they send to routers of the former one. Another policy may choose the same pods
// there, and its address isn't the one that decides. So for keepFor the lists there have the pods without an address: routers drop packets of these pods to
// the policy's destinations.
func (c *Controller) leaving(s *subject, have []*discoveryv1.EndpointSlice) (lists []egress.Listed, again time.Duration) {
	before, since := c.left.Get(s.Name), map[types.NamespacedName]time.Time{}
	for _, slice := range have {
		key := egress.EgressOfPolicySlice(slice)
		if _, seen := since[key]; seen || key == s.Egress {
			continue
		}
		e := c.egresses.Find(key.String())
		if e == nil || e.DeletionTimestamp != nil || !e.Spec.Addresses.For(v2.EgressAddressOfClient) {
			continue
		}
		start, known := before[key]
		if !known {
			start = c.now().Time
		}
		since[key] = start
		left := keepFor - c.now().Sub(start)
		if left <= 0 {
			continue
		}
		p := s.Policy
		p.Block = ""
		list := egress.PolicyListOf(e, p)
		var clients []egress.Client
		for _, cl := range list.Clients(have) {
			if pod := c.pod(cl); pod != nil && p.Selects(pod.Pod) && pod.lives(cl.Addr) {
				clients = append(clients, cl)
			}
		}
		lists = append(lists, list.With(clients))
		again = soonest(again, left)
	}
	if len(since) == 0 {
		c.left.Delete(s.Name)
	} else {
		c.left.Set(s.Name, since)
	}
	return lists, again
}

// soonest returns the smaller of two durations of which 0 is never.
func soonest(a, b time.Duration) time.Duration {
	if a == 0 || b == 0 {
		return a + b
	}
	return min(a, b)
}
