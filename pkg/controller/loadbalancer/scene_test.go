package loadbalancer

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	corefake "k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	"github.com/coil-net/coil/generated/informers/externalversions"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// The resources of the API server in memory.
const (
	serviceResource = "services"
	nodeResource    = "nodes"
	sliceResource   = "endpointslices"
	poolResource    = "addresspools"
	claimResource   = "addressclaims"
	blockResource   = "addressblocks"
	gatewayResource = "loadbalancergateways"
	policyResource  = "networkpolicies"
	podResource     = "pods"
)

// namespace has the claims.
const namespace = "kube-system"

// scene is a controller that runs in a bubble of testing/synctest, an API server, and what gives claims addresses and has nodes take these.
type scene struct {
	*Controller
	*fakeapi.View
	t      *testing.T
	s      *fakeapi.Server
	core   *corefake.Clientset
	coil   *fake.Clientset
	pods   *metadatafake.FakeMetadataClient
	events *events.FakeRecorder
	stop   func()
	// announce is the label of blocks that come.
	announce v2.PoolAnnounce
	// slow says that no more claims are answered than answers.
	slow    bool
	answers int
}

func inScene(t *testing.T, do func(t *testing.T, sc *scene)) {
	synctest.Test(t, func(t *testing.T) { do(t, newScene(t)) })
}

func newScene(t *testing.T) *scene {
	t.Helper()
	lists := map[string]runtime.Object{podResource: &metav1.List{}}
	sc := &scene{t: t, s: fakeapi.New(t, lists), events: events.NewFakeRecorder(100000), core: corefake.NewSimpleClientset(), coil: fake.NewSimpleClientset()}
	sc.pods = metadatafake.NewSimpleMetadataClient(runtime.NewScheme())
	sc.pods.PrependReactor("*", "*", sc.s.React)
	sc.core.PrependReactor("*", "*", sc.s.React)
	sc.coil.PrependReactor("*", "*", sc.s.React)
	for name, cidrs := range map[string][2]string{"default": {"192.0.2.0/28", "2001:db8::/124"}, "four": {"198.51.100.0/29", ""}, "one": {"203.0.113.9/32", ""}} {
		p := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: name}}
		p.Spec.Subnets = []v2.SubnetSet{{IPv4: &cidrs[0]}}
		if cidrs[1] != "" {
			p.Spec.Subnets[0].IPv6 = &cidrs[1]
		}
		sc.s.Put(poolResource, p)
	}
	for i := range 3 {
		sc.node(i, true)
	}
	sc.start()
	synctest.Wait() // the first plan is made
	return sc
}

// node makes a Node that is ready, or isn't.
func (sc *scene) node(i int, ready bool) {
	name := fmt.Sprint("n", i)
	n := fakeapi.Find[*corev1.Node](sc.s, nodeResource, name)
	if n == nil {
		n = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: fmt.Sprint("10.0.0.", i+1)}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: map[bool]corev1.ConditionStatus{true: corev1.ConditionTrue, false: corev1.ConditionUnknown}[ready]}}
	sc.s.Put(nodeResource, n)
}

