package place

import (
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/testkit"
)

// What is said of an address of Services is what there is: its route and its ports.
func TestLook(t *testing.T) {
	l := newLab(t)
	p := l.start()
	order := ofServices(time.Hour, 80, 81)
	wrong := func() (objects []string) {
		for _, a := range order.Addrs() {
			for _, c := range inspection.Wrong(p.Look(t.Context(), a, order.Ports)) {
				objects = append(objects, c.String())
			}
		}
		return objects
	}
	if got := wrong(); len(got) != 2*len(order.Addrs()) {
		t.Errorf("of a node without the address: %q", got)
	}
	testkit.Check(t, p.Answer(t.Context(), order))
	if got := wrong(); len(got) > 0 {
		t.Errorf("of the node with the address: %q", got)
	}
	order.Ports = order.Ports[:1]
	if got := wrong(); len(got) != len(order.Addrs()) {
		t.Errorf("with another port than is wanted: %q", got)
	}
}
