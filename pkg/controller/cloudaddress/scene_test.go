package cloudaddress

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go4.org/netipx"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	"github.com/coil-net/coil/generated/informers/externalversions"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/openstack"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

const (
	poolResource    = "addresspools"
	claimResource   = "addressclaims"
	gatewayResource = "loadbalancergateways"
	namespace       = "kube-system"
	resync          = 5 * time.Minute
)

// scene is a controller that runs in a bubble of testing/synctest, an API server, and a project of a cloud.
type scene struct {
	*Controller
	*fakeapi.View
	t     *testing.T
	s     *fakeapi.Server
	cloud *project
	stop  func()
}

func inScene(t *testing.T, do func(t *testing.T, sc *scene)) {
	synctest.Test(t, func(t *testing.T) {
		sc := &scene{t: t, s: fakeapi.New(t, nil), cloud: &project{addresses: map[string]openstack.Address{}, pairs: map[string][]netip.Prefix{}, foreign: map[netip.Addr]bool{}}}
		sc.start()
		do(t, sc)
	})
}

// start runs a controller that has seen everything.
func (sc *scene) start() {
	sc.t.Helper()
	client := fake.NewSimpleClientset()
	client.PrependReactor("*", "*", sc.s.React)
	coil := externalversions.NewSharedInformerFactory(client, 0).Coil().V2()
	var err error
	sc.Controller, err = New(Config{
		Coil: client, Pools: coil.AddressPools(), Claims: coil.AddressClaims(), Gateways: coil.LoadBalancerGateways(), Namespace: namespace, Resync: resync,
		Open: func(context.Context, v2.PoolOpenStack) (Cloud, error) { return sc.cloud, nil }, Recorder: events.NewFakeRecorder(100000),
	})
	if err != nil {
		sc.t.Fatal(err)
	}
	sc.synced = nil // the caches are filled by hand
	sc.View = sc.s.View(map[string]cache.Indexer{
		poolResource: coil.AddressPools().Informer().GetIndexer(), claimResource: coil.AddressClaims().Informer().GetIndexer(), gatewayResource: coil.LoadBalancerGateways().Informer().GetIndexer(),
	}, func(_ string, before, after fakeapi.Object) {
		for _, o := range []fakeapi.Object{before, after} {
			switch o := o.(type) {
			case *v2.AddressPool:
				sc.lists.Add(o.Name)
			case *v2.AddressClaim:
				sc.claimChanged(o)
			}
		}
		was, _ := before.(*v2.LoadBalancerGateway)
		if is, _ := after.(*v2.LoadBalancerGateway); is != nil || was != nil {
			sc.gatewayChanged(was, is)
		}
	})
	sc.DeliverAll()
	sc.stop = testkit.Background(context.WithoutCancel(sc.t.Context()), sc.t, sc.Controller.Run)
}

// run lets time pass.
func (sc *scene) run(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		synctest.Wait()
		sc.DeliverAll()
	}
	synctest.Wait()
}

// pool makes a pool of 10.N.0.0/24.
func (sc *scene) pool(name string, n int) {
	subnet := fmt.Sprintf("10.%d.0.0/24", n)
	sc.s.Put(poolResource, &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.AddressPoolSpec{
		Announce: v2.AnnounceGateway, Subnets: []v2.SubnetSet{{IPv4: &subnet}}, OpenStack: &v2.PoolOpenStack{SubnetIDs: []string{fmt.Sprint(n)}},
	}})
}

// pairPool makes a pool of the pairs of 10.1.0.0/28 and fd00:1::/124.
func (sc *scene) pairPool(name string) {
	ipv4, ipv6 := "10.1.0.0/28", "fd00:1::/124"
	sc.s.Put(poolResource, &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.AddressPoolSpec{
		Announce: v2.AnnounceGateway, Subnets: []v2.SubnetSet{{IPv4: &ipv4, IPv6: &ipv6}}, OpenStack: &v2.PoolOpenStack{SubnetIDs: []string{"four", "six"}},
	}})
}

// ask makes a claim of any address.
func (sc *scene) ask(name, pool string) {
	sc.s.Put(claimResource, &v2.AddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: v2.AddressClaimSpec{Pool: pool, Count: new(int32(1))}})
}

// give deletes a claim, which its finalizer keeps.
func (sc *scene) give(name string) {
	c := sc.claim(name)
	c.DeletionTimestamp = new(metav1.Now())
	sc.s.Put(claimResource, c)
}

// gateway makes a gateway, or changes it.
func (sc *scene) gateway(name, port string, pools ...string) {
	g := fakeapi.Find[*v2.LoadBalancerGateway](sc.s, gatewayResource, name)
	if g == nil {
		g = &v2.LoadBalancerGateway{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	g.Spec = v2.LoadBalancerGatewaySpec{Pools: pools, OpenStack: &v2.GatewayOpenStack{PortID: port}}
	sc.s.Put(gatewayResource, g)
}

func (sc *scene) claim(name string) *v2.AddressClaim {
	return fakeapi.Find[*v2.AddressClaim](sc.s, claimResource, namespace+"/"+name)
}

// is returns the reason of a condition of a claim.
func (sc *scene) is(name, condition string) string {
	if c := meta.FindStatusCondition(sc.claim(name).Status.Conditions, condition); c != nil {
		return c.Reason
	}
	return ""
}

// wantsPairs compares the address pairs of a port.
func (sc *scene) wantsPairs(when, port string, want ...string) {
	sc.t.Helper()
	var got []string
	sc.cloud.mu.Lock()
	defer sc.cloud.mu.Unlock()
	for _, p := range sc.cloud.pairs[port] {
		got = append(got, p.String())
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		sc.t.Errorf("%s: port %s has the pairs %q, want %q", when, port, got, want)
	}
}

// project is one of a cloud in memory, which does what package openstack says.
type project struct {
	mu        sync.Mutex
	addresses map[string]openstack.Address
	pairs     map[string][]netip.Prefix
	calls     []string
	// fault refuses calls; nil refuses none.
	fault func(call string) error
	// lost loses the answers of calls that change an address; nil loses none.
	lost func(call string) bool
	// foreign are the addresses that ports of others have; those that are false can't be seen.
	foreign map[netip.Addr]bool
	// kept are the keys of the last sweep.
	kept map[string]bool
}

// refuse has calls refused from now on.
func (p *project) refuse(fault func(call string) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fault = fault
}

// mislay has answers to calls that change an address lost from now on.
func (p *project) mislay(lost func(call string) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lost = lost
}

// made returns the calls since the last time.
func (p *project) made() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	calls := p.calls
	p.calls = nil
	return calls
}

// has returns the addresses that there are.
func (p *project) has() map[string]openstack.Address {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.addresses)
}

