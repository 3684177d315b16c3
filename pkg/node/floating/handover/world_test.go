package handover

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/testkit"
)

// world has two nodes, one of which hands addresses over to the other, and what the API server says of them.
type world struct {
	t      *testing.T
	mu     sync.Mutex
	blocks map[string]*v2.AddressBlock
	a, b   *fakeNode

	// wire guards conns, the connections to b, and off, which says that there can't be others.
	wire  sync.Mutex
	off   bool
	conns []net.Conn
}

// fakeNode is a node whose router's table is in memory.
type fakeNode struct {
	*Handover
	*table
	registry *prometheus.Registry
	listener net.Listener
	// settings guards accept, limits and the table's faults until there is a connection.
	settings sync.Mutex
	accept   func(ctx context.Context, from string, conn net.Conn)
}

// table is a table of flows.
type table struct {
	mu                 sync.Mutex
	flows              map[key]conntrack.Flow
	reads              int
	forgot, straggling []netip.Addr
	// fails is the error of Insert. reading is called when flows are read.
	fails   error
	reading func(n int)
	// limit is how many flows it may have, 0 any number.
	limit int
	// events are the subscriptions, and subscribing is an error of the next ones.
	events      []*fakeEvents
	subscribing error
}

func (t *table) Translated(_ context.Context, addrs []netip.Addr, each func(conntrack.Flow)) error {
	t.mu.Lock()
	t.reads++
	n, reading := t.reads, t.reading
	var all []conntrack.Flow
	for _, f := range t.flows {
		if slices.Contains(addrs, f.Translated.Addr()) {
			all = append(all, f)
		}
	}
	t.mu.Unlock()
	for _, f := range all {
		each(f)
	}
	if reading != nil {
		reading(n)
	}
	return nil
}

func (t *table) put(flows []conntrack.Flow, known bool) (n int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range flows {
		id := key{f.Protocol, f.Src, f.Dst}
		if _, have := t.flows[id]; have == known {
			t.flows[id] = f
			n++
		}
	}
	return n, t.fails
}

func (t *table) Insert(_ context.Context, flows []conntrack.Flow) (int, error) {
	return t.put(flows, false)
}
func (t *table) Update(_ context.Context, flows []conntrack.Flow) (int, error) {
	return t.put(flows, true)
}

func (t *table) Forget(_ context.Context, addrs ...netip.Addr) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.forgot = append(t.forgot, addrs...)
	maps.DeleteFunc(t.flows, func(_ key, f conntrack.Flow) bool { return slices.Contains(addrs, f.Translated.Addr()) })
	return 0, nil
}

func (t *table) Delete(_ context.Context, flows []conntrack.Flow) (n int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range flows {
		if have, ok := t.flows[keyOf(f)]; ok && have.Translated == f.Translated {
			delete(t.flows, keyOf(f))
			n++
		}
	}
	return n, nil
}

func (t *table) Size() (count, limit int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.flows), t.limit, nil
}

func (t *table) Close() {}

// all are the flows, without their times.
func (t *table) all() map[key]conntrack.Flow {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.flows)
}

// newWorld has an address of both families, which node a has and is to hand over to node b.
func newWorld(t *testing.T) *world {
	w := &world{t: t, blocks: map[string]*v2.AddressBlock{}}
	w.block("p-0", "198.51.100.7", "2001:db8::7")
	w.a, w.b = w.node("a"), w.node("b")
	w.b.cfg.Dial = func(context.Context, string) (net.Conn, error) { return nil, errors.New("there is no way back") }
	w.a.cfg.Dial = func(ctx context.Context, node string) (net.Conn, error) {
		w.wire.Lock()
		defer w.wire.Unlock()
		if w.off {
			return nil, errors.New("the link is down")
		}
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", w.b.listener.Addr().String())
		if err == nil {
			w.conns = append(w.conns, conn)
		}
		return conn, err
	}
	return w
}

