package standby

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/testkit"
)

// Whatever breaks a copy that was in step is told: changes aren't heard, are too many, or the flows can't be read.
func TestBreaksAreTold(t *testing.T) {
	for name, breaks := range map[string]func(w *world, e *floatingtest.Events){
		"no events": func(w *world, e *floatingtest.Events) {
			w.a.Fail(func(f *floatingtest.Faults) { f.Subscribe = errors.New("no sockets") })
			e.Calls <- func(func(netip.Addr) bool, func(conntrack.Event), func()) error {
				return errors.New("the socket is broken")
			}
		},
		"too many": func(w *world, _ *floatingtest.Events) {
			w.a.stream("b").restart("more connections began and ended than the other node has taken")
		},
		"no flows": func(w *world, _ *floatingtest.Events) {
			st := w.a.stream("b")
			st.mu.Lock()
			l := st.all["p-0"].lead
			st.mu.Unlock()
			st.failed([]lead{l}, errors.New("no table"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			told := make(chan string, 1000)
			w := newStandbyWorld(t, func(w *world) {
				w.a.cfg.Told = func(block string) { told <- block }
				// All flows are sent once only, so that nothing else is told.
				w.a.limits.retry, w.a.limits.whole = time.Hour, 2*time.Hour
			})
			e := w.a.Subscription(t, 0)
			w.inStep("")
			for quiet := false; !quiet; {
				select {
				case <-told:
				case <-time.After(50 * time.Millisecond): // the first copy is told
					quiet = true
				}
			}
			breaks(w, e)
			select {
			case block := <-told:
				if block != "p-0" {
					t.Errorf("%q is told", block)
				}
			case <-time.After(testkit.Timeout(5 * time.Second)):
				t.Error("nothing is told")
			}
		})
	}
}

// A block without a standby is looked at by its holder if it says how far a standby is: that was switched off while nobody saw it.
func TestLeftConditionIsTold(t *testing.T) {
	for name, c := range map[string]struct {
		holder, condition string
		want              int
	}{
		"left over":         {"a", v2.BlockStandbyInStep, 1},
		"nobody's":          {"", v2.BlockStandbyInStep, 1},
		"another's":         {"c", v2.BlockStandbyInStep, 0},
		"no such condition": {"a", v2.BlockConflicting, 0},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			told := 0
			w.a.cfg.Told = func(string) { told++ }
			b := w.a.cfg.Block("p-0").DeepCopy()
			b.Floating.Holding.Holder = c.holder
			b.Status.Conditions = []metav1.Condition{{Type: c.condition, Status: metav1.ConditionTrue}}
			w.a.Changed(nil, b)
			if told != c.want {
				t.Errorf("it is told %d times, want %d", told, c.want)
			}
		})
	}
}
