package apiserver

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/coil-net/coil/generated/clientset/versioned"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// policy makes an EgressPolicy from the YAML of its spec.
func (c *egressCluster) policy(t testing.TB, ns, name, spec string) {
	t.Helper()
	p := &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
	testkit.Check(t, yaml.UnmarshalStrict([]byte(spec), &p.Spec))
	testkit.Must(c.coil.CoilV2().EgressPolicies(ns).Create(t.Context(), p, metav1.CreateOptions{}))(t)
}

// clusterPolicy makes an EgressClusterPolicy, which goes with the test.
func (c *egressCluster) clusterPolicy(t testing.TB, name, spec string) {
	t.Helper()
	p := &v2.EgressClusterPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
	testkit.Check(t, yaml.UnmarshalStrict([]byte(spec), &p.Spec))
	api := c.coil.CoilV2().EgressClusterPolicies()
	testkit.Must(api.Create(t.Context(), p, metav1.CreateOptions{}))(t)
	t.Cleanup(func() { testkit.Check(t, api.Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{})) })
}

// changePolicy merges YAML into an EgressPolicy.
func (c *egressCluster) changePolicy(t testing.TB, ns, name, patch string) {
	t.Helper()
	json := testkit.Must(yaml.YAMLToJSON([]byte(patch)))(t)
	testkit.Must(c.coil.CoilV2().EgressPolicies(ns).Patch(t.Context(), name, types.MergePatchType, json, metav1.PatchOptions{}))(t)
}

// requirePolicy waits until a policy has a reason of Accepted, and returns its status. An empty namespace is that of EgressClusterPolicies.
func (c *egressCluster) requirePolicy(t testing.TB, ns, name, reason string) (status v2.EgressPolicyStatus) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%s/%s is %s", ns, name, reason), func() error {
		var generation int64
		if ns == "" {
			p, err := c.coil.CoilV2().EgressClusterPolicies().Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			status, generation = p.Status, p.Generation
		} else {
			p, err := c.coil.CoilV2().EgressPolicies(ns).Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			status, generation = p.Status, p.Generation
		}
		is := meta.FindStatusCondition(status.Conditions, v2.PolicyAccepted)
		if is == nil || is.Reason != reason || status.ObservedGeneration != generation || status.Resolved.ObservedGeneration != generation {
			return fmt.Errorf("generation %d, status %+v", generation, status)
		}
		return nil
	})
	return status
}

// chosen returns the slices of an Egress in which policies list clients.
func (c *egressCluster) chosen(t testing.TB, egress string) []discoveryv1.EndpointSlice {
	t.Helper()
	return testkit.Must(c.core.DiscoveryV1().EndpointSlices(c.ns).List(t.Context(), metav1.ListOptions{LabelSelector: v2.LabelPolicyEgress + "=" + egress}))(t).Items
}

// requireChosen waits until policies have exactly these clients of an Egress, given as "policy pod address".
func (c *egressCluster) requireChosen(t testing.TB, egress string, want ...string) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("clients of %s by policies are %q", egress, want), func() error {
		got, all := map[string]bool{}, map[string]bool{}
		for _, s := range c.chosen(t, egress) {
			var origin struct{ Name string }
			if err := yaml.Unmarshal([]byte(s.Annotations[v2.AnnotationPolicy]), &origin); err != nil {
				return err
			}
			for _, ep := range s.Endpoints {
				got[origin.Name+" "+ep.TargetRef.Name+" "+ep.Addresses[0]] = true
			}
		}
		for _, w := range want {
			all[w] = true
		}
		return same(fmt.Sprint(all), fmt.Sprint(got))
	})
}

// worker makes a pod with the label app, and addresses.
func (c *egressCluster) worker(t testing.TB, ns, name, app string, addrs ...string) *corev1.Pod {
	t.Helper()
	p := testkit.Must(c.core.CoreV1().Pods(ns).Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": app}},
		Spec:       corev1.PodSpec{NodeName: "node", Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}, metav1.CreateOptions{}))(t)
	return testkit.Must(c.setStatus(t.Context(), p, corev1.PodRunning, addrs...))(t)
}

func (c *egressCluster) label(t testing.TB, p *corev1.Pod, app string) {
	t.Helper()
	testkit.Must(c.core.CoreV1().Pods(p.Namespace).Patch(t.Context(), p.Name, types.MergePatchType, []byte(`{"metadata":{"labels":{"app":"`+app+`"}}}`), metav1.PatchOptions{}))(t)
}

