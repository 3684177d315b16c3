package loadbalancer

import (
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// refuse has the API server refuse to write objects of a resource until the function is called that it returns.
func (sc *scene) refuse(resource string) (end func()) {
	var ended atomic.Bool
	sc.s.Fault = func(verb, of string) (before, after error) {
		if !ended.Load() && of == resource && verb != "get" && verb != "list" {
			return fakeapi.ErrLost, nil
		}
		return nil, nil
	}
	return func() { ended.Store(true) }
}

// is returns the reason of a condition of a Service.
func (sc *scene) is(name, condition string) string {
	if c := meta.FindStatusCondition(sc.find(name).Status.Conditions, condition); c != nil {
		return c.Reason
	}
	return ""
}

// wants wants what the status of a Service tells, and the reasons of its conditions.
func (sc *scene) wants(when, name, addresses, assigned, served string) {
	sc.t.Helper()
	got := fmt.Sprint(told(sc.find(name)), " ", sc.is(name, loadbalancer.ConditionAssigned), " ", sc.is(name, loadbalancer.ConditionServed))
	if want := fmt.Sprint(addresses, " ", assigned, " ", served); got != want {
		sc.t.Errorf("%s: %s says %q, want %q", when, name, got, want)
	}
}

func named(a string) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Annotations[loadbalancer.AnnotationWanted] = a }
}

// Nobody gets an address and a port as long as a Service says it has them that is deleted, or of another type.
func TestPortsOfServicesThatLeave(t *testing.T) {
	for name, leave := range map[string]func(*corev1.Service){
		"deleted":      deleted,
		"another type": func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeClusterIP },
	} {
		t.Run(name, func(t *testing.T) {
			inScene(t, func(t *testing.T, sc *scene) {
				sc.service("a", named("192.0.2.3"))
				sc.run(2 * time.Second)
				sc.wants("at first", "a", "192.0.2.3", "AddressAssigned", "Served")
				end := sc.refuse(serviceResource)
				sc.service("a", leave)
				sc.service("b", named("192.0.2.3"))
				sc.run(time.Minute)
				if got := told(sc.find("a")); got != "192.0.2.3" {
					t.Fatalf("a says %q", got)
				}
				if given := sc.given[sc.find("b").UID]; given.Reason != loadbalancer.AddressInUse {
					t.Errorf("while a says that it has the address b gets %+v", given)
				}
				end()
				sc.run(5 * time.Minute)
				sc.wants("in the end", "b", "192.0.2.3", "AddressAssigned", "Served")
			})
		})
	}
}

// A Service without an address that is to have none any more gets none.
func TestServiceLeavesWithoutAddress(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.service("a", func(s *corev1.Service) { s.Annotations[v2.AnnotationPool] = "none" })
		sc.run(2 * time.Second)
		sc.wants("at first", "a", "", "PoolNotFound", "WaitsForAddress")
		end := sc.refuse(serviceResource)
		sc.service("a", func(s *corev1.Service) {
			s.Spec.Type = corev1.ServiceTypeClusterIP
			delete(s.Annotations, v2.AnnotationPool)
		})
		sc.run(time.Minute)
		if claims := fakeapi.All[*v2.AddressClaim](sc.s, claimResource); len(claims) > 0 {
			t.Errorf("there is the claim %s", claims[0].Name)
		}
		end()
		sc.run(5 * time.Minute)
		if s := sc.find("a"); len(s.Finalizers)+len(s.Annotations)+len(s.Status.Conditions) > 0 {
			t.Errorf("it is left with %+v, %+v", s.ObjectMeta, s.Status)
		}
	})
}