// start runs a controller that has seen everything.
func (sc *scene) start() {
	sc.t.Helper()
	blocks := cache.NewSharedIndexInformer(&cache.ListWatch{}, &v2.AddressBlock{}, 0, cache.Indexers{})
	coil := externalversions.NewSharedInformerFactory(sc.coil, 0).Coil().V2()
	cfg := Config{
		Coil: sc.coil, Core: sc.core, Metadata: sc.pods, Recorder: sc.events, Namespace: namespace, DefaultPool: "default",
		Pools: coil.AddressPools(), Claims: coil.AddressClaims(), Gateways: coil.LoadBalancerGateways(), Blocks: blocks, Cluster: informers.NewSharedInformerFactory(sc.core, 0),
	}
	var err error
	if sc.Controller, err = New(cfg); err != nil {
		sc.t.Fatal(err)
	}
	sc.synced, sc.policies.synced = nil, nil // the caches are filled by hand
	handlers := map[string]func(before, after fakeapi.Object){
		serviceResource: func(a, b fakeapi.Object) {
			sc.serviceChanged(fakeapi.As[corev1.Service](a), fakeapi.As[corev1.Service](b))
			sc.portsChanged(fakeapi.As[corev1.Service](a), fakeapi.As[corev1.Service](b))
		},
		policyResource: func(a, b fakeapi.Object) {
			sc.policyChanged(fakeapi.Last[networkingv1.NetworkPolicy](a, b))
		},
		nodeResource: func(a, b fakeapi.Object) { sc.nodeChanged(nil) },
		sliceResource: func(a, b fakeapi.Object) {
			sc.sliceChanged(fakeapi.As[discoveryv1.EndpointSlice](a), fakeapi.As[discoveryv1.EndpointSlice](b))
			sc.endpointsChanged(fakeapi.Last[discoveryv1.EndpointSlice](a, b))
		},
		poolResource:  func(a, b fakeapi.Object) { sc.replan() },
		claimResource: func(a, b fakeapi.Object) { sc.claimChanged(fakeapi.Last[v2.AddressClaim](a, b)) },
		blockResource: func(a, b fakeapi.Object) {
			sc.blockChanged(fakeapi.As[v2.AddressBlock](a), fakeapi.As[v2.AddressBlock](b))
		},
		gatewayResource: func(a, b fakeapi.Object) {
			sc.gatewayChanged(fakeapi.As[v2.LoadBalancerGateway](a), fakeapi.As[v2.LoadBalancerGateway](b))
			sc.masqueradeChanged(fakeapi.As[v2.LoadBalancerGateway](a), fakeapi.As[v2.LoadBalancerGateway](b))
		},
	}
	core, discovery := cfg.Cluster.Core().V1(), cfg.Cluster.Discovery().V1()
	sc.View = sc.s.View(map[string]cache.Indexer{
		serviceResource: core.Services().Informer().GetIndexer(), nodeResource: core.Nodes().Informer().GetIndexer(), sliceResource: discovery.EndpointSlices().Informer().GetIndexer(),
		poolResource: cfg.Pools.Informer().GetIndexer(), claimResource: cfg.Claims.Informer().GetIndexer(), blockResource: blocks.GetIndexer(),
		gatewayResource: cfg.Gateways.Informer().GetIndexer(), policyResource: cfg.Cluster.Networking().V1().NetworkPolicies().Informer().GetIndexer(),
	}, func(resource string, before, after fakeapi.Object) {
		if before != nil || after != nil {
			handlers[resource](before, after)
		}
	})
	sc.DeliverAll()
	sc.stop = testkit.Background(context.WithoutCancel(sc.t.Context()), sc.t, sc.Controller.Run)
}

// elsewhere is an address that no claim gets, since another object has it.
const elsewhere = "192.0.2.9"