func TestEgressPolicies(t *testing.T) {
	c := newEgressCluster(t)
	c.startCounting(t)
	shop := fresh("shop")
	c.namespace(t, shop, map[string]string{"shop": shop})
	c.egress(t, "nat", `destinations: [0.0.0.0/0, 10.0.0.0/8]`)
	egress := `egress: {namespace: ` + c.ns + `, name: nat}, `
	a := c.worker(t, shop, "a", "front", "10.3.0.1", "fd00:3::1")
	c.worker(t, shop, "b", "back", "10.3.0.2")

	c.policy(t, shop, "labels", `{`+egress+`pods: {matchLabels: {app: front}}, destinations: [203.0.113.0/24]}`)
	c.requireChosen(t, "nat", "labels a 10.3.0.1", "labels a fd00:3::1")
	if st := c.requirePolicy(t, shop, "labels", "Accepted"); st.Summary.Egress != c.ns+"/nat" || st.Resolved.Egress.Name != "nat" {
		t.Errorf("status %+v", st)
	}
	t.Run("slices are as the contract says", func(t *testing.T) {
		e := testkit.Must(c.coil.CoilV2().Egresses(c.ns).Get(t.Context(), "nat", metav1.GetOptions{}))(t)
		p := testkit.Must(c.coil.CoilV2().EgressPolicies(shop).Get(t.Context(), "labels", metav1.GetOptions{}))(t)
		want := fmt.Sprintf(`{"namespace":%q,"name":"labels","created":%q,"destinations":["203.0.113.0/24"]}`, shop, p.CreationTimestamp.UTC().Format(time.RFC3339))
		all := c.chosen(t, "nat")
		if len(all) != 2 {
			t.Fatalf("%d slices, want one of each family", len(all))
		}
		for _, s := range all {
			_, headless := s.Labels["service.kubernetes.io/headless"]
			_, naming := s.Labels[v2.LabelEgress]
			if !headless || naming || s.Labels["endpointslice.kubernetes.io/managed-by"] != "coil-egress-controller" {
				t.Errorf("labels %v", s.Labels)
			}
			if !metav1.IsControlledBy(&s, e) || len(s.Name) > 63 || !strings.HasPrefix(s.Name, "nat-labels-") || s.Annotations[v2.AnnotationPolicy] != want {
				t.Errorf("%s is owned by %v, annotations %v, want %s", s.Name, s.OwnerReferences, s.Annotations, want)
			}
		}
	})
	t.Run("a pod gets another label", func(t *testing.T) {
		c.label(t, a, "back")
		c.requireChosen(t, "nat")
		c.label(t, a, "front")
		c.requireChosen(t, "nat", "labels a 10.3.0.1", "labels a fd00:3::1")
	})
	t.Run("slices are restored", func(t *testing.T) {
		for name, spoil := range map[string]string{
			"clients": `{"endpoints": null}`, "the policy": `{"metadata": {"annotations": {"coil.cybozu.com/policy": "{}"}}}`,
			"the label": `{"metadata": {"labels": {"coil.cybozu.com/policy-egress": null}}}`,
			"managed":   `{"metadata": {"labels": {"endpointslice.kubernetes.io/managed-by": "me"}}}`,
		} {
			s := c.chosen(t, "nat")[0]
			testkit.Must(c.core.DiscoveryV1().EndpointSlices(c.ns).Patch(t.Context(), s.Name, types.MergePatchType, []byte(spoil), metav1.PatchOptions{}))(t)
			testkit.Eventually(t, 20*time.Second, name, func() error {
				got, err := c.core.DiscoveryV1().EndpointSlices(c.ns).Get(t.Context(), s.Name, metav1.GetOptions{})
				if err != nil {
					return err
				}
				return firstError(same(addresses(s), addresses(*got)), same(s.Labels, got.Labels), same(s.Annotations, got.Annotations))
			})
		}
	})
	t.Run("Services", func(t *testing.T) {
		c.policy(t, shop, "services", `{`+egress+`services: [front, back]}`)
		status := c.requirePolicy(t, shop, "services", "ServiceNotFound")
		requireMessage(t, *meta.FindStatusCondition(status.Conditions, v2.PolicyAccepted), "There is no Service front, back")
		testkit.Eventually(t, 10*time.Second, "it is told", func() error {
			return same(map[string]int32{"ServiceNotFound": 1}, c.reasons(t, shop, "services"))
		})
		for _, name := range []string{"front", "back"} {
			testkit.Must(c.core.CoreV1().Services(shop).Create(t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name},
				Spec: corev1.ServiceSpec{ClusterIP: "None", Selector: map[string]string{"app": name}}}, metav1.CreateOptions{}))(t)
		}
		status = c.requirePolicy(t, shop, "services", "Accepted")
		if len(status.Resolved.Pods) != 2 {
			t.Errorf("resolved %+v", status.Resolved)
		}
		all := []string{"labels a 10.3.0.1", "labels a fd00:3::1", "services a 10.3.0.1", "services a fd00:3::1", "services b 10.3.0.2"}
		c.requireChosen(t, "nat", all...)
		// A Service that is made anew doesn't cost its pods their Egress.
		testkit.Check(t, c.core.CoreV1().Services(shop).Delete(t.Context(), "back", metav1.DeleteOptions{}))
		c.requirePolicy(t, shop, "services", "ServiceNotFound")
		c.requireChosen(t, "nat", all...)
		c.changePolicy(t, shop, "services", `spec: {services: [front]}`)
		c.requirePolicy(t, shop, "services", "Accepted")
		c.requireChosen(t, "nat", all[:4]...)
	})
	t.Run("the status counts pods once", func(t *testing.T) {
		c.client(t, shop, "annotated", "nat", "10.3.0.9")
		c.requireCount(t, "nat", 2)
		testkit.Eventually(t, 50*time.Second, "the policy counts", func() error {
			p, err := c.coil.CoilV2().EgressPolicies(shop).Get(t.Context(), "services", metav1.GetOptions{})
			if err != nil {
				return err
			}
			return same(int32(1), p.Status.Clients)
		})
	})
	t.Run("routers read them", func(t *testing.T) {
		cfg := testkit.Must(c.api.UserConfig("system:serviceaccount:"+c.ns+":coil-egress", "system:serviceaccounts", "system:serviceaccounts:"+c.ns))(t)
		core := testkit.Must(kubernetes.NewForConfig(cfg))(t)
		testkit.Eventually(t, 20*time.Second, "routers read the clients of policies", func() error {
			l, err := core.DiscoveryV1().EndpointSlices(c.ns).List(t.Context(), metav1.ListOptions{LabelSelector: v2.LabelPolicyEgress + "=nat"})
			if err != nil {
				return err
			}
			return same(4, len(l.Items))
		})
	})
	t.Run("not accepted", func(t *testing.T) {
		testkit.Check(t, c.coil.CoilV2().EgressPolicies(shop).Delete(t.Context(), "services", metav1.DeleteOptions{}))
		c.requireChosen(t, "nat", "labels a 10.3.0.1", "labels a fd00:3::1")
		e := testkit.Must(c.coil.CoilV2().Egresses(c.ns).Get(t.Context(), "nat", metav1.GetOptions{}))(t)
		i := slices.IndexFunc(e.Status.InClusterCIDRs, func(r string) bool { return strings.HasPrefix(r, "10.") })
		if i < 0 {
			t.Fatalf("none of %v is in a destination of the Egress", e.Status.InClusterCIDRs)
		}
		for _, tt := range []struct{ spec, reason string }{
			{`{egress: {name: typo}}`, "EgressNotFound"},
			{`{destinations: [192.168.0.0/16]}`, "DestinationOutside"},
			{`{destinations: ["` + e.Status.InClusterCIDRs[i] + `"]}`, "DestinationInCluster"},
			{`{pods: {matchExpressions: [{key: app, operator: Like}]}}`, "SelectorInvalid"},
		} {
			c.changePolicy(t, shop, "labels", `spec: `+tt.spec)
			c.requirePolicy(t, shop, "labels", tt.reason)
			c.requireChosen(t, "nat")
			c.changePolicy(t, shop, "labels", `spec: {egress: {name: nat}, destinations: null, pods: {matchExpressions: null}}`)
			c.requirePolicy(t, shop, "labels", "Accepted")
			c.requireChosen(t, "nat", "labels a 10.3.0.1", "labels a fd00:3::1")
		}
		c.change(t, "nat", `spec: {allowedNamespaces: {matchLabels: {shop: other}}}`)
		c.requirePolicy(t, shop, "labels", "NamespaceNotAllowed")
		c.requireChosen(t, "nat")
		c.change(t, "nat", `spec: {allowedNamespaces: null}`)
		c.requireChosen(t, "nat", "labels a 10.3.0.1", "labels a fd00:3::1")
	})
	t.Run("the policy goes", func(t *testing.T) {
		testkit.Check(t, c.coil.CoilV2().EgressPolicies(shop).Delete(t.Context(), "labels", metav1.DeleteOptions{}))
		testkit.Eventually(t, 10*time.Second, "no slice is left", func() error { return same(0, len(c.chosen(t, "nat"))) })
	})
}

