package handover

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// follow makes the second router the follower: it has rules, and no client leaves by it yet. buffer is that for events, in bytes.
func (l *lab) follow(buffer int) {
	l.t.Helper()
	testkit.Check(l.t, l.rules(l.rb, 3, false))
	for _, n := range []*fakeNode{l.a, l.b} {
		node := n.cfg.Node
		n.cfg.Follow = func(context.Context, types.UID) (Events, error) {
			table, err := conntrack.New(l.at(node).NS)
			if err != nil {
				return nil, err
			}
			events, err := table.Events(buffer)
			return closing{events, table}, err
		}
		n.standby.PodsChanged()
	}
	l.standby(func(f *v2.Floating) { f.Standby, f.MovingTo = true, "" })
	l.inStep("")
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
func (l *lab) known(node string) map[key]conntrack.Flow {
	l.t.Helper()
	table := testkit.Must(conntrack.New(l.at(node).NS))(l.t)
	defer table.Close()
	all := map[key]conntrack.Flow{}
	testkit.Check(l.t, table.Translated(l.t.Context(), l.address("p-0", "a").Addrs(), func(f conntrack.Flow) {
		if !f.Echo() && !f.Over() {
			all[keyOf(f)] = f
		}
	}))
	return all
}

// same waits until both routers have the same flows.
func (l *lab) same(what string) {
	l.t.Helper()
	testkit.Eventually(l.t, 20*time.Second, what, func() error {
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
	l.t.Helper()
	l.cut(true)
	l.client.Configure(l.t, "link set r2 down")
	l.server.Configure(l.t, "link set r2 down")
}

// takes makes the second router the one that has the address, as its node does after a power cut.
func (l *lab) takes() {
	l.t.Helper()
	l.change("p-0", func(f *v2.Floating) { f.Holding.Holder, f.Holding.PodUID = "b", "pod of b" })
	testkit.Check(l.t, l.rules(l.rb, 3, true))
	l.placeAt(3)
	l.clientTo(3)
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
	before := l.opens(n, 7)
	l.follow(conntrack.FollowBuffer)
	after := l.opens(n, 8)
	short := l.opens(20, 9)
	short.close()
	l.lives(before, "at the first router")
	l.lives(after, "at the first router")
	lasts(t, time.Second)
	t.Logf("%d flows at the holder, %d at the follower", len(l.known("a")), len(l.known("b")))
	l.powerCut()
	l.takes()
	for range 2 {
		l.lives(before, "after the power cut")
		l.lives(after, "after the power cut, of those that were opened later")
	}
	for _, v := range []*living{before, after} {
		select {
		case err := <-v.ends:
			t.Error(err)
		default:
		}
	}
	for _, counter := range []string{"resets", "others"} {
		for _, ns := range []*netnstest.NS{l.client, l.server} {
			if got := l.counter(ns, counter); got != "packets 0" {
				t.Errorf("%s has seen %s: %s", ns.Path, counter, got)
			}
		}
	}
}

// A link that breaks in the middle, and events that the kernel has lost, cost nothing but time; flows that ended meanwhile vanish.
func TestStandbyCatchesUp(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	l := newLab(t)
	l.follow(1) // the least: some events
	v := l.opens(50, 7)
	l.same("all flows")
	l.cut(true)
	later := l.opens(50, 8)
	l.inStep("there is no connection")
	v.close()
	l.cut(false)
	l.same("all flows after the link was down")
	l.lives(later, "still")
	if n := testutil.ToFloat64(l.a.standby.metrics.restarts.WithLabelValues("events_lost")); n == 0 {
		t.Error("no event was lost: the test shows less than it should")
	}
	later.close()
	l.same("the end of all")
	if n := len(l.known("b")); n > 0 {
		t.Errorf("the follower has %d flows", n)
	}
}
