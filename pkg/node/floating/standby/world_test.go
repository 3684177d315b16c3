package standby

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/node/floating/frames"
	"github.com/coil-net/coil/pkg/node/floating/tables"
	"github.com/coil-net/coil/pkg/testkit"
)

// world has two nodes, one of which copies its connections to the other.
type world struct {
	*floatingtest.World
	a, b *fakeNode
}

type fakeNode struct {
	*Standby
	*floatingtest.Node
}

// newWorld has an address of both families, which node a has.
func newWorld(t *testing.T) *world {
	w := &world{World: floatingtest.NewWorld(t)}
	w.a, w.b = w.node(w.A), w.node(w.B)
	w.a.cfg.Dial = func(ctx context.Context, _ string) (net.Conn, error) { return w.B.Dial(ctx) }
	w.b.cfg.Dial = func(context.Context, string) (net.Conn, error) { return nil, errors.New("there is no way back") }
	return w
}

func (w *world) node(at *floatingtest.Node) *fakeNode {
	n := &fakeNode{Node: at}
	n.Standby = New(w.T.Context(), Config{
		Node: at.Name, Block: w.Find, Tables: tables.New(w.T.Context(), at.Open), Here: at.Here,
		Follow: func(_ context.Context, pod types.UID) (Events, error) {
			if !at.Here(pod) {
				return nil, fmt.Errorf("no pod %s", pod)
			}
			return at.Subscribe()
		},
		Moves: func(string) bool { return false },
	}, prometheus.NewRegistry())
	at.Listen(func(ctx context.Context, from string, conn net.Conn) {
		var buffer []byte
		if k, _, err := frames.Read(conn, &buffer); err != nil || k != frames.Follow {
			return
		}
		n.Serve(ctx, from, conn)
	}, n.Finish)
	return n
}

// newStandbyWorld is a world whose address has a standby, with shorter times. It can be prepared before anything is copied.
func newStandbyWorld(t *testing.T, prepare ...func(*world)) *world {
	w := newWorld(t)
	for _, n := range []*fakeNode{w.a, w.b} {
		n.limits = limits{
			settle: time.Millisecond, turn: 20 * time.Millisecond, beat: 100 * time.Millisecond, answer: testkit.Timeout(5 * time.Second), whole: time.Hour, kept: 300 * time.Second,
			retry: 10 * time.Millisecond, mostRetry: 100 * time.Millisecond, waiting: 1000,
		}
		n.PodsChanged()
	}
	for _, do := range prepare {
		do(w)
	}
	w.change(func(f *v2.Floating) { f.Standby, f.MovingTo = true, "" })
	return w
}

// flows adds flows to the table of the node that has the address, without events.
func flows(n int) func(*world) {
	return func(w *world) { w.a.Add(w.Address("p-0", "a"), 0, n) }
}

// change changes the block, and tells both nodes.
func (w *world) change(change func(*v2.Floating)) {
	before, after := w.Change("p-0", change)
	w.a.Changed(before, after)
	w.b.Changed(before, after)
}

// inStep waits until a says that b has all flows, or that it hasn't, and why.
func (w *world) inStep(why string) {
	w.T.Helper()
	testkit.Eventually(w.T, 10*time.Second, "the state", func() error {
		state, ok := w.a.State("p-0")
		if !ok || state.Node != "b" || state.Since.IsZero() != (why == "") || !strings.Contains(state.Why, why) {
			return fmt.Errorf("%+v, %t, want %q", state, ok, why)
		}
		return nil
	})
}

// stream is the stream to a node.
func (n *fakeNode) stream(node string) *stream {
	n.Standby.mu.Lock()
	defer n.Standby.mu.Unlock()
	return n.streams[node]
}
