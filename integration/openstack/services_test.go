package openstack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"

	lab "github.com/coil-net/coil/integration/lab/openstack"
	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/openstack"
	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
)

// served is a cluster whose Services get their addresses from a project, and the ports of two gateways, whose agents are played: they do at once what blocks say.
type served struct {
	*scene
	*rig.Rig
	controller *rig.Program
	pool       string
	ports      [2]string
	kills      int
}

// newServed starts the controller with a pool. The tests of Services have one lease, and run one after the other.
func newServed(t *testing.T, subnets ...v2.SubnetSet) *served {
	t.Helper()
	s := &served{Rig: shared.Rig(t), scene: newProject(t)}
	s.pool = "cloud-" + strings.ToLower(s.Project.Name)
	ctx, api := t.Context(), s.Coil.CoilV2()
	testkit.Check(t, s.AddNamespace(ctx, s.pool, ""))
	ids := []string{s.Subnet4}
	if subnets[0].IPv6 != nil {
		ids = append(ids, s.Subnet6)
	}
	testkit.Must(api.AddressPools().Create(ctx, &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: s.pool}, Spec: v2.AddressPoolSpec{
		Purpose: v2.PurposeFloating, Announce: v2.AnnounceGateway, Subnets: subnets,
		OpenStack: &v2.PoolOpenStack{Cloud: "lab", SubnetIDs: ids, FloatingNetworkID: s.cloud.ExternalID()},
	}}, metav1.CreateOptions{}))(t)
	for i := range s.ports {
		s.ports[i] = s.gateway()
		testkit.Must(api.LoadBalancerGateways().Create(ctx, &v2.LoadBalancerGateway{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(s.pool, "-gw", i)},
			Spec:       v2.LoadBalancerGatewaySpec{Pools: []string{s.pool}, OpenStack: &v2.GatewayOpenStack{PortID: s.ports[i]}},
		}, metav1.CreateOptions{}))(t)
	}
	s.controller = testkit.Must(s.NewLBController(ctx, s.pool))(t)
	s.controller.Args = append(s.controller.Args, "--openstack-clouds="+s.cfg.CloudsFile, "--openstack-cluster-id=one", "--openstack-resync=3s", "-v=1")
	testkit.Check(t, s.controller.Start())
	t.Cleanup(s.end)
	return s
}

// end takes all away, as an admin does, and wants the project to be empty.
func (s *served) end() {
	s.t.Helper()
	ctx, api := context.WithoutCancel(s.t.Context()), s.Coil.CoilV2()
	for _, o := range testkit.Must(s.services().List(ctx, metav1.ListOptions{}))(s.t).Items {
		testkit.Check(s.t, s.services().Delete(ctx, o.Name, metav1.DeleteOptions{}))
	}
	testkit.Eventually(s.t, 60*time.Second, "nothing is left", func() error {
		if err := s.again(ctx); err != nil {
			return err
		}
		left, err := api.AddressClaims(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{})
		if err == nil && len(left.Items) > 0 {
			err = fmt.Errorf("there is AddressClaim %s: %+v", left.Items[0].Name, left.Items[0].ObjectMeta)
		}
		return err
	})
	testkit.Check(s.t, api.LoadBalancerGateways().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}), api.AddressPools().Delete(ctx, s.pool, metav1.DeleteOptions{}))
	if s.t.Failed() {
		s.t.Logf("the end of the log of coil-lb-controller:\n%s", s.controller.Logs(80))
	}
	s.controller.Kill()
	testkit.Check(s.t, s.TakeLease(ctx, rig.LBLease))
}

// again starts the controller again if it was killed.
func (s *served) again(ctx context.Context) error {
	select {
	case <-s.controller.Ended():
		s.kills++
		return s.restarted(ctx, "")
	default:
		return nil
	}
}

// restarted starts the controller with fault points.
func (s *served) restarted(ctx context.Context, faults string) error {
	s.controller.Kill()
	s.controller.Faults = faults
	return errors.Join(s.TakeLease(ctx, rig.LBLease), s.controller.Start())
}

func (s *served) services() typed.ServiceInterface { return s.Core.CoreV1().Services(s.pool) }

// make makes a Service.
func (s *served) make(name string, port int32, change ...func(*corev1.Service)) {
	s.t.Helper()
	o := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{}},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(string), Ports: []corev1.ServicePort{{Port: port}}, IPFamilyPolicy: new(corev1.IPFamilyPolicyPreferDualStack)},
	}
	*o.Spec.LoadBalancerClass = loadbalancer.Class
	for _, c := range change {
		c(o)
	}
	testkit.Must(s.services().Create(s.t.Context(), o, metav1.CreateOptions{}))(s.t)
}