// The status tells an address when the node that has it takes packets for the Service's ports.
func TestToldWhenServed(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.service("a", nil)
		sc.run(2 * time.Second)
		sc.wants("at first", "a", "192.0.2.0", "AddressAssigned", "Served")
		end := sc.refuse(blockResource)
		sc.service("b", func(s *corev1.Service) { s.Spec.Ports[0].Port = 81 })
		sc.run(10 * time.Second)
		sc.wants("without its port", "b", "", "AddressAssigned", "NoHolder")
		end()
		sc.run(5 * time.Minute)
		sc.wants("with its port", "b", "192.0.2.0", "AddressAssigned", "Served")
		// Ends that nobody answers for any more stay told: it may be for a moment.
		for i := range 3 {
			n := fakeapi.Find[*corev1.Node](sc.s, nodeResource, fmt.Sprint("n", i))
			n.Labels = map[string]string{corev1.LabelNodeExcludeBalancers: ""}
			sc.s.Put(nodeResource, n)
		}
		sc.run(10 * time.Second)
		sc.wants("without a node", "b", "192.0.2.0", "AddressAssigned", "NoNode")
	})
}

// The cache of AddressBlocks may show the block of a claim before that of AddressClaims shows the claim: each has a watch of its own.
func TestBlockBeforeItsClaim(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.service("a", nil)
		sc.DeliverAll()
		for len(fakeapi.All[*v2.AddressClaim](sc.s, claimResource)) == 0 {
			time.Sleep(10 * time.Millisecond)
			synctest.Wait()
		}
		sc.play()
		sc.DeliverOf(blockResource)
		synctest.Wait()
		sc.run(time.Minute)
		sc.wants("a block that was seen before its claim", "a", "192.0.2.0", "AddressAssigned", "Served")
	})
}

// A Service that is deleted and made again before the next plan has the address of before, and its ports: the name is the same, the Service is another one.
func TestServiceIsMadeAgain(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.announce = v2.AnnounceGateway // no node writes into the block when it gives the address up
		wanted := func(s *corev1.Service) { s.Annotations[loadbalancer.AnnotationWanted] = "192.0.2.3" }
		sc.service("a", wanted)
		ports := func(when string, want int) {
			t.Helper()
			if got := len(fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, "default-3").Floating.Ports); got != want {
				t.Errorf("%s the address has %d ports, want %d", when, got, want)
			}
		}
		sc.run(time.Minute)
		ports("at first", 1)
		plans := sc.plannedAt()
		sc.service("a", deleted)
		for range 5 { // without time for a plan
			sc.DeliverAll()
			synctest.Wait()
		}
		if sc.find("a") != nil {
			t.Fatal("the Service is still there")
		}
		ports("without the Service", 0)
		sc.service("a", wanted)
		sc.DeliverAll()
		synctest.Wait()
		if sc.plannedAt() != plans {
			t.Fatal("a plan was made meanwhile")
		}
		sc.run(time.Minute)
		ports("when it is made again", 1)
	})
}

// With externalTrafficPolicy Local the address follows the endpoints; where there are none it is nowhere, unless another Service has it, too.
func TestAddressFollowsEndpoints(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		endpoint := func(nodes ...string) {
			s := fakeapi.Find[*discoveryv1.EndpointSlice](sc.s, sliceResource, "shop/a-1")
			if s == nil {
				s = &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a-1", Labels: map[string]string{discoveryv1.LabelServiceName: "a"}}}
			}
			s.Endpoints = nil
			for _, n := range nodes {
				s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{NodeName: &n})
			}
			sc.s.Put(sliceResource, s)
		}
		holder := func(when, want string) {
			t.Helper()
			sc.run(2 * time.Second)
			if got := fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, "default-0").Floating.Holding.Holder; got != want {
				t.Errorf("%s the address is at %q, want %q", when, got, want)
			}
		}
		sc.service("a", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
		holder("without endpoints", "")
		sc.wants("without endpoints", "a", "", "AddressAssigned", "NoEndpoints")
		endpoint("n2")
		holder("with an endpoint", "n2")
		sc.wants("with an endpoint", "a", "192.0.2.0", "AddressAssigned", "Served")
		endpoint("n1", "n2")
		holder("with another endpoint", "n2")
		endpoint("n1")
		holder("with the other endpoint alone", "n1")
		sc.service("b", func(s *corev1.Service) { s.Spec.Ports[0].Port = 81 })
		endpoint()
		sc.run(2 * time.Second)
		sc.wants("beside a Service of all nodes", "b", "192.0.2.0", "AddressAssigned", "Served")
		sc.wants("without endpoints, beside a Service of all nodes", "a", "192.0.2.0", "AddressAssigned", "NoEndpoints")
		endpoint("n2")
		holder("with an endpoint again", "n2")
		sc.wants("with an endpoint, beside a Service of all nodes", "a", "192.0.2.0", "AddressAssigned", "Served")
	})
}

