package apiserver

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestEgressInvalidTemplate(t *testing.T) {
	c := newEgressCluster(t)
	c.start(t)
	for name, tt := range map[string]struct{ spec, where string }{
		"misspelled":   {`{containers: [{name: egress, resource: {}}]}`, `unknown field "template.spec.containers[0].resource"`},
		"of-a-type":    {`{tolerations: [{key: 1}]}`, "template.spec.tolerations.key of type string"},
		"host-network": {`{hostNetwork: true}`, "template.spec.hostNetwork"},
		"not-valid":    {`{restartPolicy: Never}`, "spec.template.spec.restartPolicy"},
		"no-image":     {`{containers: [{name: sidecar}]}`, "spec.template.spec.containers[1].image"},
		"name-twice":   {`{containers: [{name: egress}, {name: egress, image: i}]}`, "containers"},
	} {
		t.Run(name, func(t *testing.T) {
			c.egress(t, name, `{destinations: [0.0.0.0/0], podDisruptionBudget: {maxUnavailable: 1}, template: {spec: `+tt.spec+`}}`)
			got := c.condition(t, name, v2.EgressInvalidTemplate, metav1.ConditionTrue, "InvalidTemplate")
			if !strings.Contains(got.Message, tt.where) {
				t.Errorf("message %q doesn't name %s", got.Message, tt.where)
			}
			c.condition(t, name, v2.EgressAvailable, metav1.ConditionFalse, "InvalidTemplate")
			testkit.Eventually(t, 10*time.Second, "an Event", func() error {
				if c.reasons(t, c.ns, name)["InvalidTemplate"] == 0 {
					return errors.New("none")
				}
				return nil
			})
			// The rest is there.
			testkit.Must(c.core.CoreV1().Services(c.ns).Get(t.Context(), name, metav1.GetOptions{}))(t)
			testkit.Must(c.core.PolicyV1().PodDisruptionBudgets(c.ns).Get(t.Context(), name, metav1.GetOptions{}))(t)
			c.change(t, name, `spec: {template: null}`)
			c.deployment(t, name, "is there", exists)
			c.condition(t, name, v2.EgressAvailable, metav1.ConditionFalse, "NoRouterReady")
			e := testkit.Must(c.coil.CoilV2().Egresses(c.ns).Get(t.Context(), name, metav1.GetOptions{}))(t)
			if left := meta.FindStatusCondition(e.Status.Conditions, v2.EgressInvalidTemplate); left != nil {
				t.Errorf("condition %+v is left", left)
			}
		})
	}
	t.Run("what was there stays", func(t *testing.T) {
		c.egress(t, "kept", `{destinations: [0.0.0.0/0], template: {spec: {priorityClassName: ""}}}`)
		before := c.deployment(t, "kept", "is there", exists)
		c.change(t, "kept", `spec: {template: {spec: {toleration: []}}}`)
		c.condition(t, "kept", v2.EgressInvalidTemplate, metav1.ConditionTrue, "InvalidTemplate")
		if after := c.deployment(t, "kept", "is there", exists); after.Generation != before.Generation {
			t.Error("the Deployment was changed")
		}
	})
}

// TestEgressForeignObjects holds that what somebody else has made is not taken over.
func TestEgressForeignObjects(t *testing.T) {
	c := newEgressCluster(t)
	c.start(t)
	theirs := testkit.Must(c.core.CoreV1().Services(c.ns).Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "nat"},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": "web"}, Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{}))(t)
	account := testkit.Must(c.core.CoreV1().ServiceAccounts(c.ns).Create(t.Context(), &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Name: "coil-egress"}, ImagePullSecrets: []corev1.LocalObjectReference{{Name: "registry"}},
	}, metav1.CreateOptions{}))(t)
	c.egress(t, "nat", `destinations: [0.0.0.0/0]`)
	if got := c.condition(t, "nat", v2.EgressAvailable, metav1.ConditionFalse, "Conflict"); !strings.Contains(got.Message, "Service nat") {
		t.Errorf("message %q doesn't name the Service", got.Message)
	}
	c.deployment(t, "nat", "is there all the same", exists)
	now := testkit.Must(c.core.CoreV1().Services(c.ns).Get(t.Context(), "nat", metav1.GetOptions{}))(t)
	testkit.Check(t, same(theirs, now))
	// It has no label by which its end could be seen.
	testkit.Check(t, c.core.CoreV1().Services(c.ns).Delete(t.Context(), "nat", metav1.DeleteOptions{}))
	testkit.Eventually(t, 40*time.Second, "the Service is the Egress's", func() error {
		s, err := c.core.CoreV1().Services(c.ns).Get(t.Context(), "nat", metav1.GetOptions{})
		if err == nil && s.Spec.Ports[0].Port != 5555 {
			err = errors.New("another Service")
		}
		return err
	})
	c.condition(t, "nat", v2.EgressAvailable, metav1.ConditionFalse, "NoRouterReady")
	// An account serves, whoever made it.
	testkit.Check(t, same(account, testkit.Must(c.core.CoreV1().ServiceAccounts(c.ns).Get(t.Context(), "coil-egress", metav1.GetOptions{}))(t)))
	requireRights(t, c, c.ns, c.ns, true)
}

