package floating

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/plantest"
)

// A claim in a pool of OpenStack gets the address that OpenStack provides, once it does, whatever it asks for itself.
func TestProvided(t *testing.T) {
	for name, spec := range map[string]v2.AddressClaimSpec{
		"any address":   {Count: new(int32(1))},
		"one by name":   {Addresses: []string{"10.0.0.9"}},
		"other by name": {Addresses: []string{"10.0.0.3"}},
	} {
		t.Run(name, func(t *testing.T) {
			sc := newScene(t)
			pool := plantest.Pool("p", 0, "10.0.0.0/28")
			pool.Spec.Announce, pool.Spec.OpenStack = v2.AnnounceGateway, &v2.PoolOpenStack{SubnetIDs: []string{"subnet"}}
			sc.s.Put(poolResource, pool)
			sc.s.Put(claimResource, newClaim("c", spec))
			c, err := sc.sync("c")
			if r := ready(c); err != nil || r.Status != metav1.ConditionFalse || r.Reason != v2.ReasonWaitsForOpenStack || len(c.Status.Addresses) > 0 {
				t.Fatalf("before: %+v, %v", c.Status, err)
			}
			c.Status.Provided = &v2.ProvidedAddress{PortID: "port", IPv4: "10.0.0.9", FloatingIP: "203.0.113.7"}
			sc.s.Put(claimResource, c)
			c, err = sc.sync("c")
			if r := ready(c); err != nil || r.Status != metav1.ConditionTrue || blocksOf(c) != "p-9" || c.Status.Summary != "1/1" || c.Status.Provided == nil {
				t.Errorf("after: %+v, %v", c.Status, err)
			}
			select {
			case e := <-sc.r.events.Events:
				t.Errorf("the Event %q", e)
			default:
			}
		})
	}
}