// play gives claims what they ask for, takes back what they don't, and has nodes take and leave addresses.
func (sc *scene) play() {
	used := map[string]string{} // claims, by name of the block
	for _, b := range fakeapi.All[*v2.AddressBlock](sc.s, blockResource) {
		if a := fakeapi.Find[*v2.AddressClaim](sc.s, claimResource, namespace+"/"+b.Floating.Claim); a == nil || a.UID != b.Floating.Owner.UID {
			sc.s.Drop(blockResource, b.Name)
			continue
		}
		used[b.Name] = b.Floating.Claim
		holder := ""
		for _, n := range b.Floating.Successors {
			if holder == "" || n.Node == b.Floating.Holding.Holder {
				holder = n.Node
			}
		}
		if b.Floating.Holding.Holder != holder {
			b.Floating.Holding.Holder = holder
			sc.s.Put(blockResource, b)
		}
	}
	for _, a := range fakeapi.All[*v2.AddressClaim](sc.s, claimResource) {
		if len(a.Status.Addresses) > 0 || sc.slow && sc.answers == 0 {
			continue
		}
		sc.answers--
		for i := range 16 {
			b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(a.Spec.Pool, "-", i), Labels: map[string]string{v2.LabelPool: a.Spec.Pool}}, Index: int32(i)}
			if sc.announce != "" {
				b.Labels[v2.LabelAnnounce] = string(sc.announce)
			}
			told := v2.ClaimedAddress{Block: b.Name, IPv4: fmt.Sprint("192.0.2.", i), IPv6: fmt.Sprintf("2001:db8::%x", i)}
			if a.Spec.Pool == "four" {
				if i >= 8 {
					break
				}
				told.IPv4, told.IPv6 = fmt.Sprint("198.51.100.", i), ""
			}
			if a.Spec.Pool == "one" {
				if i >= 1 {
					exhausted := metav1.Condition{Type: v2.ClaimReady, Status: metav1.ConditionFalse, Reason: v2.ReasonPoolExhausted, Message: "It has no address left"}
					if meta.SetStatusCondition(&a.Status.Conditions, exhausted) {
						sc.s.Put(claimResource, a)
					}
					break
				}
				told.IPv4, told.IPv6 = "203.0.113.9", ""
			}
			if told.IPv6 == "2001:db8::0" {
				told.IPv6 = "2001:db8::"
			}
			if told.IPv4 == elsewhere && len(a.Spec.Addresses) == 0 {
				continue
			}
			if told.IPv4 == elsewhere && a.Spec.Addresses[0] == elsewhere {
				ready := metav1.Condition{Type: v2.ClaimReady, Status: metav1.ConditionFalse, Reason: v2.ReasonAddressTaken, Message: "It belongs to an Egress"}
				if meta.SetStatusCondition(&a.Status.Conditions, ready) {
					sc.s.Put(claimResource, a)
				}
				break
			}
			if wants := a.Spec.Addresses; used[b.Name] != "" && used[b.Name] != a.Name || len(wants) > 0 && wants[0] != told.IPv4 && wants[0] != told.IPv6 {
				continue
			}
			b.Floating = &v2.Floating{Claim: a.Name, Owner: v2.FloatingOwner{Kind: "AddressClaim", Namespace: a.Namespace, Name: a.Name, UID: a.UID}}
			if used[b.Name] == "" { // else an earlier claim of the name has it
				sc.s.Put(blockResource, b)
				used[b.Name] = a.Name
			}
			a.Status.Addresses = []v2.ClaimedAddress{told}
			sc.s.Put(claimResource, a)
			break
		}
	}
}

// plannedAt is when the next plan may be made, as the last one has found.
func (sc *scene) plannedAt() time.Time { return *sc.next.Load() }

// run lets time pass while the caches show everything, and nodes and claims get what they are to.
func (sc *scene) run(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		sc.play()
		sc.DeliverAll()
		time.Sleep(100 * time.Millisecond)
		synctest.Wait()
	}
}

// service makes a Service of the class, or changes it.
func (sc *scene) service(name string, change func(*corev1.Service)) *corev1.Service {
	s := fakeapi.Find[*corev1.Service](sc.s, serviceResource, "shop/"+name)
	if s == nil {
		s = &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Annotations: map[string]string{}}}
		s.Spec = corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(string), IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: 80}},
		}
		*s.Spec.LoadBalancerClass = loadbalancer.Class
	}
	s.Generation++
	if change != nil {
		change(s)
	}
	if s.DeletionTimestamp != nil && len(s.Finalizers) == 0 {
		sc.s.Drop(serviceResource, "shop/"+name)
		return s
	}
	sc.s.Put(serviceResource, s)
	return s
}

func (sc *scene) find(name string) *corev1.Service {
	return fakeapi.Find[*corev1.Service](sc.s, serviceResource, "shop/"+name)
}

func deleted(s *corev1.Service) { s.DeletionTimestamp = new(metav1.Now()) }

// told are the addresses in the status of a Service.
func told(s *corev1.Service) string {
	var all []string
	for _, i := range s.Status.LoadBalancer.Ingress {
		all = append(all, i.IP)
	}
	return strings.Join(all, ",")
}