// keeps returns the keys of the last sweep.
func (p *project) keeps() map[string]bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.kept
}

func (p *project) call(name string) error {
	p.calls = append(p.calls, name)
	if p.fault != nil {
		return p.fault(name)
	}
	return nil
}

func (p *project) List(context.Context) (all []openstack.Address, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.call("list"); err != nil {
		return nil, err
	}
	for _, a := range p.addresses {
		all = append(all, a)
	}
	return all, nil
}

// take gives addresses to ports of others, which can be seen or not.
func (p *project) take(seen bool, addrs ...netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range addrs {
		p.foreign[a] = seen
	}
}

// free takes an address from the ports of others.
func (p *project) free(addr netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.foreign, addr)
}

// lose has the port of a key lose addresses.
func (p *project) lose(key string, addrs ...netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.addresses[key]
	a.Fixed = slices.DeleteFunc(slices.Clone(a.Fixed), func(f netip.Addr) bool { return slices.Contains(addrs, f) })
	p.addresses[key] = a
}

// taken says whether a port has an address, but for that of a key.
func (p *project) taken(addr netip.Addr, but string) bool {
	_, taken := p.foreign[addr]
	for key, a := range p.addresses {
		taken = taken || key != but && slices.Contains(a.Fixed, addr)
	}
	return taken
}

func (p *project) Ensure(_ context.Context, seen openstack.Address, want openstack.Want) (openstack.Address, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	lacking := func(a openstack.Address) []netip.Addr {
		return slices.DeleteFunc(slices.Clone(want.Addresses), func(w netip.Addr) bool { return slices.Contains(a.Fixed, w) })
	}
	has := func(a openstack.Address) bool { return a.PortID != "" && len(lacking(a)) == 0 }
	if has(seen) {
		return seen, nil
	}
	name := "ensure " + seen.Key
	if want.Replace {
		name = fmt.Sprint("replace ", seen.Key, " ", want.Addresses)
	}
	if err := p.call(name); err != nil {
		return seen, err
	}
	a := p.addresses[seen.Key]
	if has(a) {
		return a, nil
	}
	for _, addr := range lacking(a) {
		if p.taken(addr, a.Key) {
			return a, &openstack.Error{
				Reason: openstack.Conflict, Code: 409, Type: "IpAddressAlreadyAllocated", Message: fmt.Sprintf("IP address %s already allocated in subnet", addr),
			}
		}
	}
	a = openstack.Address{Key: seen.Key, PortID: "port-of-" + seen.Key, Fixed: append(a.Fixed, lacking(a)...)}
	if want.Replace {
		a.Fixed = slices.Clone(want.Addresses)
	}
	for lowest := netip.MustParseAddr("10.1.0.1"); len(a.Fixed) == 0; lowest = lowest.Next() {
		if !p.taken(lowest, "") {
			a.Fixed = []netip.Addr{lowest}
		}
	}
	p.addresses[seen.Key] = a
	if p.lost != nil && p.lost(name) {
		return seen, &openstack.Error{Reason: openstack.Temporary, Message: "no answer"}
	}
	return a, nil
}

// Room says that Neutron gives out 10.1.0.1 to 10.1.0.11.
func (p *project) Room(context.Context) (room openstack.Room, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.call("room"); err != nil {
		return room, err
	}
	var given, taken netipx.IPSetBuilder
	given.AddRange(netipx.IPRangeFrom(netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("10.1.0.11")))
	for addr, seen := range p.foreign {
		if seen {
			taken.Add(addr)
		}
	}
	for _, a := range p.addresses {
		for _, addr := range a.Fixed {
			taken.Add(addr)
		}
	}
	room.Given, err = given.IPSet()
	if err == nil {
		room.Taken, err = taken.IPSet()
	}
	return room, err
}

func (p *project) Delete(_ context.Context, key string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.call("delete " + key); err != nil {
		return err
	}
	delete(p.addresses, key)
	return nil
}

func (p *project) Sweep(_ context.Context, keep map[string]bool) ([]openstack.Object, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kept = keep
	return nil, p.call("sweep")
}

func (p *project) EnsurePairs(_ context.Context, gateways []string, want []netip.Prefix, seen []openstack.Address) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, port := range gateways {
		if err := p.call("pairs " + port); err != nil {
			return err
		}
		next := slices.Clone(want)
		for _, has := range p.pairs[port] {
			own := slices.ContainsFunc(seen, func(a openstack.Address) bool { return slices.Contains(a.Fixed, has.Addr()) })
			if !own && !slices.Contains(next, has) {
				next = append(next, has)
			}
		}
		p.pairs[port] = next
	}
	return nil
}
