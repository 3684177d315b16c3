package loadbalancer

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// The leader counts Services by what they wait for.
func TestScenario37ServicesAreCounted(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.service("a", nil)
		sc.service("b", func(s *corev1.Service) { s.Spec.Ports[0].Port = 81 })
		sc.service("c", func(s *corev1.Service) { s.Annotations[v2.AnnotationPool] = "none" })
		sc.service("d", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
		sc.service("other", func(s *corev1.Service) { *s.Spec.LoadBalancerClass = "example.org/lb" })
		sc.run(5 * time.Second)
		blockService(sc, "a", "another", sc.holder("a"))
		sc.run(5 * time.Second)
		refused := sc.refuse(serviceResource)
		sc.service("e", nil)
		sc.run(time.Second)
		want := `
			# HELP coil_lb_service_count Services that Coil serves, by why they have no address, else by the reason of their condition Served; Pending before they have one. Only the leader exports it.
			# TYPE coil_lb_service_count gauge
			coil_lb_service_count{reason="ForwardingBlocked"} 2
			coil_lb_service_count{reason="NoEndpoints"} 1
			coil_lb_service_count{reason="Pending"} 1
			coil_lb_service_count{reason="PoolNotFound"} 1
			coil_lb_service_count{reason="Served"} 0
		`
		if err := testutil.CollectAndCompare(sc.metrics, strings.NewReader(want)); err != nil {
			t.Error(err)
		}
		refused()
		if n := testutil.CollectAndCount(newCollector(sc.services, false)); n != 0 {
			t.Errorf("the standby exports %d metrics", n)
		}
	})
}

// The metrics are read again and again while Services come, change and go: the race detector sees what both touch.
func TestScenario37ReadWhileServicesChange(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		read, stop := 0, make(chan struct{})
		var reader sync.WaitGroup
		reader.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(time.Millisecond):
					read += min(1, testutil.CollectAndCount(sc.metrics))
				}
			}
		})
		for i := range 20 {
			name := fmt.Sprint("s", i%10)
			sc.service(name, func(s *corev1.Service) {
				if s.Spec.Ports[0].Port = int32(i + 1); i%7 == 6 {
					deleted(s)
				}
			})
			sc.run(200 * time.Millisecond)
		}
		close(stop)
		reader.Wait()
		if read < 1000 {
			t.Errorf("metrics were read %d times in 4 s", read)
		}
	})
}

// blockService says in the block of a Service's address that nodes drop packets, or that none does.
func blockService(sc *scene, name string, nodes ...string) {
	sc.t.Helper()
	b := sc.block(name)
	b.Status.Conditions = nil
	if len(nodes) > 0 {
		message := ""
		for _, n := range nodes {
			message = plan.Told(message, n, "no Service proxy of "+n)
		}
		b.Status.Conditions = []metav1.Condition{{Type: v2.BlockForwardingBlocked, Status: metav1.ConditionTrue, Message: message}}
	}
	sc.s.Put(blockResource, b)
}

// block is a copy of the block of a Service's address.
func (sc *scene) block(name string) *v2.AddressBlock {
	sc.t.Helper()
	for _, b := range fakeapi.All[*v2.AddressBlock](sc.s, blockResource) {
		if b.Floating != nil && b.Floating.Claim == sc.given[sc.find(name).UID].Claim {
			return b.DeepCopy()
		}
	}
	sc.t.Fatalf("Service %s has no block", name)
	return nil
}

// holder is the node that has the address of a Service.
func (sc *scene) holder(name string) string { return sc.block(name).Floating.Holding.Holder }

// A Service says that nobody translates its packets at the node that has the address, and goes on telling the address.
func TestServiceWithoutProxy(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.service("a", nil)
		sc.run(2 * time.Second)
		sc.wants("at first", "a", "192.0.2.0", "AddressAssigned", "Served")
		blockService(sc, "a", "another", sc.holder("a"))
		sc.run(2 * time.Second)
		sc.wants("without a Service proxy", "a", "192.0.2.0", "AddressAssigned", "ForwardingBlocked")
		if got := sc.find("a").Status.Conditions[1].Message; !strings.HasSuffix(got, " answers for the address, and no Service proxy of "+sc.holder("a")) {
			t.Errorf("it says %q", got)
		}
		blockService(sc, "a")
		sc.run(2 * time.Second)
		sc.wants("with one", "a", "192.0.2.0", "AddressAssigned", "Served")
	})
}

// A Service names the nodes that announce its address beside the holder and translate no packets, as long as they announce it. Since others serve it, a Service that comes to
// the address gets it.
func TestServiceWithoutProxyBesideHolder(t *testing.T) {
	for name, local := range map[string]bool{"all nodes": false, "nodes with endpoints": true} {
		t.Run(name, func(t *testing.T) {
			inScene(t, func(t *testing.T, sc *scene) {
				for _, name := range []string{"a", "b"} {
					s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}}}
					for _, n := range []string{"n0", "n1", "n2"} {
						s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{NodeName: &n})
					}
					sc.s.Put(sliceResource, s)
				}
				port := func(n int32) func(*corev1.Service) {
					return func(s *corev1.Service) {
						s.Spec.Ports[0].Port = n
						if local {
							s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
						}
					}
				}
				says := func(when, name, want string) {
					t.Helper()
					if got := sc.find(name).Status.Conditions[1].Message; got != want {
						t.Errorf("%s: %s says %q, want %q", when, name, got, want)
					}
				}
				sc.service("a", port(80))
				sc.run(2 * time.Second)
				others := slices.DeleteFunc([]string{"n0", "n1", "n2"}, func(n string) bool { return n == sc.holder("a") })
				blockService(sc, "a", "gone", others[1], others[0])
				sc.run(2 * time.Second)
				sc.wants("two nodes drop its packets", "a", "192.0.2.0", "AddressAssigned", "ForwardingBlocked")
				says("two nodes drop its packets", "a", "Nodes "+strings.Join(others, ", ")+" answer for the address, and no Service proxy of "+others[0])
				if sc.told(loadbalancer.ReasonBlocked) == 0 {
					t.Error("there is no Event")
				}
				if sc.service("b", port(81)); !local { // those with endpoints share only what has the same selector
					sc.run(5 * time.Second)
					sc.wants("it comes to the address", "b", "192.0.2.0", "AddressAssigned", "ForwardingBlocked")
				}
				blockService(sc, "a", sc.holder("a"), others[1])
				sc.run(2 * time.Second)
				says("the holder drops them, too", "a", "Nodes "+sc.holder("a")+", "+others[1]+" answer for the address, and no Service proxy of "+sc.holder("a"))
				blockService(sc, "a", others[1])
				sc.run(2 * time.Second)
				says("one drops them", "a", "Node "+others[1]+" answers for the address, and no Service proxy of "+others[1])
				i := slices.Index([]string{"n0", "n1", "n2"}, others[1])
				sc.node(i, false)
				sc.run(2 * time.Second)
				sc.wants("that isn't ready any more", "a", "192.0.2.0", "AddressAssigned", "Served")
				sc.node(i, true)
				sc.run(2 * time.Second)
				sc.wants("that is ready again", "a", "192.0.2.0", "AddressAssigned", "ForwardingBlocked")
				blockService(sc, "a")
				sc.run(2 * time.Second)
				sc.wants("all translate them", "a", "192.0.2.0", "AddressAssigned", "Served")
			})
		})
	}
}
