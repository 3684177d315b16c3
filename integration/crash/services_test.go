package crash

import (
	"errors"
	"fmt"
	"maps"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
)

// served are Services, two nodes for their addresses, and a coil-lb-controller that is started again when it was killed.
type served struct {
	*cluster
	controller *rig.Program
	kills      int
}

// names are those of the Services.
var names = []string{"calm", "young", "one"}

func newServed(t *testing.T) *served {
	c, ctx := newCluster(t, 4), t.Context()
	c.check(c.AddPool(ctx, "services", 0, rig.Dual("10.255.201.0/28", "fd00:255::3:0/124")), c.Announce(ctx, "services", v2.AnnounceNeighbor))
	nodes := []*rig.Node{c.node(rig.NodeOptions{}), c.node(rig.NodeOptions{})}
	for _, name := range names { // nodes of other tests have none
		endpoints := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}}, AddressType: discoveryv1.AddressTypeIPv4}
		for _, n := range nodes {
			endpoints.Endpoints = append(endpoints.Endpoints, discoveryv1.Endpoint{Addresses: []string{n.Addr4.String()}, NodeName: &n.Name})
		}
		testkit.Must(c.Core.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Create(ctx, endpoints, metav1.CreateOptions{}))(t)
	}
	s := &served{cluster: c, controller: testkit.Must(c.NewLBController(ctx, "services"))(t)}
	c.check(s.controller.Start())
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of the log of coil-lb-controller:\n%s", s.controller.Logs(60))
		}
		s.controller.Kill()
	})
	return s
}

// restart starts the controller with fault points.
func (s *served) restart(faults string) error {
	s.controller.Kill()
	s.controller.Faults = faults
	return errors.Join(s.TakeLease(s.t.Context(), rig.LBLease), s.controller.Start())
}

func (s *served) services() typed.ServiceInterface {
	return s.Core.CoreV1().Services(metav1.NamespaceDefault)
}

// make makes a Service that shares its address with none. If wants isn't empty, it asks for that address.
func (s *served) make(name, wants string) {
	o := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{loadbalancer.AnnotationSharing: loadbalancer.SharingNone, loadbalancer.AnnotationWanted: wants}},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(string), Ports: []corev1.ServicePort{{Port: 80}}, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal},
	}
	*o.Spec.LoadBalancerClass = loadbalancer.Class
	testkit.Must(s.services().Create(s.t.Context(), o, metav1.CreateOptions{}))(s.t)
}

// tell returns the addresses that Services tell, by their names. Two that tell one address, and one that tells the address that it is refused, end the test.
func (s *served) tell() (map[string]string, error) {
	all, err := s.services().List(s.t.Context(), metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	told, owner := map[string]string{}, map[string]string{}
	for _, o := range all.Items {
		if o.Spec.Type != corev1.ServiceTypeLoadBalancer {
			continue
		}
		told[o.Name] = ""
		for _, in := range o.Status.LoadBalancer.Ingress {
			if other := owner[in.IP]; other != "" {
				s.t.Fatalf("%s and %s tell %s", o.Name, other, in.IP)
			}
			owner[in.IP], told[o.Name] = o.Name, in.IP
		}
	}
	return told, nil
}

// again starts the controller again if it was killed.
func (s *served) again() error {
	select {
	case <-s.controller.Ended():
		s.kills++
		return s.restart("")
	default:
		return nil
	}
}

// await waits until Services tell some addresses, "any" for whatever it is, and each address has one claim. The Service calm tells the same all the time.
func (s *served) await(why string, want map[string]string) map[string]string {
	s.t.Helper()
	var told map[string]string
	testkit.Eventually(s.t, 40*time.Second, why, func() (err error) {
		if err := s.again(); err != nil {
			return err
		}
		if told, err = s.tell(); err != nil {
			return err
		}
		if calm, ok := want["calm"]; ok && calm != "any" && told["calm"] != calm {
			s.t.Fatalf("%s: calm tells %q, and told %q", why, told["calm"], calm)
		}
		claims, err := s.Coil.CoilV2().AddressClaims(metav1.NamespaceSystem).List(s.t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		seen, addresses := maps.Clone(told), 0
		for name, addr := range told {
			if addr != "" {
				addresses++
				if want[name] == "any" {
					seen[name] = "any"
				}
			}
		}
		if !maps.Equal(seen, want) || len(claims.Items) != addresses {
			return fmt.Errorf("they tell %v, and there are %d claims", told, len(claims.Items))
		}
		return nil
	})
	return told
}

// coil-lb-controller is killed after each of its writes while a Service gets an address, gets another one, and goes. Another Service keeps its address all the time, and
// one that asks for that never gets it. In the end nothing is left.
func TestLBControllerKilled(t *testing.T) {
	t.Parallel()
	s := newServed(t)
	ctx := t.Context()
	s.make("calm", "")
	calm := s.await("at first", map[string]string{"calm": "any"})["calm"]
	s.make("young", calm)
	rounds, number := testkit.LBForm.Times(1, 29), 0
	for range rounds {
		for _, p := range faultpoint.Serve {
			number++
			testkit.Check(t, s.restart(fmt.Sprintf("%s=1", p)))
			why := func(what string) string { return fmt.Sprintf("run %d, killed at %s: %s", number, p, what) }
			s.make("one", "")
			s.await(why("a Service comes"), map[string]string{"calm": calm, "young": "", "one": "any"})
			other := fmt.Sprint("10.255.201.", 8+number%8)
			patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, loadbalancer.AnnotationWanted, other)
			testkit.Must(s.services().Patch(ctx, "one", types.MergePatchType, []byte(patch), metav1.PatchOptions{}))(t)
			s.await(why("it asks for another address"), map[string]string{"calm": calm, "young": "", "one": other})
			testkit.Check(t, s.services().Delete(ctx, "one", metav1.DeleteOptions{}))
			s.await(why("it goes"), map[string]string{"calm": calm, "young": ""})
			testkit.Eventually(t, 10*time.Second, why("it was"), func() error { // the answer to its last write may be on its way
				if err := s.again(); err != nil || s.kills == number {
					return err
				}
				return fmt.Errorf("it was killed %d times", s.kills)
			})
		}
	}
	if want := rounds * len(faultpoint.Serve); s.kills != want {
		t.Errorf("the controller was killed %d times, want %d", s.kills, want)
	}
	t.Attr("kills", fmt.Sprint(s.kills))
	for _, name := range []string{"calm", "young"} {
		testkit.Check(t, s.services().Delete(ctx, name, metav1.DeleteOptions{}))
	}
	s.await("all go", nil)
}
