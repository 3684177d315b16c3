package lbgateway

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// The resources of the API server in memory.
const (
	gatewayResource = "loadbalancergateways"
	blockResource   = "addressblocks"
	serviceResource = "services"
	sliceResource   = "endpointslices"
	nodeResource    = "nodes"
	poolResource    = "addresspools"
)

var patience = testkit.Timeout(10 * time.Second)

// scene is a gateway machine, and an API server.
type scene struct {
	*Gateway
	*fakeapi.View
	t       *testing.T
	s       *fakeapi.Server
	machine *netnstest.NS
	table   *faulty
	vrrp    VRRP // none unless a test has one
	file    string
	end     func()
}

// faulty is a table that the kernel may refuse.
type faulty struct {
	*nft.Table
	refuses atomic.Pointer[error]
}

func (f *faulty) Sync(ctx context.Context, r dataplane.Ruleset) (dataplane.Result, error) {
	if err := f.refuses.Load(); err != nil {
		return dataplane.Result{}, *err
	}
	return f.Table.Sync(ctx, r)
}

func (f *faulty) Change(ctx context.Context, c ...dataplane.SetChange) error {
	if err := f.refuses.Load(); err != nil {
		return *err
	}
	return f.Table.Change(ctx, c...)
}

// newScene has two nodes that are ready, and the gateway gw1 of the pool dmz.
func newScene(t *testing.T) *scene {
	t.Helper()
	sc := &scene{t: t, s: fakeapi.New(t, map[string]runtime.Object{}), machine: netnstest.New(t), file: filepath.Join(t.TempDir(), "last.json")}
	sc.machine.IP(t, "link", "set", "lo", "up")
	sc.spec(func(*v2.LoadBalancerGatewaySpec) {})
	for i := range 2 {
		sc.node(i, true)
	}
	sc.start()
	t.Cleanup(func() { sc.end() })
	return sc
}

// start runs a gateway that has seen everything.
func (sc *scene) start() {
	sc.t.Helper()
	sc.boot()
	sc.DeliverAll()
	ctx, cancel := context.WithCancel(context.WithoutCancel(sc.t.Context()))
	done := make(chan error, 1)
	go func(g *Gateway) { done <- g.Run(ctx) }(sc.Gateway)
	sc.end = sync.OnceFunc(func() {
		cancel()
		testkit.Check(sc.t, <-done)
	})
}

// boot makes a gateway that has seen nothing.
func (sc *scene) boot() {
	sc.t.Helper()
	table := testkit.Must(nft.New(sc.machine.NS, dataplane.NftTableLB))(sc.t)
	sc.t.Cleanup(table.Close)
	flows := testkit.Must(conntrack.New(sc.machine.NS))(sc.t)
	sc.t.Cleanup(flows.Close)
	sc.table = &faulty{Table: table}
	coil := fake.NewSimpleClientset()
	coil.PrependReactor("*", "*", sc.s.React)
	informer := func(o runtime.Object) cache.SharedIndexInformer {
		return cache.NewSharedIndexInformer(&cache.ListWatch{}, o, 0, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	}
	cfg := Config{
		Name: "gw1", Coil: coil, Table: sc.table, Flows: flows, VRRP: sc.vrrp, File: sc.file,
		Gateways: informer(&v2.LoadBalancerGateway{}), Blocks: informer(&v2.AddressBlock{}), Services: informer(&corev1.Service{}),
		Slices: informer(&discoveryv1.EndpointSlice{}), Nodes: informer(&corev1.Node{}), Pools: informer(&v2.AddressPool{}),
	}
	sc.Gateway = testkit.Must(New(sc.t.Context(), cfg))(sc.t)
	sc.synced = nil // the caches are filled by hand
	handlers := map[string]func(before, after fakeapi.Object){
		gatewayResource: func(a, b fakeapi.Object) {
			before, after := fakeapi.As[v2.LoadBalancerGateway](a), fakeapi.As[v2.LoadBalancerGateway](b)
			if before == nil || after == nil || !sameSpec(before, after) {
				sc.allChanged()
			}
		},
		nodeResource: func(_, _ fakeapi.Object) { sc.allChanged() },
		poolResource: func(_, _ fakeapi.Object) { sc.allChanged() },
		blockResource: func(a, b fakeapi.Object) {
			sc.blockChanged(fakeapi.As[v2.AddressBlock](a), fakeapi.As[v2.AddressBlock](b))
		},
		serviceResource: func(a, b fakeapi.Object) {
			for _, o := range []fakeapi.Object{a, b} {
				if s := fakeapi.As[corev1.Service](o); s != nil {
					sc.serviceChanged(s.Namespace + "/" + s.Name)
				}
			}
		},
		sliceResource: func(a, b fakeapi.Object) {
			sc.sliceChanged(fakeapi.As[discoveryv1.EndpointSlice](a), fakeapi.As[discoveryv1.EndpointSlice](b))
		},
	}
	sc.View = sc.s.View(map[string]cache.Indexer{
		gatewayResource: cfg.Gateways.GetIndexer(), blockResource: cfg.Blocks.GetIndexer(), serviceResource: cfg.Services.GetIndexer(),
		sliceResource: cfg.Slices.GetIndexer(), nodeResource: cfg.Nodes.GetIndexer(), poolResource: cfg.Pools.GetIndexer(),
	}, func(resource string, before, after fakeapi.Object) { handlers[resource](before, after) })
}

// spec changes the spec of the machine's LoadBalancerGateway.
func (sc *scene) spec(change func(*v2.LoadBalancerGatewaySpec)) {
	own := sc.own()
	if own == nil {
		own = &v2.LoadBalancerGateway{ObjectMeta: metav1.ObjectMeta{Name: "gw1"}, Spec: v2.LoadBalancerGatewaySpec{Pools: []string{"dmz"}}}
	}
	own.Generation++
	change(&own.Spec)
	sc.s.Put(gatewayResource, own)
}

// own is the machine's LoadBalancerGateway.
func (sc *scene) own() *v2.LoadBalancerGateway {
	return fakeapi.Find[*v2.LoadBalancerGateway](sc.s, gatewayResource, "gw1")
}

func (sc *scene) node(i int, ready bool) {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("n", i)}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: map[bool]corev1.ConditionStatus{true: corev1.ConditionTrue, false: corev1.ConditionUnknown}[ready]}}
	n.Status.Addresses = []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: fmt.Sprint("10.0.0.", i+1)}, {Type: corev1.NodeInternalIP, Address: fmt.Sprintf("fd00::%d", i+1)},
	}
	sc.s.Put(nodeResource, n)
}

