package router_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	corefake "k8s.io/client-go/kubernetes/fake"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	"github.com/coil-net/coil/generated/informers/externalversions"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/router"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

const (
	mainTable = 254
	protocol  = 31
)

// bench is a router at work in a namespace with a link to the others, on fake API servers.
type bench struct {
	ns       *netnstest.NS
	core     *corefake.Clientset
	coil     *fake.Clientset
	registry *prometheus.Registry

	mu   sync.Mutex
	last error // of the latest sync
}

func node(name string, addrs ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for _, a := range addrs {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return n
}

func block(name, holder string, v4, v6 string) *v2.AddressBlock {
	b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v2.LabelNode: holder}}}
	if v4 != "" {
		b.IPv4 = &v4
	}
	if v6 != "" {
		b.IPv6 = &v6
	}
	return b
}

func newBench(t *testing.T, nodes []runtime.Object, blocks ...runtime.Object) *bench {
	t.Helper()
	b := &bench{ns: netnstest.New(t), core: corefake.NewSimpleClientset(nodes...), coil: fake.NewSimpleClientset(blocks...), registry: prometheus.NewRegistry()}
	b.ns.IP(t, "link", "add", "uplink", "type", "veth", "peer", "others")
	b.ns.IP(t, "link", "set", "others", "up")
	b.up(t)
	h, err := rtnl.New(b.ns.NS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	nodeInformers := informers.NewSharedInformerFactory(b.core, 0)
	blockInformers := externalversions.NewSharedInformerFactory(b.coil, 0)
	r, err := router.New(router.Config{NodeName: "self", Table: mainTable, Protocol: protocol, UpdateInterval: time.Hour},
		nodeInformers.Core().V1().Nodes().Informer(), blockInformers.Coil().V2().AddressBlocks().Informer(),
		route.New(h, protocol, mainTable), b.registry, func(err error) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.last = err
		})
	if err != nil {
		t.Fatal(err)
	}
	changes, err := h.Subscribe(rtnl.Interest{Protocol: protocol, Tables: []int{mainTable}})
	if err != nil {
		t.Fatal(err)
	}
	// That of the test ends before its cleanup, which looks whether the router has.
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	nodeInformers.Start(ctx.Done())
	blockInformers.Start(ctx.Done())
	ended := make(chan error, 2)
	go func() { ended <- r.Run(ctx) }()
	go func() { ended <- r.Watch(ctx, changes) }()
	t.Cleanup(func() {
		select {
		case err := <-ended:
			t.Errorf("the router ended by itself: %v", err)
			ended <- nil
		default:
		}
		cancel()
		if err := errors.Join(<-ended, <-ended, changes.Close()); err != nil {
			t.Error(err)
		}
		nodeInformers.Shutdown()
		blockInformers.Shutdown()
	})
	return b
}

// up brings the uplink up, with the node's addresses.
func (b *bench) up(t *testing.T) {
	t.Helper()
	b.ns.IP(t, "link", "set", "uplink", "up")
	b.ns.IP(t, "address", "replace", "192.0.2.1/24", "dev", "uplink")
	b.ns.IP(t, "address", "replace", "2001:db8::1/64", "dev", "uplink", "nodad")
}

// routes are the destinations of the router's routes.
func (b *bench) routes(t *testing.T) map[netip.Prefix]bool {
	t.Helper()
	found := map[netip.Prefix]bool{}
	for _, family := range []string{"-4", "-6"} {
		for line := range strings.Lines(b.ns.IP(t, family, "route", "show", "proto", fmt.Sprint(protocol))) {
			dst := strings.Fields(line)[0]
			if !strings.Contains(dst, "/") {
				dst = netip.PrefixFrom(netip.MustParseAddr(dst), netip.MustParseAddr(dst).BitLen()).String()
			}
			found[netip.MustParsePrefix(dst)] = true
		}
	}
	return found
}

func (b *bench) await(t *testing.T, within time.Duration, want ...string) {
	t.Helper()
	testkit.Eventually(t, within, "routes to other nodes", func() error {
		got := b.routes(t)
		for _, w := range want {
			if !got[netip.MustParsePrefix(w)] {
				return fmt.Errorf("%s is missing in %v", w, got)
			}
		}
		if len(got) != len(want) {
			return fmt.Errorf("%v, not %v", got, want)
		}
		return nil
	})
}