// requireRanges waits until the status of an Egress has ranges, and hasn't others.
func (c *egressCluster) requireRanges(t testing.TB, egress string, want []string, not ...string) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("in-cluster ranges %q", want), func() error {
		e, err := c.coil.CoilV2().Egresses(c.ns).Get(t.Context(), egress, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, w := range want {
			if !slices.Contains(e.Status.InClusterCIDRs, w) {
				return fmt.Errorf("ranges %q", e.Status.InClusterCIDRs)
			}
		}
		for _, n := range not {
			if slices.Contains(e.Status.InClusterCIDRs, n) {
				return fmt.Errorf("ranges %q", e.Status.InClusterCIDRs)
			}
		}
		return nil
	})
}

func (c *egressCluster) nodeWith(t testing.TB, name string, podCIDRs []string, addrs ...string) {
	t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDRs: podCIDRs}}
	if len(podCIDRs) > 0 {
		n.Spec.PodCIDR = podCIDRs[0]
	}
	n = testkit.Must(c.core.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{}))(t)
	for _, a := range addrs {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	testkit.Must(c.core.CoreV1().Nodes().UpdateStatus(t.Context(), n, metav1.UpdateOptions{}))(t)
	t.Cleanup(func() {
		if err := c.core.CoreV1().Nodes().Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil && t.Context().Err() == nil {
			t.Error(err)
		}
	})
}

func TestEgressInClusterRanges(t *testing.T) {
	c := newEgressCluster(t)
	c.start(t)
	c.egress(t, "nat", `destinations: [0.0.0.0/0]`)
	c.requireRanges(t, "nat", []string{"10.96.0.0/16", "fd00:10:96::/112"})
	c.nodeWith(t, "range-a", []string{"10.244.0.0/24"}, "203.0.113.4", "2001:db8::4")
	c.nodeWith(t, "range-b", nil, "203.0.113.5")
	c.requireRanges(t, "nat", []string{"203.0.113.4/31", "2001:db8::4/128"}, "10.244.0.0/24")
	c.pool(t, "range-pool", 5, dual("100.64.0.0/20", "fd64::/116"))
	t.Cleanup(func() {
		if _, err := c.coil.CoilV2().AddressPools().Patch(t.Context(), "range-pool", types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil && t.Context().Err() == nil {
			t.Error(err)
		}
	})
	c.requireRanges(t, "nat", []string{"100.64.0.0/20", "fd64::/116"})
	testkit.Must(c.coil.CoilV2().AddressPools().Patch(t.Context(), "range-pool", types.JSONPatchType,
		[]byte(`[{"op": "add", "path": "/spec/subnets/-", "value": {"ipv4": "100.64.16.0/20", "ipv6": "fd65::/116"}}]`), metav1.PatchOptions{}))(t)
	c.requireRanges(t, "nat", []string{"100.64.0.0/19", "fd65::/116"}, "100.64.0.0/20")
	testkit.Must(c.core.NetworkingV1().ServiceCIDRs().Create(t.Context(), &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: "more"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"198.51.100.0/24"}},
	}, metav1.CreateOptions{}))(t)
	c.requireRanges(t, "nat", []string{"198.51.100.0/24"})
	for _, n := range []string{"range-a"} {
		testkit.Check(t, c.core.CoreV1().Nodes().Delete(t.Context(), n, metav1.DeleteOptions{}))
	}
	c.requireRanges(t, "nat", []string{"203.0.113.5/32"}, "203.0.113.4/31", "2001:db8::4/128")
	testkit.Check(t, c.coil.CoilV2().AddressPools().Delete(t.Context(), "range-pool", metav1.DeleteOptions{}))
	c.requireRanges(t, "nat", nil, "100.64.0.0/19", "fd64::/116")
	c.nodeWith(t, "range-a", nil)
}

