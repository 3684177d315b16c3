package egresspolicy

import (
	"testing"
	"time"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// at says which routers of the Egress are ready, and by which addresses of nodes their clients leave.
func (sc *scene) at(routers ...v2.EgressNodeAddress) {
	e := fakeapi.Find[*v2.Egress](sc.s, egressResource, "internet/nat")
	e.Spec.Addresses = &v2.EgressAddresses{Use: v2.EgressAddressOfNode}
	e.Status.NodeAddresses = routers
	sc.s.Put(egressResource, e)
}

// A router that isn't ready for a moment changes no status of a policy, also while something else does. What stays is told, and since when.
func TestPlacesAreCalm(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		a1 := v2.EgressNodeAddress{Router: "a1", Node: "a", EgressAddress: v2.EgressAddress{IPv4: "192.0.2.1"}}
		a2 := v2.EgressNodeAddress{Router: "a2", Node: "a", EgressAddress: v2.EgressAddress{IPv4: "192.0.2.1"}}
		b1 := v2.EgressNodeAddress{Router: "b1", Node: "b", EgressAddress: v2.EgressAddress{IPv4: "192.0.2.2"}}
		writes := func() int { return sc.s.Calls()["update "+policyResource] }
		is := func(what, address, node, router string, since time.Duration) {
			t.Helper()
			st := sc.statusOf("p")
			if st.Summary.Address != address || st.Node != node || st.Router != router {
				t.Errorf("%s: address %q, node %q, router %q; want %q, %q, %q", what, st.Summary.Address, st.Node, st.Router, address, node, router)
			}
			if got := time.Since(st.Since.Time).Truncate(time.Second); got != since {
				t.Errorf("%s: so since %s, want %s", what, got, since)
			}
		}
		sc.at(a1)
		sc.policy("p", "a", nil)
		sc.run(time.Minute)
		is("at first", "192.0.2.1", "a", "a1", time.Minute)

		before := writes()
		for range 3 {
			sc.at()
			sc.run(settlePlace - time.Second)
			sc.at(a1)
			sc.run(time.Second)
		}
		sc.run(30 * time.Second)
		if n := writes() - before; n > 0 {
			t.Errorf("%d writes for a router that flaps", n)
		}
		is("after it has flapped", "192.0.2.1", "a", "a1", 2*time.Minute)

		sc.at(b1)
		sc.run(time.Second)
		sc.policy("p", "a", func(p *v2.EgressPolicy) { p.Spec.Destinations = []string{"203.0.113.0/24"} })
		sc.run(time.Second)
		if st := sc.statusOf("p"); st.Resolved.ObservedGeneration != 2 {
			t.Errorf("a new spec waits: %+v", st)
		}
		is("with a new spec", "192.0.2.1", "a", "a1", 2*time.Minute+2*time.Second)
		sc.run(settlePlace)
		is("when another router has stayed", "192.0.2.2", "b", "b1", 2*time.Second)

		sc.at(a1)
		sc.run(settlePlace + time.Second)
		sc.at(a1, a2)
		sc.run(time.Minute)
		is("with two routers on a node", "192.0.2.1", "a", "", time.Minute+time.Second)

		sc.at()
		sc.run(time.Minute)
		if st := sc.statusOf("p"); st.Summary.Address != "" || st.Since != nil {
			t.Errorf("without routers: %+v", st)
		}
		sc.at(b1)
		sc.run(time.Second)
		is("with the first router again", "192.0.2.2", "b", "b1", time.Second)
	})
}
