package natgateway

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/gateway"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// kernel is one in memory that notes what it is asked, and fails as it is told.
type kernel struct {
	mu        sync.Mutex
	calls     []string
	made      map[netip.Addr]dataplane.TunnelLink
	routes    []dataplane.Route
	rules     []dataplane.Rule
	filter    ruleset.Gateway
	forgotten []netip.Addr
	touched   bool // the filter, by others
	mtu       int
	check     error
	refuse    map[netip.Addr]bool // tunnels that can't be made
	fail      map[string]error    // by what is called
	tracked   int                 // connections at most
	flows     map[netip.Addr]int  // connections of clients
	by        []netip.Addr        // the addresses by which they leave
	once      string              // what fails the next time that it is called
	transits  []netip.Addr        // that the node has given
}

func newKernel() *kernel {
	return &kernel{made: map[netip.Addr]dataplane.TunnelLink{}, mtu: 1500, refuse: map[netip.Addr]bool{}, fail: map[string]error{}}
}

func (k *kernel) call(name string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.calls = append(k.calls, name)
	if name == k.once {
		k.once = ""
		return errors.New("no memory")
	}
	return k.fail[name]
}

// failOnce makes the next call of this name fail.
func (k *kernel) failOnce(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.once = name
}

func (k *kernel) Uplink(context.Context, netip.Addr) (rtnl.Link, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return rtnl.Link{Index: 2, Name: "eth0", MTU: k.mtu, Up: true}, k.fail["uplink"]
}

func (k *kernel) Transits(context.Context) ([]netip.Addr, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.transits, k.fail["transits"]
}

func (k *kernel) Check(string, []dataplane.Family) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.check
}

func (k *kernel) Listen(context.Context, uint16, []dataplane.Family) error { return k.call("listen") }

func (k *kernel) Touched(context.Context) (bool, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.touched, nil
}

func (k *kernel) Forget(_ context.Context, addrs ...netip.Addr) (int, error) {
	err := k.call("forget")
	k.mu.Lock()
	defer k.mu.Unlock()
	if err == nil {
		k.forgotten = append(k.forgotten, addrs...)
	}
	return len(addrs), err
}

// Size is none, as long as the kernel tracks nothing.
func (k *kernel) Size() (count, limit int, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, n := range k.flows {
		count += n
	}
	return count, k.tracked, k.fail["size"]
}

func (k *kernel) Clients(_ context.Context, own ...netip.Addr) (map[netip.Addr]int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.by = own
	return maps.Clone(k.flows), k.fail["clients"]
}

type tunnels struct{ *kernel }

func (k tunnels) Links(context.Context) (map[netip.Addr]dataplane.TunnelLink, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	links := map[netip.Addr]dataplane.TunnelLink{}
	for a, l := range k.made {
		links[a] = l
	}
	return links, nil
}

