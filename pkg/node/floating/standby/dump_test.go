package standby

import (
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/node/floating/tables"
)

// A flow that waits for its turn may be sent with all flows before: when it ends, the follower hears of that. Others are never sent.
func TestFlowIsSentBeforeItsTurn(t *testing.T) {
	w := newWorld(t)
	a := w.Address("p-0", "a")
	st := &stream{
		s: w.a.Standby, wake: make(chan struct{}, 1), all: map[string]*copied{},
		young: map[tables.Key]conntrack.Flow{}, due: map[tables.Key]conntrack.Flow{}, over: map[tables.Key]conntrack.Flow{},
	}
	st.add(lead{Address: a, node: "b"}, true)
	begin := func(i int) { st.push(conntrack.Event{Flow: floatingtest.Flow(a, i)}) }
	begin(0)
	st.turn()
	begin(1)
	if all := st.starting(time.Now()); len(all) != 1 {
		t.Fatalf("all flows of %v are sent", all)
	}
	begin(2) // all are read now
	for i := range 4 {
		st.push(conntrack.Event{Flow: floatingtest.Flow(a, i), Over: true})
	}
	begin(4)
	ended := func(what string, want ...int) {
		t.Helper()
		over, _ := st.turn()
		for _, i := range want {
			if _, ok := over[tables.KeyOf(floatingtest.Flow(a, i))]; !ok {
				t.Errorf("%s: the end of flow %d isn't sent", what, i)
			}
		}
		if len(over) != len(want) {
			t.Errorf("%s: %d ends are sent, want %d", what, len(over), len(want))
		}
	}
	ended("while all were read", 0, 1, 2, 3)
	begin(5)
	for i := range 2 {
		st.push(conntrack.Event{Flow: floatingtest.Flow(a, 4+i), Over: true})
	}
	ended("a turn later", 4)
	begin(6)
	st.push(conntrack.Event{Flow: floatingtest.Flow(a, 6), Over: true})
	ended("two turns later")
}