// Services of other classes, or without one, stay as they are.
func TestServicesOfOthers(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.service("other", func(s *corev1.Service) { *s.Spec.LoadBalancerClass = "example.org/lb" })
		sc.service("none", func(s *corev1.Service) { s.Spec.LoadBalancerClass = nil })
		sc.run(2 * time.Second)
		for _, name := range []string{"other", "none"} {
			if s := sc.find(name); len(s.Finalizers)+len(s.Annotations)+len(s.Status.Conditions) > 0 {
				t.Errorf("%s has %+v, %+v", name, s.ObjectMeta, s.Status)
			}
		}
	})
}

// A claim that somebody else has made under the name is left alone. It is no reason to ask the API server all the time.
func TestClaimOfSomebodyElse(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		theirs := &v2.AddressClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "lb-192-0-2-3"}, Spec: v2.AddressClaimSpec{Pool: "four", Count: new(int32)}}
		sc.s.Put(claimResource, theirs)
		sc.service("a", named("192.0.2.3"))
		sc.service("b", nil)
		sc.run(time.Minute)
		sc.wants("beside it", "b", "192.0.2.0", "AddressAssigned", "Served")
		if n := sc.s.Calls()["create addressclaims"]; n > 50 {
			t.Errorf("%d times a claim was to be made", n)
		}
		sc.s.Drop(claimResource, namespace+"/"+theirs.Name)
		sc.run(10 * time.Minute)
		sc.wants("when it is gone", "a", "192.0.2.3", "AddressAssigned", "Served")
	})
}

// Somebody deletes the claim of an address, and the claim of its name gets another one: the block of the earlier claim doesn't count.
func TestBlockOfAnEarlierClaim(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.service("a", nil)
		sc.run(2 * time.Second)
		sc.wants("at first", "a", "192.0.2.0", "AddressAssigned", "Served")
		b := fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, "default-0").DeepCopy()
		for _, name := range []string{"default-", "default-9"} { // before it, and after it
			b.Name, b.UID, b.ResourceVersion, b.Floating.Owner.UID, b.Floating.Ports = name, "", "", "earlier", nil
			sc.s.Put(blockResource, b)
			b = b.DeepCopy()
		}
		sc.DeliverAll()
		sc.service("b", func(s *corev1.Service) { s.Spec.Ports[0].Port = 81 })
		for range 20 {
			sc.DeliverAll()
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
		}
		sc.wants("beside a block of an earlier claim", "b", "192.0.2.0", "AddressAssigned", "Served")
		if got := fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, "default-").Floating.Ports; len(got) > 0 {
			t.Errorf("the earlier claim's block got %v", got)
		}
	})
}

// Several nodes announce an address by routes: all, or those with endpoints. Hosts of a link find it at one node alone.
func TestAnnouncers(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		announcers := func(when string, want v2.FloatingAnnouncers) {
			t.Helper()
			sc.run(2 * time.Second)
			if got := fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, "default-0").Floating.Announcers; fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("%s: %+v, want %+v", when, got, want)
			}
		}
		sc.service("a", nil)
		announcers("of all nodes", v2.FloatingAnnouncers{All: true})
		s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a-1", Labels: map[string]string{discoveryv1.LabelServiceName: "a"}}}
		for _, n := range []string{"n2", "n1", "gone"} {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{NodeName: &n})
		}
		sc.s.Put(sliceResource, s)
		sc.service("a", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
		announcers("of nodes with endpoints", v2.FloatingAnnouncers{Nodes: []string{"n1", "n2"}})
		b := fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, "default-0")
		b.Labels = map[string]string{v2.LabelAnnounce: string(v2.AnnounceNeighbor)}
		sc.s.Put(blockResource, b)
		announcers("to neighbours", v2.FloatingAnnouncers{})
		b = fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, "default-0")
		b.Labels = nil
		sc.s.Put(blockResource, b)
		sc.service("a", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = "" })
		announcers("of all nodes again", v2.FloatingAnnouncers{All: true})
	})
}