func (k tunnels) Ensure(_ context.Context, want []dataplane.Tunnel) (links map[netip.Addr]dataplane.TunnelLink, r dataplane.Result, err error) {
	if err := k.call("tunnels"); err != nil {
		return nil, r, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	links = map[netip.Addr]dataplane.TunnelLink{}
	for _, t := range want {
		if k.refuse[t.Remote] {
			err = errors.Join(err, fmt.Errorf("%s is refused", t.Remote))
			continue
		}
		if _, ok := k.made[t.Remote]; !ok {
			r.Added++
			k.made[t.Remote] = dataplane.TunnelLink{Index: 100 + len(k.made), Name: "to " + t.Remote.String()}
		}
		links[t.Remote] = k.made[t.Remote]
	}
	return links, r, err
}

func (k tunnels) Prune(_ context.Context, keep []dataplane.Tunnel) (r dataplane.Result, err error) {
	if err := k.call("prune"); err != nil {
		return r, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for a := range k.made {
		if !slices.ContainsFunc(keep, func(t dataplane.Tunnel) bool { return t.Remote == a }) {
			delete(k.made, a)
			r.Deleted++
		}
	}
	return r, nil
}

func (k tunnels) Add(_ context.Context, want []dataplane.Tunnel) (links map[netip.Addr]dataplane.TunnelLink, err error) {
	if err := k.call(fmt.Sprintf("add %d", len(want))); err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	links = map[netip.Addr]dataplane.TunnelLink{}
	for _, t := range want {
		if _, exists := k.made[t.Remote]; exists || k.refuse[t.Remote] {
			err = errors.Join(err, fmt.Errorf("%s is refused", t.Remote))
			continue
		}
		k.made[t.Remote] = dataplane.TunnelLink{Index: 100 + len(k.made), Name: "to " + t.Remote.String()}
		links[t.Remote] = k.made[t.Remote]
	}
	return links, err
}

func (k tunnels) Remove(_ context.Context, links []dataplane.TunnelLink) (n int, err error) {
	if err := k.call(fmt.Sprintf("remove %d", len(links))); err != nil {
		return 0, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for a, l := range k.made {
		if slices.Contains(links, l) {
			delete(k.made, a)
			n++
		}
	}
	return n, nil
}

type routes struct{ *kernel }

func (k routes) Add(_ context.Context, added ...dataplane.Route) error {
	if err := k.call(fmt.Sprintf("route %d", len(added))); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.routes = append(slices.Clone(k.routes), added...)
	return nil
}

func (k routes) Delete(_ context.Context, gone ...dataplane.Route) error {
	if err := k.call(fmt.Sprintf("unroute %d", len(gone))); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.routes = slices.DeleteFunc(slices.Clone(k.routes), func(r dataplane.Route) bool { return slices.Contains(gone, r) })
	return nil
}

func (k routes) Sync(_ context.Context, want []dataplane.Route) (r dataplane.Result, err error) {
	if err := k.call("routes"); err != nil {
		return r, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	slices.SortFunc(k.routes, dataplane.CompareRoutes)
	if !slices.Equal(k.routes, want) {
		r.Replaced++
	}
	k.routes = want
	return r, nil
}

type rules struct{ *kernel }

func (k rules) Sync(_ context.Context, want []dataplane.Rule) (r dataplane.Result, err error) {
	if err := k.call("rules"); err != nil {
		return r, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !slices.Equal(k.rules, want) {
		r.Replaced++
	}
	k.rules = want
	return r, nil
}

type filter struct{ *kernel }

func (k filter) Sync(_ context.Context, want ruleset.Gateway) (r dataplane.Result, err error) {
	if err := k.call(fmt.Sprintf("filter of %d", len(want.Clients))); err != nil {
		return r, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !slices.Equal(k.filter.Clients, want.Clients) {
		r.Replaced++
	}
	k.filter, k.touched = want, false
	return r, nil
}

// source tells what a test says.
type source chan []rtnl.Change

func (s source) Run(ctx context.Context, _ time.Duration, told func([]rtnl.Change)) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case changes := <-s:
			told(changes)
		}
	}
}

// fixture is a gateway in a bubble of its own time.
type fixture struct {
	*Gateway
	*kernel
	t        *testing.T
	egresses cache.Indexer
	slices   [2]cache.Indexer
	changes  source
	registry *prometheus.Registry

	start   func()
	running bool

	mu         sync.Mutex
	conditions map[string]error
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{t: t, kernel: newKernel(), changes: make(source), registry: prometheus.NewRegistry(), conditions: map[string]error{}}
	egresses := cache.NewSharedIndexInformer(nil, &v2.Egress{}, 0, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	f.egresses = egresses.GetIndexer()
	var lists []cache.SharedIndexInformer
	for i := range f.slices {
		list := cache.NewSharedIndexInformer(nil, &discoveryv1.EndpointSlice{}, 0, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
		lists, f.slices[i] = append(lists, list), list.GetIndexer()
	}
	var err error
	f.Gateway, err = New(Config{
		Namespace: "internet", Egress: "nat", Config: gateway.Config{Pod: "nat-0", Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")}, Port: 5555}, Resync: time.Minute,
	}, Kernel{f.kernel, tunnels{f.kernel}, routes{f.kernel}, rules{f.kernel}, filter{f.kernel}, f.kernel}, egresses, lists, f.registry,
		func(condition string, reason error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.conditions[condition] = reason
		})
	if err != nil {
		t.Fatal(err)
	}
	f.synced = nil // nothing runs the informers
	f.check(f.egresses.Add(&v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat"}, Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}}}))
	return f
}

func (f *fixture) check(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

// run runs the gateway while test does.
func run(t *testing.T, test func(*fixture)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		f.start = func() {
			f.running = true
			running.Go(func() { f.check(f.Run(ctx)) })
			running.Go(func() { f.check(f.Watch(ctx, f.changes)) })
		}
		test(f)
		cancel()
		running.Wait()
	})
}

// list makes pods with these addresses the clients of the first list.
func (f *fixture) list(pods map[string]string) { f.listIn(0, pods) }

// listIn makes pods with these addresses the clients of a list.
func (f *fixture) listIn(list int, pods map[string]string) {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat-clients-1"}}
	for pod, addr := range pods {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{addr}, TargetRef: &corev1.ObjectReference{Namespace: "ns", Name: pod, UID: types.UID(pod)},
		})
	}
	f.check(f.slices[list].Add(s))
	if f.running {
		f.changed()
	}
}

// did returns what the kernel was asked since the last call, after a while.
func (f *fixture) did(after time.Duration) string {
	time.Sleep(after)
	synctest.Wait()
	f.kernel.mu.Lock()
	defer f.kernel.mu.Unlock()
	calls := strings.Join(f.calls, ", ")
	f.calls = nil
	return calls
}

// set changes the kernel.
func (f *fixture) set(change func(*kernel)) {
	f.kernel.mu.Lock()
	defer f.kernel.mu.Unlock()
	change(f.kernel)
}

func (f *fixture) expect(after time.Duration, want string) {
	f.t.Helper()
	if got := f.did(after); got != want {
		f.t.Errorf("it did %s, not %s", got, want)
	}
}

func (f *fixture) condition(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	reason, told := f.conditions[name]
	if !told {
		return errors.New("nothing was told")
	}
	return reason
}

const moment = 100 * time.Millisecond