// firstError returns the first of some errors.
func firstError(all ...error) error {
	for _, err := range all {
		if err != nil {
			return err
		}
	}
	return nil
}

func TestEgressDefaults(t *testing.T) {
	c := newEgressCluster(t)
	c.start(t)
	shop := fresh("shop")
	c.namespace(t, shop, nil)
	c.worker(t, shop, "a", "front", "10.4.0.1")
	annotate := func(value string) {
		t.Helper()
		testkit.Must(c.core.CoreV1().Namespaces().Patch(t.Context(), shop, types.MergePatchType, []byte(`{"metadata":{"annotations":{"coil.cybozu.com/egress":`+value+`}}}`), metav1.PatchOptions{}))(t)
	}
	c.egress(t, "own", `destinations: [0.0.0.0/0]`)
	c.policy(t, shop, "p", `pods: {matchLabels: {app: front}}`)
	c.requirePolicy(t, shop, "p", "NoDefaultEgress")
	c.egress(t, "first", `{destinations: [0.0.0.0/0], default: true}`)
	c.requirePolicy(t, shop, "p", "Accepted")
	c.requireChosen(t, "first", "p a 10.4.0.1")

	// Of one second the first by name counts as the older one.
	c.egress(t, "second", `{destinations: [0.0.0.0/0], default: true}`)
	requireMessage(t, c.condition(t, "first", v2.EgressConflicting, metav1.ConditionTrue, "SeveralDefaults"), "This one is the default of the cluster")
	requireMessage(t, c.condition(t, "second", v2.EgressConflicting, metav1.ConditionTrue, "SeveralDefaults"), "Egress "+c.ns+"/first is the default")
	c.requireChosen(t, "second")
	c.change(t, "first", `spec: {default: false}`)
	c.requireChosen(t, "second", "p a 10.4.0.1")
	c.requireChosen(t, "first")
	testkit.Eventually(t, 20*time.Second, "nothing conflicts any more", func() error {
		e, err := c.coil.CoilV2().Egresses(c.ns).Get(t.Context(), "second", metav1.GetOptions{})
		if err != nil {
			return err
		}
		return same(false, meta.IsStatusConditionTrue(e.Status.Conditions, v2.EgressConflicting))
	})

	annotate(`"` + c.ns + `/own"`)
	c.requireChosen(t, "own", "p a 10.4.0.1")
	c.requireChosen(t, "second")
	annotate(`"` + c.ns + `/typo"`)
	c.requirePolicy(t, shop, "p", "EgressNotFound")
	c.requireChosen(t, "own")
	c.requireChosen(t, "second")
	annotate(`null`)
	c.requireChosen(t, "second", "p a 10.4.0.1")
}

