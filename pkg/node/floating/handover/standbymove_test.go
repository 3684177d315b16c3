package handover

import (
	"maps"
	"net"
	"testing"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// A hand-over to the node that follows breaks: what was copied before stays. One that doesn't break leaves the flows of the holder, and no others.
func TestHandoverToFollower(t *testing.T) {
	w := newStandbyWorld(t)
	a := w.address("p-0", "a")
	w.a.open(a, 0, 100)
	w.keeps("all flows")
	w.inStep("")
	w.standby(func(f *v2.Floating) { f.MovingTo = "b" })

	offers := func() net.Conn {
		conn := testkit.Must(w.a.cfg.Dial(t.Context(), "b"))(t)
		s := &sending{h: w.a.Handover, address: a, conn: conn}
		testkit.Check(t, s.write(offer, []byte(`{"block":"p-0","id":"uid of p-0"}`)), s.answer())
		return conn
	}
	conn := offers()
	testkit.Check(t, writeFrame(conn, opened, appendFlow(nil, flow(a, 100))), conn.Close())
	w.b.counted(t, received, "failed", 1)
	if n := len(w.b.all()); n != 101 {
		t.Errorf("%d flows are left after a hand-over that broke, want 101", n)
	}

	// Meanwhile a connection has ended, and another one has got its port and another translation.
	w.a.close(a, 0, 10)
	other := flow(a, 50)
	other.Translated = flow(a, 1050).Translated
	w.a.table.mu.Lock()
	w.a.table.flows[keyOf(other)] = other
	w.a.table.mu.Unlock()
	w.a.Move(t.Context(), a, "b")
	if want, got := w.a.all(), w.b.all(); !maps.Equal(want, got) {
		t.Errorf("the next holder has %d flows, which aren't the %d of the holder", len(got), len(want))
	}
}