// TestEgressWithoutIPAM runs the program without any right on what Coil's address
// management has.
func TestEgressWithoutIPAM(t *testing.T) {
	c := newEgressCluster(t)
	api := c.core.RbacV1().ClusterRoleBindings()
	const binding = "coil-egress-controller-ipam"
	was := testkit.Must(api.Get(t.Context(), binding, metav1.GetOptions{}))(t)
	testkit.Check(t, api.Delete(t.Context(), binding, metav1.DeleteOptions{}))
	t.Cleanup(func() {
		was.ResourceVersion, was.UID = "", ""
		testkit.Must(api.Create(context.WithoutCancel(t.Context()), was, metav1.CreateOptions{}))(t)
	})
	rec := &recorder{}
	asked := make(chan string, 1)
	cfg := intercept(rec.wrap(c.account(t)), func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
		for _, resource := range []string{"addresspools", "addressblocks", "addressclaims", "blockrequests"} {
			if strings.Contains(r.URL.Path, resource) {
				select {
				case asked <- r.Method + " " + r.URL.Path:
				default:
				}
			}
		}
		return next.RoundTrip(r)
	})
	o := egressOptions()
	o.EnableIPAM = false
	c.startWith(t, cfg, o)
	c.nodeWith(t, "foreign", []string{"100.65.0.0/24", "fd66::/64"}, "203.0.113.9")
	c.egress(t, "nat", `destinations: [0.0.0.0/0]`)
	c.requireRanges(t, "nat", []string{"100.65.0.0/24", "fd66::/64", "203.0.113.9/32", "10.96.0.0/16"})
	c.client(t, c.ns, "a", "nat", "100.65.0.7")
	c.requireClients(t, "nat", "a 100.65.0.7")
	c.change(t, "nat", `spec: {peering: Direct, addresses: {use: Client, pool: partners, count: 2}}`)
	requireMessage(t, c.condition(t, "nat", v2.EgressAddressesReady, metav1.ConditionFalse, "NoPools"), "install the variant egress-only-with-addresses, or add the component with-addresses (manifests/README.md), or take spec.addresses away")
	c.egress(t, "ofnodes", `{destinations: [0.0.0.0/0], addresses: {use: Node}}`)
	requireMessage(t, c.condition(t, "ofnodes", v2.EgressAddressesReady, metav1.ConditionFalse, "ForeignPods"), "nodes don't translate for routers then")
	select {
	case r := <-asked:
		t.Errorf("the program asks for objects of IPAM: %s", r)
	default:
	}
}

// TestEgressFloatingWithoutIPAM: behind another plugin an Egress has addresses of a pool, and pods are where Nodes say.
func TestEgressFloatingWithoutIPAM(t *testing.T) {
	c := newEgressCluster(t)
	c.clean(t)
	c.pool(t, "partners", 0, dual("198.51.100.0/29", "2001:db8::/125"))
	c.run(t, c.serviceAccount(t), options())
	o := egressOptions()
	o.EnableIPAM, o.EnableFloating = false, true
	c.startWith(t, c.account(t), o)
	c.nodeWith(t, "foreign-floating", []string{"100.66.0.0/24", "fd67::/64"}, "203.0.113.10")
	c.egress(t, "nat", `{destinations: [0.0.0.0/0], peering: Direct, addresses: {use: Client, pool: partners, count: 1}}`)
	c.requireRanges(t, "nat", []string{"100.66.0.0/24", "fd67::/64", "203.0.113.10/32", "10.96.0.0/16"})
	requireMessage(t, c.condition(t, "nat", v2.EgressAddressesReady, metav1.ConditionFalse, "NoHolder"), "No node has 198.51.100.0")
	c.routerOn(t, "foreign-floating")
	c.placed(t, "foreign-floating")
}

