package loadbalancer

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
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
		blockService(sc, "a", true)
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

// blockService says in the block of a Service's address that its holder drops packets, or doesn't.
func blockService(sc *scene, name string, blocked bool) {
	sc.t.Helper()
	for _, b := range fakeapi.All[*v2.AddressBlock](sc.s, blockResource) {
		if b.Floating == nil || b.Floating.Claim != sc.given[sc.find(name).UID].Claim {
			continue
		}
		b = b.DeepCopy()
		b.Status.Conditions = nil
		if blocked {
			b.Status.Conditions = []metav1.Condition{{
				Type: v2.BlockForwardingBlocked, Status: metav1.ConditionTrue, Message: "node another: no\nnode " + b.Floating.Holding.Holder + ": no Service proxy",
			}}
		}
		sc.s.Put(blockResource, b)
	}
}

// A Service says that nobody translates its packets at the node that has the address, and goes on telling the address.
func TestServiceWithoutProxy(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.service("a", nil)
		sc.run(2 * time.Second)
		sc.wants("at first", "a", "192.0.2.0", "AddressAssigned", "Served")
		blockService(sc, "a", true)
		sc.run(2 * time.Second)
		sc.wants("without a Service proxy", "a", "192.0.2.0", "AddressAssigned", "ForwardingBlocked")
		if got := sc.find("a").Status.Conditions[1].Message; !strings.HasSuffix(got, " answers for the address, and no Service proxy") {
			t.Errorf("it says %q", got)
		}
		blockService(sc, "a", false)
		sc.run(2 * time.Second)
		sc.wants("with one", "a", "192.0.2.0", "AddressAssigned", "Served")
	})
}
