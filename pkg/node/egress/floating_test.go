package egress

import (
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Clients send to the routers that have floating addresses, as the nodes and the Egress say.
func TestRoutersHaveAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.direct("10.1.1.1 live, 10.1.1.2 live")
		for i, name := range []string{"r1", "r2"} {
			w.routers["net/a"][i].Name, w.routers["net/a"][i].Pod = name, types.UID(name)
		}
		w.holders, w.unsettled = map[string]types.UID{}, map[string]bool{}
		// told makes the Egress say which routers have the addresses b1 and b2.
		told := func(routers ...string) {
			e := w.egresses["net/a"].DeepCopy()
			e.Spec.Addresses, e.Status.Addresses = &v2.EgressAddresses{Use: v2.EgressAddressOfRouter, Pool: "partners"}, nil
			for i, r := range routers {
				e.Status.Addresses = append(e.Status.Addresses, v2.EgressAddressStatus{Block: []string{"b1", "b2"}[i], Router: r})
			}
			w.egresses["net/a"] = e
		}
		told("r1", "")
		w.holders["b1"] = "r1"
		m := w.manager(false)
		w.clients(t, m, "p")
		defer running(t, m)()
		const one, two, neither = "192.0.2.0/24 [10.1.1.1]", "192.0.2.0/24 [10.1.1.2]", "192.0.2.0/24 nowhere"
		w.after(t, time.Second, "one router has an address", one)
		w.change(m, func() { w.holders["b2"] = "r2" })
		w.after(t, time.Second, "another one doesn't know yet that it has one", one)
		w.change(m, func() { told("r1", "r2") })
		w.after(t, time.Second, "both have one", both)
		w.change(m, func() { delete(w.holders, "b1") })
		w.after(t, time.Second, "one has lost it", two)
		w.change(m, func() { w.unsettled["b2"] = true })
		w.after(t, time.Second, "the node doesn't answer for it", neither)
		w.change(m, func() { w.holders["b1"], w.holders["b2"], w.unsettled["b2"] = "r1", "r1", false })
		w.after(t, time.Second, "one has both, and knows of one", one)
	})
}