// block makes an AddressBlock.
func (w *world) block(name, ipv4, ipv6 string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.blocks[name] = &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid of " + name), ResourceVersion: "1", Labels: map[string]string{v2.LabelFloating: v2.FloatingValue}},
		IPv4:       new(ipv4 + "/32"), IPv6: new(ipv6 + "/128"),
		Floating: &v2.Floating{
			Successors: []v2.FloatingNode{{Node: "b", PodUID: "pod of b"}, {Node: "a", PodUID: "pod of a"}}, MovingTo: "b",
			Holding: v2.FloatingHolding{Holder: "a", PodUID: "pod of a"},
		},
	}
}

// change changes a block.
func (w *world) change(name string, change func(*v2.Floating)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	b := w.blocks[name].DeepCopy()
	change(b.Floating)
	w.blocks[name] = b
}

func (w *world) node(name string) *fakeNode {
	n := &fakeNode{table: &table{flows: map[key]conntrack.Flow{}}, registry: prometheus.NewRegistry(), listener: testkit.Must(net.Listen("tcp", "127.0.0.1:0"))(w.t)}
	ctx, cancel := context.WithCancel(w.t.Context())
	n.Handover = New(ctx, Config{
		Node: name,
		Block: func(name string) *v2.AddressBlock {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.blocks[name]
		},
		Open: func(_ context.Context, pod types.UID) (Flows, error) {
			if pod != types.UID("pod of "+name) {
				return nil, fmt.Errorf("no pod %s", pod)
			}
			return n.table, nil
		},
		Here: func(pod types.UID) bool { return pod == types.UID("pod of "+name) },
		Follow: func(_ context.Context, pod types.UID) (Events, error) {
			if pod != types.UID("pod of "+name) {
				return nil, fmt.Errorf("no pod %s", pod)
			}
			return n.table.subscribe()
		},
		Straggle: func(_ context.Context, pod types.UID, addrs ...netip.Addr) error {
			n.table.mu.Lock()
			defer n.table.mu.Unlock()
			n.straggling = append(n.straggling, addrs...)
			return nil
		},
	}, n.registry)
	n.limits.straggle, n.limits.watch = 0, 100*time.Millisecond
	n.accept = n.Accept
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := n.listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer conn.Close()
				n.settings.Lock()
				accept := n.accept
				n.settings.Unlock()
				accept(ctx, map[string]string{"a": "b", "b": "a"}[name], conn)
			})
		}
	})
	w.t.Cleanup(func() {
		cancel()
		_ = n.listener.Close()
		serving.Wait()
		n.Finish()
	})
	return n
}

// set changes how a node behaves, before the first connection to it.
func (n *fakeNode) set(change func()) {
	n.settings.Lock()
	defer n.settings.Unlock()
	change()
}

// address is that of a block at a node.
func (w *world) address(name, node string) floating.Address {
	w.mu.Lock()
	defer w.mu.Unlock()
	b := w.blocks[name]
	return floating.Address{
		ID: string(b.UID), Block: name, Pod: types.UID("pod of " + node),
		Address: ipam.Address{IPv4: netip.MustParsePrefix(*b.IPv4).Addr(), IPv6: netip.MustParsePrefix(*b.IPv6).Addr()},
	}
}

// open lets the router of a node have flows of an address, of either family by turns.
func (n *fakeNode) open(a floating.Address, from, to int) {
	n.table.mu.Lock()
	defer n.table.mu.Unlock()
	for i := from; i < to; i++ {
		f := flow(a, i)
		n.flows[key{f.Protocol, f.Src, f.Dst}] = f
	}
}

func flow(a floating.Address, i int) conntrack.Flow {
	src, dst, as := netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("192.0.2.1"), a.IPv4
	if i%2 == 1 {
		src, dst, as = netip.MustParseAddr("fd00::9"), netip.MustParseAddr("2001:db8:1::1"), a.IPv6
	}
	port := uint16(i)
	return conntrack.Flow{
		Protocol: unix.IPPROTO_TCP, Src: netip.AddrPortFrom(src, port), Dst: netip.AddrPortFrom(dst, 443), Translated: netip.AddrPortFrom(as, port^1),
		Timeout: uint32(i), Mark: uint32(i) << 8, TCP: conntrack.TCP{State: 3, ScaleOrig: 7, ScaleReply: byte(i), FlagsOrig: 3, FlagsReply: 1},
	}
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
