package handover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/node/floating/standby"
	"github.com/coil-net/coil/pkg/node/floating/tables"
	"github.com/coil-net/coil/pkg/testkit"
)

// world has two nodes, one of which hands addresses over to the other.
type world struct {
	*floatingtest.World
	a, b *fakeNode
}

type fakeNode struct {
	*Handover
	*floatingtest.Node
	standby *standby.Standby

	mu         sync.Mutex
	straggling []netip.Addr
}

// newWorld has an address of both families, which node a has and is to hand over to node b.
func newWorld(t *testing.T) *world {
	w := &world{World: floatingtest.NewWorld(t)}
	w.a, w.b = w.node(w.A), w.node(w.B)
	w.a.cfg.Dial = func(ctx context.Context, _ string) (net.Conn, error) { return w.B.Dial(ctx) }
	w.b.cfg.Dial = func(context.Context, string) (net.Conn, error) { return nil, errors.New("there is no way back") }
	return w
}

func (w *world) node(at *floatingtest.Node) *fakeNode {
	n := &fakeNode{Node: at}
	ctx, registry, routers := w.T.Context(), prometheus.NewRegistry(), tables.New(w.T.Context(), at.Open)
	n.standby = standby.New(ctx, standby.Config{
		Node: at.Name, Block: w.Find, Tables: routers, Here: at.Here,
		Follow: func(context.Context, types.UID) (standby.Events, error) { return at.Subscribe() },
		Moves:  func(id string) bool { return n.Moves(id) },
		Dial:   func(ctx context.Context, node string) (net.Conn, error) { return n.cfg.Dial(ctx, node) },
	}, registry)
	n.Handover = New(ctx, Config{
		Node: at.Name, Block: w.Find, Tables: routers, Standby: n.standby,
		Straggle: func(_ context.Context, _ types.UID, addrs ...netip.Addr) error {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.straggling = append(n.straggling, addrs...)
			return nil
		},
	}, registry)
	n.limits.straggle, n.limits.watch = 0, 100*time.Millisecond
	at.Listen(n.Accept, func() {
		n.standby.Finish()
		n.Finish()
	})
	return n
}

// straggles are the addresses from which the node's router may still send.
func (n *fakeNode) straggles() []netip.Addr {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.straggling
}

// counted waits until a side has counted so many results.
func (n *fakeNode) counted(t *testing.T, side, result string, want float64) {
	t.Helper()
	testkit.Eventually(t, 10*time.Second, "results", func() error {
		if got := testutil.ToFloat64(n.metrics.results.WithLabelValues(side, result)); got != want {
			return fmt.Errorf("%v %s %s, want %v", got, side, result, want)
		}
		return nil
	})
}

var errFull = errors.New("the table is full")
