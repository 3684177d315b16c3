package standby

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/node/floating/tables"
	"github.com/coil-net/coil/pkg/testkit"
)

// lab is a world whose routers have tables of the kernel, with the times of every day.
type lab struct {
	*floatingtest.Lab
	w *world
}

func newLab(t *testing.T) *lab {
	w := newWorld(t)
	return &lab{floatingtest.NewLab(w.World), w}
}

// follow makes the second router the follower: it has rules, and no client leaves by it yet. buffer is that for events, in bytes.
func (l *lab) follow(buffer int) {
	l.T.Helper()
	testkit.Check(l.T, l.Rules(l.RB, 3, false))
	for _, n := range []*fakeNode{l.w.a, l.w.b} {
		n.cfg.Follow = func(context.Context, types.UID) (Events, error) {
			table, err := conntrack.New(l.At(n.Name).NS)
			if err != nil {
				return nil, err
			}
			events, err := table.Events(buffer)
			return closing{events, table}, err
		}
		n.PodsChanged()
	}
	l.w.change(func(f *v2.Floating) { f.Standby, f.MovingTo = true, "" })
	l.w.inStep("")
}

// closing closes the table with its events.
type closing struct {
	*conntrack.Events
	table *conntrack.Table
}

func (c closing) Close() error {
	defer c.table.Close()
	return c.Events.Close()
}

// known are the flows of the address in the table of a node, those that aren't over.
func (l *lab) known(node string) map[tables.Key]conntrack.Flow {
	l.T.Helper()
	table := testkit.Must(conntrack.New(l.At(node).NS))(l.T)
	defer table.Close()
	all := map[tables.Key]conntrack.Flow{}
	testkit.Check(l.T, table.Translated(l.T.Context(), l.Address("p-0", "a").Addrs(), func(f conntrack.Flow) {
		if !f.Echo() && !f.Over() {
			all[tables.KeyOf(f)] = f
		}
	}))
	return all
}

// same waits until both routers have the same flows.
func (l *lab) same(what string) {
	l.T.Helper()
	testkit.Eventually(l.T, 20*time.Second, what, func() error {
		want, got := l.known("a"), l.known("b")
		for id, f := range want {
			if got[id].Translated != f.Translated {
				return fmt.Errorf("%s isn't at the follower: it has %d flows, want %d", f, len(got), len(want))
			}
		}
		if len(got) != len(want) {
			return fmt.Errorf("the follower has %d flows, want %d", len(got), len(want))
		}
		return nil
	})
}

// powerCut cuts the first router off, and its node from the other one. Nothing is said.
func (l *lab) powerCut() {
	l.T.Helper()
	l.B.Cut(true)
	l.Client.Configure(l.T, "link set r2 down")
	l.Server.Configure(l.T, "link set r2 down")
}

// takes makes the second router the one that has the address, as its node does after a power cut.
func (l *lab) takes() {
	l.T.Helper()
	l.Change("p-0", func(f *v2.Floating) { f.Holding.Holder, f.Holding.PodUID = "b", "pod of b" })
	testkit.Check(l.T, l.Rules(l.RB, 3, true))
	l.PlaceAt(3)
	l.ClientTo(3)
}

// lasts lets something be for some time.
func lasts(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// Connections that are older than a second survive a power cut of the node that has their address: those that were there when the follower began, and
// those that were opened since.
func TestPowerCut(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	n := testkit.FloatingForm.Times(50, 400) // of each family, twice
	l := newLab(t)
	before := l.Opens(n, 7)
	l.follow(conntrack.FollowBuffer)
	after := l.Opens(n, 8)
	short := l.Opens(20, 9)
	short.Close()
	l.Lives(before, "at the first router")
	l.Lives(after, "at the first router")
	lasts(t, time.Second)
	t.Logf("%d flows at the holder, %d at the follower", len(l.known("a")), len(l.known("b")))
	l.powerCut()
	l.takes()
	for range 2 {
		l.Lives(before, "after the power cut")
		l.Lives(after, "after the power cut, of those that were opened later")
	}
	l.Quiet(before, after)
}

// A link that breaks in the middle, and events that the kernel has lost, cost nothing but time; flows that ended meanwhile vanish.
func TestStandbyCatchesUp(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	l := newLab(t)
	l.follow(1) // the least: some events
	v := l.Opens(50, 7)
	l.same("all flows")
	l.B.Cut(true)
	later := l.Opens(50, 8)
	l.w.inStep("there is no connection")
	v.Close()
	l.B.Cut(false)
	l.same("all flows after the link was down")
	l.Lives(later, "still")
	if n := testutil.ToFloat64(l.w.a.metrics.restarts.WithLabelValues("events_lost")); n == 0 {
		t.Error("no event was lost: the test shows less than it should")
	}
	later.Close()
	l.same("the end of all")
	if n := len(l.known("b")); n > 0 {
		t.Errorf("the follower has %d flows", n)
	}
}