func TestEgressClusterPolicies(t *testing.T) {
	c := newEgressCluster(t)
	c.start(t)
	team := fresh("team")
	one, two, other := fresh("one"), fresh("two"), fresh("other")
	c.namespace(t, one, map[string]string{"team": team})
	c.namespace(t, two, map[string]string{"team": team, "vip": "true"})
	c.namespace(t, other, nil)
	for i, ns := range []string{one, two, other} {
		c.worker(t, ns, fmt.Sprint("pod-", i), "front", fmt.Sprint("10.5.0.", i+1))
	}
	c.egress(t, "nat", `destinations: [0.0.0.0/0]`)
	c.egress(t, "own", `destinations: [0.0.0.0/0]`)
	name := fresh("policy")
	c.clusterPolicy(t, name, `{egress: {namespace: `+c.ns+`, name: nat}, namespaceSelector: {matchLabels: {team: `+team+`}}, pods: {}}`)
	all := []string{name + " pod-0 10.5.0.1", name + " pod-1 10.5.0.2"}
	c.requireChosen(t, "nat", all...)
	c.requirePolicy(t, "", name, "Accepted")

	c.change(t, "nat", `spec: {allowedNamespaces: {matchLabels: {vip: "true"}}}`)
	status := c.requirePolicy(t, "", name, "NamespaceNotAllowed")
	requireMessage(t, *meta.FindStatusCondition(status.Conditions, v2.PolicyAccepted), "doesn't allow Namespace "+one)
	c.requireChosen(t, "nat", all[1])
	c.change(t, "nat", `spec: {allowedNamespaces: null}`)
	c.requireChosen(t, "nat", all...)
	testkit.Must(c.core.CoreV1().Namespaces().Patch(t.Context(), other, types.MergePatchType, []byte(`{"metadata":{"labels":{"team":"`+team+`"}}}`), metav1.PatchOptions{}))(t)
	c.requireChosen(t, "nat", append(all, name+" pod-2 10.5.0.3")...)

	// The older policy decides, and the younger one says so. Of one second, an EgressClusterPolicy counts as the older one.
	c.policy(t, one, "younger", `{egress: {namespace: `+c.ns+`, name: own}, pods: {matchLabels: {app: front}}}`)
	testkit.Eventually(t, 20*time.Second, "the younger one says Conflicting", func() error {
		p, err := c.coil.CoilV2().EgressPolicies(one).Get(t.Context(), "younger", metav1.GetOptions{})
		if err != nil {
			return err
		}
		is := meta.FindStatusCondition(p.Status.Conditions, v2.PolicyConflicting)
		if is == nil || is.Reason != "OlderPolicy" || !strings.Contains(is.Message, "EgressClusterPolicy "+name) || !strings.Contains(is.Message, one+"/pod-0") {
			return fmt.Errorf("%+v", p.Status)
		}
		return nil
	})
	c.changePolicy(t, one, "younger", `spec: {destinations: [203.0.113.0/24]}`) // smaller ones decide
	testkit.Eventually(t, 20*time.Second, "nothing conflicts any more", func() error {
		p, err := c.coil.CoilV2().EgressPolicies(one).Get(t.Context(), "younger", metav1.GetOptions{})
		if err != nil {
			return err
		}
		return same(0, len(p.Status.Conditions)-1)
	})
}