// TestEgressRestart holds that a restart writes nothing.
func TestEgressRestart(t *testing.T) {
	c := newEgressCluster(t)
	rec := &recorder{}
	stop := c.startWith(t, rec.wrap(c.account(t)), egressOptions())
	c.egress(t, "nat", fullEgress)
	c.egress(t, "plain", `destinations: [192.0.2.0/24]`)
	c.client(t, c.ns, "a", "nat", "10.3.0.1", "fd00:3::1")
	c.requireClients(t, "nat", "a 10.3.0.1", "a fd00:3::1")
	c.condition(t, "plain", v2.EgressAvailable, metav1.ConditionFalse, "NoRouterReady")
	c.requireCount(t, "nat", 1)
	rec.requireQuiet(t)
	stop()

	rec.take()
	stop = c.startWith(t, rec.wrap(c.account(t)), egressOptions())
	// A later Egress is done, so all earlier ones are, too.
	c.egress(t, "last", `destinations: [192.0.2.0/24]`)
	c.condition(t, "last", v2.EgressAvailable, metav1.ConditionFalse, "NoRouterReady")
	c.change(t, "plain", `metadata: {annotations: {touched: "yes"}}`)
	c.client(t, c.ns, "b", "last", "10.3.0.2")
	c.requireCount(t, "last", 1)
	rec.requireQuiet(t)
	stop()
	for _, w := range rec.take() {
		if !strings.Contains(w, "/last") && !strings.HasSuffix(w, "/serviceaccounts/coil-egress") && !strings.HasSuffix(w, "/rolebindings/coil-egress") && !strings.HasSuffix(w, "/endpointslices") {
			t.Errorf("the restarted program wrote: %s", w)
		}
	}
}

// requireQuiet waits until nothing was written for two seconds.
func (r *recorder) requireQuiet(t testing.TB) {
	t.Helper()
	r.mu.Lock()
	n := len(r.writes)
	r.mu.Unlock()
	since := time.Now()
	testkit.Eventually(t, 30*time.Second, "nothing is written any more", func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.writes) != n {
			n, since = len(r.writes), time.Now()
		}
		if time.Since(since) < 2*time.Second {
			return fmt.Errorf("%d writes", n)
		}
		return nil
	})
}

// ready makes the Deployment of an Egress say that its routers are ready, as its
// controller does.
func (c *egressCluster) ready(t testing.TB, egress string, n int32) {
	t.Helper()
	testkit.Eventually(t, 10*time.Second, "status of the Deployment", func() error {
		d, err := c.core.AppsV1().Deployments(c.ns).Get(t.Context(), egress, metav1.GetOptions{})
		if err != nil {
			return err
		}
		d.Status = appsv1.DeploymentStatus{ObservedGeneration: d.Generation, Replicas: n, ReadyReplicas: n, AvailableReplicas: n}
		_, err = c.core.AppsV1().Deployments(c.ns).UpdateStatus(t.Context(), d, metav1.UpdateOptions{})
		return err
	})
}

func TestEgressAvailable(t *testing.T) {
	c := newEgressCluster(t)
	c.start(t)
	c.egress(t, "nat", `{destinations: [0.0.0.0/0], replicas: 2}`)
	c.condition(t, "nat", v2.EgressAvailable, metav1.ConditionFalse, "NoRouterReady")
	c.ready(t, "nat", 2)
	c.condition(t, "nat", v2.EgressAvailable, metav1.ConditionTrue, "RoutersReady")
	scale := testkit.Must(c.coil.CoilV2().Egresses(c.ns).GetScale(t.Context(), "nat", metav1.GetOptions{}))(t)
	if want := "app.kubernetes.io/component=egress,app.kubernetes.io/instance=nat,app.kubernetes.io/name=coil"; scale.Status.Replicas != 2 || scale.Status.Selector != want {
		t.Errorf("scale is %+v", scale.Status)
	}
	c.ready(t, "nat", 0)
	c.condition(t, "nat", v2.EgressAvailable, metav1.ConditionFalse, "NoRouterReady")
	testkit.Eventually(t, 10*time.Second, "Events", func() error {
		got := c.reasons(t, c.ns, "nat")
		if got["RoutersReady"] == 0 || got["NoRouterReady"] == 0 {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
}

func requireMessage(t testing.TB, c metav1.Condition, words string) {
	t.Helper()
	if !strings.Contains(c.Message, words) {
		t.Errorf("message %q doesn't have %q", c.Message, words)
	}
}