// play has the gateways say that they do all that blocks say.
func (s *served) play() error {
	ctx, api := s.t.Context(), s.Coil.CoilV2()
	blocks, err := api.AddressBlocks().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	all, err := api.LoadBalancerGateways().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for i := range all.Items {
		g := &all.Items[i]
		g.Status.Applied.Generation, g.Status.Applied.Blocks, g.Status.LastContact = g.Generation, blocks.ResourceVersion, new(metav1.Now())
		if _, err := api.LoadBalancerGateways().UpdateStatus(ctx, g, metav1.UpdateOptions{}); err != nil && !apierrors.IsConflict(err) {
			return err
		}
	}
	return nil
}

// tells waits until a Service tells addresses that a function accepts, and its condition AddressAssigned has a reason.
func (s *served) tells(name, reason string, accept func([]netip.Addr) bool) (told []netip.Addr) {
	s.t.Helper()
	testkit.Eventually(s.t, 30*time.Second, fmt.Sprintf("%s has an address (%s)", name, reason), func() error {
		if err := errors.Join(s.again(s.t.Context()), s.play()); err != nil {
			return err
		}
		o, err := s.services().Get(s.t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		told = nil
		for _, i := range o.Status.LoadBalancer.Ingress {
			told = append(told, netip.MustParseAddr(i.IP))
		}
		if is := meta.FindStatusCondition(o.Status.Conditions, loadbalancer.ConditionAssigned); is == nil || is.Reason != reason || !accept(told) {
			return fmt.Errorf("it tells %s, and says %+v", told, o.Status.Conditions)
		}
		return nil
	})
	return told
}

var floating = netip.MustParsePrefix("203.0.113.0/24")

// isFloating says whether the first of some addresses is a floating IP.
func isFloating(told []netip.Addr) bool { return len(told) > 0 && floating.Contains(told[0]) }

func none(told []netip.Addr) bool { return len(told) == 0 }

// is says whether an address is told.
func is(addr netip.Addr) func([]netip.Addr) bool {
	return func(told []netip.Addr) bool { return len(told) > 0 && told[0] == addr }
}

// claim is the AddressClaim of a Service that was the first one of its address.
func (s *served) claim(name string) *v2.AddressClaim {
	s.t.Helper()
	o := testkit.Must(s.services().Get(s.t.Context(), name, metav1.GetOptions{}))(s.t)
	return testkit.Must(s.Coil.CoilV2().AddressClaims(metav1.NamespaceSystem).Get(s.t.Context(), "lb-"+string(o.UID), metav1.GetOptions{}))(s.t)
}

// has waits until the project has the addresses of some claims, complete, and the gateways may use these alone.
func (s *served) has(when string, claims ...*v2.AddressClaim) {
	s.t.Helper()
	var want, wantPairs []string
	for _, c := range claims {
		want = append(want, "one/"+c.Name+" port floating")
		p := c.Status.Provided
		wantPairs = append(wantPairs, p.IPv4)
		if p.IPv6 != "" {
			wantPairs = append(wantPairs, p.IPv6)
		}
	}
	slices.Sort(want)
	slices.Sort(wantPairs)
	testkit.Eventually(s.t, 30*time.Second, when, func() error {
		if err := s.again(s.t.Context()); err != nil {
			return err
		}
		if got := s.inventory(); !slices.Equal(got, want) {
			return fmt.Errorf("the project has %q, want %q", got, want)
		}
		for _, port := range s.ports {
			if got := s.pairs(port); !slices.Equal(got, wantPairs) {
				return fmt.Errorf("a gateway has the pairs %q, want %q", got, wantPairs)
			}
		}
		return nil
	})
}

// ranges are subnets of a pool whose second one may be empty.
func ranges(ipv4, ipv6 string) v2.SubnetSet {
	all := v2.SubnetSet{IPv4: &ipv4}
	if ipv6 != "" {
		all.IPv6 = &ipv6
	}
	return all
}

// Test1Service has Services get addresses of both families, share one, and give it back, with a bounded number of calls.
func Test1Service(t *testing.T) {
	s := newServed(t, ranges("10.1.0.0/24", "fd00:1::/120"))
	s.make("web", 80)
	told := s.tells("web", "AddressAssigned", isFloating)
	web := s.claim("web")
	p := web.Status.Provided
	if p == nil || p.FloatingIP != told[0].String() || web.Status.Addresses[0].IPv4 != p.IPv4 || web.Status.Addresses[0].IPv6 != p.IPv6 || len(told) < len(web.Status.Addresses) {
		t.Fatalf("the Service tells %s, and its claim %+v", told, web.Status)
	}
	s.has("made", web)
	t.Run("coilctl why address", func(t *testing.T) {
		d := coilctl.Examiner{Core: s.Core, Coil: s.Coil}.Address(t.Context(), told[0])
		for step, says := range map[string]string{
			diagnosis.StepOpenStack: "port " + p.PortID + ": it leads to " + p.IPv4, diagnosis.StepBlock: "is at gateways", diagnosis.StepService: s.pool + "/web",
		} {
			if !slices.ContainsFunc(d.Steps, func(is diagnosis.Step) bool { return is.Step == step && strings.Contains(is.Seen, says) }) {
				t.Errorf("of %s step %q doesn't say %q: %+v", told[0], step, says, d.Steps)
			}
		}
	})

	t.Run("2 shared", func(t *testing.T) {
		s.calls()
		s.make("other", 81)
		s.tells("other", "AddressAssigned", is(told[0]))
		for _, call := range s.calls() {
			if !strings.HasPrefix(call, "GET") {
				t.Errorf("for a Service that shares an address there is the call %s", call)
			}
		}
		s.make("same", 80)
		if second := s.tells("same", "AddressAssigned", isFloating); second[0] == told[0] {
			t.Errorf("two Services have %s and one port", second[0])
		}
		s.has("of three Services", web, s.claim("same"))
	})
	t.Run("no call while nothing changes", func(t *testing.T) {
		testkit.Check(t, s.restarted(t.Context(), ""))
		s.tells("web", "AddressAssigned", is(told[0]))
		s.calls()
		var all []string
		testkit.Eventually(t, 30*time.Second, "the cloud is listed", func() error {
			if all = append(all, s.calls()...); len(all) < 30 { // two times at least
				return fmt.Errorf("%d calls", len(all))
			}
			return nil
		})
		for _, call := range all {
			if !strings.HasPrefix(call, "GET ports") && !strings.HasPrefix(call, "GET floatingips") {
				t.Errorf("while nothing changes there is the call %s", call)
			}
		}
	})
	t.Run("5 another type", func(t *testing.T) {
		_, err := s.services().Patch(t.Context(), "web", "application/merge-patch+json", []byte(`{"spec":{"type":"ClusterIP","loadBalancerClass":null}}`), metav1.PatchOptions{})
		testkit.Check(t, err, s.services().Delete(t.Context(), "other", metav1.DeleteOptions{}))
		s.has("without the first address", s.claim("same"))
		if o := testkit.Must(s.services().Get(t.Context(), "web", metav1.GetOptions{}))(t); len(o.Annotations) > 0 || len(o.Finalizers) > 0 || len(o.Status.LoadBalancer.Ingress) > 0 {
			t.Errorf("the Service is left with %+v, %+v", o.ObjectMeta, o.Status)
		}
	})
}

// Test12Service has others change what a Service has in the cloud: it is repaired, and the Service keeps its address.
func Test12Service(t *testing.T) {
	s := newServed(t, ranges("10.1.0.0/24", ""))
	s.make("web", 80)
	told := s.tells("web", "AddressAssigned", isFloating)
	c := s.claim("web")
	s.update("ports/"+s.ports[0], "port", map[string]any{"allowed_address_pairs": []any{}})
	s.has("after the pairs were changed", c)

	s.drop("ports/" + c.Status.Provided.PortID)
	s.has("after the port was deleted", c)
	s.tells("web", "AddressAssigned", is(told[0]))

	float := s.raw("floatingips", "")[0]
	s.drop("floatingips/" + float.ID)
	again := s.tells("web", "AddressAssigned", func(a []netip.Addr) bool { return isFloating(a) && a[0] != told[0] })
	s.has("after the floating IP was deleted", c)
	if f := s.raw("floatingips", ""); f[0].Floating != again[0].String() {
		t.Errorf("the Service tells %s, and the cloud has %+v", again, f)
	}

	// A claim that is lost without its finalizer's work comes back with the same address and the same port.
	claims := s.Coil.CoilV2().AddressClaims(metav1.NamespaceSystem)
	port := s.claim("web").Status.Provided.PortID
	s.controller.Kill()
	_, err := claims.Patch(t.Context(), c.Name, "application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
	testkit.Check(t, err, claims.Delete(t.Context(), c.Name, metav1.DeleteOptions{}), s.restarted(t.Context(), ""))
	s.tells("web", "AddressAssigned", is(again[0]))
	testkit.Eventually(t, 40*time.Second, "another claim has the port", func() error {
		all, err := claims.List(t.Context(), metav1.ListOptions{})
		if err != nil || len(all.Items) != 1 || all.Items[0].UID == c.UID || all.Items[0].Status.Provided == nil || all.Items[0].Status.Provided.PortID != port {
			return fmt.Errorf("there are the claims %+v, %w", all.Items, err)
		}
		return nil
	})
	s.tells("web", "AddressAssigned", is(again[0]))
}

// Test10Service kills the controller at each step of giving an address and of taking it back. Nothing is left over, and another Service keeps its address.
func Test10Service(t *testing.T) {
	s := newServed(t, ranges("10.1.0.0/24", "fd00:1::/120"))
	s.make("calm", 80)
	told := s.tells("calm", "AddressAssigned", isFloating)
	calm := s.claim("calm")
	points, rounds := slices.Clone(faultpoint.Cloud), 1
	if testkit.LBForm.Long() {
		points, rounds = append(points, faultpoint.Serve...), 200/(len(faultpoint.Cloud)+len(faultpoint.Serve))+1
	}
	for range rounds {
		for _, p := range points {
			before := s.kills
			testkit.Check(t, s.restarted(t.Context(), string(p)+"=1"))
			s.make("one", 80)
			if got := s.tells("one", "AddressAssigned", isFloating); got[0] == told[0] {
				t.Fatalf("killed at %s: both Services have %s", p, got)
			}
			testkit.Check(t, s.services().Delete(t.Context(), "one", metav1.DeleteOptions{}))
			s.has("killed at "+string(p), calm)
			s.tells("calm", "AddressAssigned", is(told[0]))
			if s.kills == before {
				t.Errorf("the controller wasn't killed at %s", p)
			}
		}
	}
	t.Logf("the controller was killed %d times", s.kills)
}

// Test16Service has the cloud fail: Services that have an address keep it, new ones say why they wait in the cloud's words, and get theirs when it works again.
func Test16Service(t *testing.T) {
	s := newServed(t, ranges("10.1.0.0/24", ""))
	s.make("calm", 80)
	told := s.tells("calm", "AddressAssigned", isFloating)
	for name, c := range map[string]struct {
		fault  func(lab.Call) lab.Fault
		reason openstack.Reason
	}{
		"down": {func(lab.Call) lab.Fault { return lab.Fault{Down: true} }, openstack.Temporary},
		"503":  {func(lab.Call) lab.Fault { return lab.Fault{Code: 503, Body: "<html>no server is available</html>"} }, openstack.Temporary},
		"429":  {func(lab.Call) lab.Fault { return lab.Fault{Code: 429, Body: "too many", RetryAfter: time.Second} }, openstack.Temporary},
		"login refused": {func(lab.Call) lab.Fault {
			return lab.Fault{Code: 401, Body: `{"error":{"code":401,"message":"who are you?"}}`}
		}, openstack.AuthFailed},
		"quota exhausted": {func(c lab.Call) lab.Fault {
			if c.Method == "POST" && c.Path == "ports" {
				return lab.Fault{Code: 409, Body: `{"NeutronError":{"type":"OverQuota","message":"Quota exceeded for resources: ['port'].","detail":""}}`}
			}
			return lab.Fault{}
		}, openstack.QuotaExceeded},
	} {
		if (name == "503" || name == "429") && !testkit.LBForm.Long() {
			continue // to the controller they are as the one that is down
		}
		t.Run(name, func(t *testing.T) {
			s.front.SetFault(c.fault)
			s.make("new", 80)
			s.tells("new", string(c.reason), none)
			s.calls()
			s.tells("calm", "AddressAssigned", is(told[0]))
			s.front.SetFault(nil)
			s.tells("new", "AddressAssigned", isFloating)
			testkit.Check(t, s.services().Delete(t.Context(), "new", metav1.DeleteOptions{}))
			s.has("after "+name, s.claim("calm"))
		})
	}
}