// service makes a Service, or changes it, whose port 80 of TCP and 53 of UDP have NodePorts.
func (sc *scene) service(name string, change func(*corev1.Service)) {
	s := fakeapi.Find[*corev1.Service](sc.s, serviceResource, "shop/"+name)
	if s == nil {
		s = &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}}
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Spec.ClusterIPs, s.Spec.IPFamilies = []string{"10.96.0.1", "fd96::1"}, []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
		s.Spec.Ports = []corev1.ServicePort{
			{Name: "web", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080}, {Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53, NodePort: 30053},
		}
	}
	if s.Generation++; change != nil {
		change(s)
	}
	sc.s.Put(serviceResource, s)
}

// block makes the block of an address, or changes it. Its ports are 80 of TCP of one Service and 53 of UDP of another one; the empty one has none.
func (sc *scene) block(i int, web, dns string) {
	b := fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, fmt.Sprint("dmz-", i))
	if b == nil {
		b = &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("dmz-", i), Labels: map[string]string{v2.LabelPool: "dmz", v2.LabelAnnounce: "Gateway"}}, Index: int32(i)}
		b.IPv4, b.IPv6 = new(fmt.Sprintf("198.51.100.%d/32", i)), new(fmt.Sprintf("2001:db8::%d/128", i))
		b.Floating = &v2.Floating{}
	}
	b.Floating.Ports = nil
	if web != "" {
		b.Floating.Ports = append(b.Floating.Ports, v2.FloatingPort{Protocol: corev1.ProtocolTCP, Port: 80, Service: "shop/" + web})
	}
	if dns != "" {
		b.Floating.Ports = append(b.Floating.Ports, v2.FloatingPort{Protocol: corev1.ProtocolUDP, Port: 53, Service: "shop/" + dns})
	}
	sc.s.Put(blockResource, b)
}

// endpoints makes an EndpointSlice of a Service, one of several.
func (sc *scene) endpoints(service string, n int, addresses ...string) {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Namespace: "shop", Name: fmt.Sprintf("%s-%d", service, n), Labels: map[string]string{discoveryv1.LabelServiceName: service},
	}}
	tcp, udp := corev1.ProtocolTCP, corev1.ProtocolUDP
	s.Ports = []discoveryv1.EndpointPort{{Name: new("web"), Protocol: &tcp, Port: new(int32(8080))}, {Name: new("dns"), Protocol: &udp, Port: new(int32(5353))}}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}, NodeName: new("n0")})
	}
	sc.s.Put(sliceResource, s)
}

// await delivers all events, and waits until something holds.
func (sc *scene) await(what string, holds func() error) {
	sc.t.Helper()
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		sc.DeliverAll()
		if err = holds(); err == nil {
			return
		}
	}
	sc.t.Fatalf("%s: %v", what, err)
}

// settled waits until the kernel has what a gateway would make that sees everything for the first time.
func (sc *scene) settled(when string) {
	sc.t.Helper()
	sc.await(when, func() error {
		scratch := &Gateway{cfg: sc.cfg, gateways: sc.gateways, pools: sc.pools, blocks: sc.Gateway.blocks, services: sc.services, slices: sc.slices, nodes: sc.nodes, changed: map[string]bool{}, all: true, does: nothing()}
		keys, _ := scratch.keys()
		want, _ := scratch.next(keys)
		sc.mu.Lock()
		want.shape = sc.does.shape // which only grows
		want.guarded = want.addresses
		hash := sc.does.hash
		sc.mu.Unlock()
		if hash != want.hash {
			return fmt.Errorf("the hash is %x, want %x", hash, want.hash)
		}
		table := testkit.Must(nft.New(sc.machine.NS, dataplane.NftTableLB))(sc.t)
		defer table.Close()
		if len(want.spec.Pools) == 0 {
			if exists, err := table.Exists(sc.t.Context()); err != nil || exists {
				return fmt.Errorf("the table is there: %w", err)
			}
			return nil
		}
		return table.Check(sc.t.Context(), want.ruleset())
	})
}

// told waits until the status says that all that is in AddressBlocks is done.
func (sc *scene) told(when string, holds func(v2.LoadBalancerGatewayStatus) error) {
	sc.t.Helper()
	sc.await(when, func() error {
		version := ""
		for _, b := range fakeapi.All[*v2.AddressBlock](sc.s, blockResource) {
			version = newer(version, b.ResourceVersion)
		}
		st := sc.own().Status
		if st.Applied.Blocks != version {
			return fmt.Errorf("the status is of blocks up to %q, want %q", st.Applied.Blocks, version)
		}
		return holds(st)
	})
}

// condition is the reason of the condition Applied.
func condition(st v2.LoadBalancerGatewayStatus) string {
	i := slices.IndexFunc(st.Conditions, func(c metav1.Condition) bool { return c.Type == v2.GatewayApplied })
	if i < 0 {
		return ""
	}
	return st.Conditions[i].Reason
}