// A Service that gets its address soon is written twice, whatever it waits for meanwhile, and its block once by the controller. One that waits for long says so.
func TestFewWrites(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.run(time.Second)
		const n = 9 // less than the address that no claim gets
		for i := range n {
			sc.service(fmt.Sprint("s-", i), nil)
		}
		sc.run(10 * time.Second)
		for i := range n {
			name := fmt.Sprint("s-", i)
			sc.wants("in the end", name, fmt.Sprint("192.0.2.", i), "AddressAssigned", "Served")
		}
		calls := sc.s.Calls()
		for call, want := range map[string]int{"patch services": n, "update services": n, "create addressclaims": n, "patch addressblocks": n} {
			if calls[call] != want {
				t.Errorf("%d times %s, want %d; all calls: %v", calls[call], call, want, calls)
			}
		}
		end := sc.refuse(claimResource)
		sc.service("late", nil)
		sc.run(time.Second)
		sc.wants("at first", "late", "", "", "")
		sc.run(2 * patience)
		sc.wants("after a while", "late", "", "WaitsForAddress", "WaitsForAddress")
		end()
	})
}

// Where many Services wait for their turn, they don't say so: that would be a write for each of them, and their turn would come later still.
func TestFewWritesOfMany(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.slow = true
		const n, each = 9, time.Second
		for i := range n {
			sc.service(fmt.Sprint("s-", i), nil)
		}
		// As many others wait longer.
		for i := range int(n * each / turn) {
			sc.service(fmt.Sprint("t-", i), func(s *corev1.Service) { s.Annotations[v2.AnnotationPool] = "four" })
		}
		sc.run(each)
		for range n {
			sc.answers = 1
			sc.run(each)
		}
		calls := sc.s.Calls()
		for _, call := range []string{"patch services", "update services"} {
			if calls[call] != n {
				t.Errorf("%d times %s, want %d; all calls: %v", calls[call], call, n, calls)
			}
		}
	})
}

// A claim whose event is late isn't made again, nor one whose event comes while a plan is made.
func TestClaimsAreMadeOnce(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		for i := range 3 {
			sc.service(fmt.Sprint("s-", i), nil)
		}
		sc.DeliverAll()
		for range 5 {
			sc.replan()
			time.Sleep(time.Second)
			synctest.Wait()
		}
		sc.DeliverAll()
		for _, a := range sc.ourClaims() {
			if err := sc.makeClaim(t.Context(), loadbalancer.Address{Claim: a.Name, Pool: a.Spec.Pool}); err != nil {
				t.Error(err)
			}
		}
		if calls := sc.s.Calls(); calls["create addressclaims"] != 3 || len(sc.ourClaims()) != 3 {
			t.Errorf("claims are made %d times, want 3; all calls: %v", calls["create addressclaims"], calls)
		}
	})
}

// Few claims wait at a time: they are answered in their order.
func TestFewClaimsWait(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		for i := range 3 * mostWaiting {
			sc.service(fmt.Sprint("s-", i), nil)
		}
		for range 50 { // nobody answers
			sc.DeliverAll()
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
		}
		if n := len(fakeapi.All[*v2.AddressClaim](sc.s, claimResource)); n != mostWaiting {
			t.Errorf("there are %d claims, want %d", n, mostWaiting)
		}
	})
}

// A controller that starts beside Services that have all they need writes nothing.
func TestStartWritesNothing(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		for i := range 8 {
			sc.service(fmt.Sprint("s-", i), nil)
		}
		sc.run(5 * time.Second)
		before := sc.s.Events()
		for range 10 {
			sc.stop()
			sc.start()
			sc.run(5 * time.Second)
		}
		if n := sc.s.Events() - before; n > 0 {
			t.Errorf("%d writes without a reason: %v", n, sc.s.Calls())
		}
	})
}