// Editors of a namespace write its EgressPolicies, and viewers read them. Neither writes EgressClusterPolicies, nor a status.
func TestPeopleAndPolicies(t *testing.T) {
	c := newEgressCluster(t)
	testkit.Check(t, installRBAC(t.Context(), c.admin, "users.yaml"))
	bind := func(user, role string) *versioned.Clientset {
		t.Helper()
		testkit.Must(c.core.RbacV1().RoleBindings(c.ns).Create(t.Context(), &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{GenerateName: user + "-"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: user}},
		}, metav1.CreateOptions{}))(t)
		return testkit.Must(versioned.NewForConfig(testkit.Must(c.api.UserConfig(user))(t)))(t)
	}
	tenant, viewer := bind("tenant", "coil-egress-edit"), bind("viewer", "coil-egress-view")
	bind("tenant", "coil-egress-view") // as the role edit has all of view
	made := &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: v2.EgressPolicySpec{Services: []string{"front"}}}
	testkit.Eventually(t, 10*time.Second, "a tenant makes a policy", func() error { // the authorizer learns of bindings a moment later
		_, err := tenant.CoilV2().EgressPolicies(c.ns).Create(t.Context(), made, metav1.CreateOptions{})
		return err
	})
	testkit.Eventually(t, 10*time.Second, "a viewer sees it", func() error {
		_, err := viewer.CoilV2().EgressPolicies(c.ns).Get(t.Context(), "p", metav1.GetOptions{})
		return err
	})
	p := testkit.Must(tenant.CoilV2().EgressPolicies(c.ns).Get(t.Context(), "p", metav1.GetOptions{}))(t)
	p.Spec.Services = []string{"back"}
	p = testkit.Must(tenant.CoilV2().EgressPolicies(c.ns).Update(t.Context(), p, metav1.UpdateOptions{}))(t)
	all := &v2.EgressClusterPolicy{ObjectMeta: metav1.ObjectMeta{Name: "all"}, Spec: v2.EgressClusterPolicySpec{Pods: &metav1.LabelSelector{}}}
	for what, try := range map[string]func() error{
		"a tenant writes a status": func() error {
			_, err := tenant.CoilV2().EgressPolicies(c.ns).UpdateStatus(t.Context(), p, metav1.UpdateOptions{})
			return err
		},
		"a tenant makes a policy of the cluster": func() error {
			_, err := tenant.CoilV2().EgressClusterPolicies().Create(t.Context(), all, metav1.CreateOptions{})
			return err
		},
		"a tenant makes a policy elsewhere": func() error {
			_, err := tenant.CoilV2().EgressPolicies("default").Create(t.Context(), made, metav1.CreateOptions{})
			return err
		},
		"a viewer changes a policy": func() error {
			_, err := viewer.CoilV2().EgressPolicies(c.ns).Update(t.Context(), p, metav1.UpdateOptions{})
			return err
		},
		"a viewer deletes a policy": func() error {
			return viewer.CoilV2().EgressPolicies(c.ns).Delete(t.Context(), "p", metav1.DeleteOptions{})
		},
	} {
		if err := try(); !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	testkit.Check(t, tenant.CoilV2().EgressPolicies(c.ns).Delete(t.Context(), "p", metav1.DeleteOptions{}))
}