func (b *bench) repairs(t *testing.T) float64 {
	t.Helper()
	families, err := b.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "coil_repairs_total" {
			return f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	t.Fatal("coil_repairs_total is missing")
	return 0
}

// Routes that others delete, or that go with a link or an address, come back within seconds,
// though the next regular sync is an hour away.
func TestRoutesComeBack(t *testing.T) {
	b := newBench(t, []runtime.Object{node("self", "192.0.2.1", "2001:db8::1"), node("other", "192.0.2.2", "2001:db8::2")},
		block("p-0", "self", "10.0.0.0/27", "fd00::/123"), block("p-1", "other", "10.0.0.32/27", "fd00::20/123"),
		block("p-2", "other", "10.0.0.64/27", "fd00::40/123"))
	all := []string{"10.0.0.32/27", "fd00::20/123", "10.0.0.64/27", "fd00::40/123"}
	b.await(t, 10*time.Second, all...)
	b.ns.IP(t, "route", "add", "198.51.100.0/24", "via", "192.0.2.9", "proto", "99")
	if n := b.repairs(t); n != 0 {
		t.Errorf("%v repairs at the start", n)
	}
	for _, c := range []struct {
		name    string
		spoil   func()
		repairs float64 // at least
	}{
		{"one, IPv4", func() { b.ns.IP(t, "route", "del", "10.0.0.32/27") }, 1},
		{"one, IPv6", func() { b.ns.IP(t, "-6", "route", "del", "fd00::40/123") }, 1},
		{"all", func() {
			b.ns.IP(t, "-4", "route", "flush", "proto", fmt.Sprint(protocol))
			b.ns.IP(t, "-6", "route", "flush", "proto", fmt.Sprint(protocol))
		}, 4},
		{"one that sends elsewhere", func() {
			b.ns.IP(t, "route", "replace", "10.0.0.32/27", "via", "192.0.2.77", "proto", fmt.Sprint(protocol))
		}, 0},
		{"uplink down and up", func() { b.ns.IP(t, "link", "set", "uplink", "down"); b.up(t) }, 4},
		{"address of the node", func() { b.ns.IP(t, "address", "del", "192.0.2.1/24", "dev", "uplink"); b.up(t) }, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := b.repairs(t)
			c.spoil()
			b.await(t, 5*time.Second, all...)
			testkit.Eventually(t, 5*time.Second, "repairs are counted", func() error {
				if got := b.repairs(t) - before; got < c.repairs {
					return fmt.Errorf("%v repairs", got)
				}
				return nil
			})
			testkit.Eventually(t, 5*time.Second, "the gateway", func() error {
				if out := b.ns.IP(t, "route", "show", "10.0.0.32/27"); !strings.Contains(out, "via 192.0.2.2") {
					return errors.New(out)
				}
				return nil
			})
		})
	}
	// The address took it along; nobody brought it back in the router's stead.
	if out := b.ns.IP(t, "route", "show", "proto", "99"); out != "" {
		t.Errorf("somebody made a foreign route: %s", out)
	}
}

// One object that can't be understood, or that the kernel refuses, costs its own route only.
func TestBadObjects(t *testing.T) {
	b := newBench(t, []runtime.Object{
		node("self", "192.0.2.1", "2001:db8::1"), node("other", "192.0.2.2", "2001:db8::2"),
		node("no-address"), node("bad-address", "not-an-address"), node("far-away", "203.0.113.1", "2001:db8:ffff::1"), node("v4-only", "192.0.2.3"),
	},
		block("good", "other", "10.0.0.32/27", "fd00::20/123"),
		block("homeless", "no-address", "10.0.1.0/27", "fd00::100/123"),
		block("misnamed", "bad-address", "10.0.1.32/27", ""),
		block("unreachable", "far-away", "10.0.2.0/27", "fd00::200/123"), // the kernel refuses the gateway
		block("half", "v4-only", "10.0.3.0/27", "fd00::300/123"),
		block("orphan", "unknown", "10.0.4.0/27", ""),
		block("nobodys", "", "10.0.4.32/27", ""),
		block("invalid", "other", "10.0.5.0/99", ""),
		block("empty", "other", "", ""),
	)
	good := []string{"10.0.0.32/27", "fd00::20/123", "10.0.3.0/27"}
	b.await(t, 10*time.Second, good...)
	// It works on: what comes later is routed, what is lost comes back.
	if _, err := b.coil.CoilV2().AddressBlocks().Create(t.Context(), block("later", "other", "10.0.0.64/27", ""), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.await(t, 10*time.Second, append(good, "10.0.0.64/27")...)
	b.ns.IP(t, "route", "del", "10.0.0.32/27")
	b.await(t, 5*time.Second, append(good, "10.0.0.64/27")...)
	testkit.Eventually(t, 5*time.Second, "the repair is counted", func() error {
		if b.repairs(t) != 1 {
			return fmt.Errorf("%v repairs", b.repairs(t))
		}
		return nil
	})
	b.mu.Lock()
	err := b.last
	b.mu.Unlock()
	if err == nil || !strings.Contains(err.Error(), "10.0.2.0/27 via 203.0.113.1") {
		t.Errorf("the refused route isn't named: %v", err)
	}
	if n, err := testutil.GatherAndCount(b.registry, "coil_router_syncs_total"); n != 1 || err != nil {
		t.Errorf("coil_router_syncs_total: %d, %v", n, err)
	}
}

// fragile is a table whose first sync panics.
type fragile struct{ syncs atomic.Int32 }

func (f *fragile) Sync(context.Context, []dataplane.Route) (dataplane.Result, error) {
	if f.syncs.Add(1) == 1 {
		panic("an odd route")
	}
	return dataplane.Result{}, nil
}

// A sync that panics is tried again, and isn't told of as one that has made the routes.
func TestPanic(t *testing.T) {
	nodes := informers.NewSharedInformerFactory(corefake.NewSimpleClientset(), 0)
	blocks := externalversions.NewSharedInformerFactory(fake.NewSimpleClientset(), 0)
	table := &fragile{}
	told := make(chan int32, 100)
	r := testkit.Must(router.New(router.Config{NodeName: "self", Table: mainTable, Protocol: protocol, UpdateInterval: time.Hour},
		nodes.Core().V1().Nodes().Informer(), blocks.Coil().V2().AddressBlocks().Informer(), table, prometheus.NewRegistry(),
		func(err error) {
			if err == nil {
				told <- table.syncs.Load()
			}
		}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	nodes.Start(ctx.Done())
	blocks.Start(ctx.Done())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	if n := <-told; n != 2 {
		t.Errorf("told of success after %d syncs, want 2", n)
	}
	cancel()
	testkit.Check(t, <-ended)
	nodes.Shutdown()
	blocks.Shutdown()
}
