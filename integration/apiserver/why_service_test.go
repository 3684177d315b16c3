package apiserver

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/generated/clientset/versioned"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/plan/preflight"
	"github.com/coil-net/coil/pkg/testkit"
)

// examiner is coilctl's. No coild runs: it says that all is in the kernel.
func (s *served) examiner(ahead time.Duration) coilctl.Examiner {
	return coilctl.Examiner{
		Core: s.core, Coil: s.coil, Now: func() time.Time { return time.Now().Add(ahead) },
		Ask: func(_ context.Context, coild *corev1.Pod, words ...string) (*inspection.Answer, error) {
			if coild.Spec.NodeName == "" || len(words) != 2 || words[0] != "address" {
				return nil, fmt.Errorf("coild of %q was asked for %q", coild.Spec.NodeName, words)
			}
			return &inspection.Answer{Address: []inspection.Comparison{{Topic: inspection.Floating, Object: "way to " + words[1], OK: true}}}, nil
		},
	}
}

// coildsOf makes pods of coild on nodes.
func (s *served) coildsOf(nodes ...string) {
	for _, n := range nodes {
		p := s.runningPod(s.t, metav1.NamespaceSystem, "coild-"+n, "", n, "10.0.0.1")
		p.Labels = map[string]string{"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "coild"}
		testkit.Must(s.core.CoreV1().Pods(p.Namespace).Update(s.t.Context(), p, metav1.UpdateOptions{}))(s.t)
	}
}

// slice makes the EndpointSlice of a Service, with an endpoint on a node.
func (s *served) slice(service, node string) {
	_, err := s.core.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Create(s.t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: service + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: new(""), Protocol: new(corev1.ProtocolTCP), Port: new(int32(8080))}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.64.0.1"}, NodeName: &node}},
	}, metav1.CreateOptions{})
	testkit.Check(s.t, err)
}

// walks waits until a walk about a Service has these wrong steps, of which the first one says some words.
func (s *served) walks(name, wrong string, ahead time.Duration, says ...string) (d diagnosis.Diagnosis) {
	s.t.Helper()
	testkit.Eventually(s.t, 20*time.Second, fmt.Sprintf("of %s %q is wrong", name, wrong), func() (err error) {
		if err := s.hold("services"); err != nil {
			return err
		}
		if d, err = s.examiner(ahead).Service(s.t.Context(), metav1.NamespaceDefault, name); err != nil {
			return err
		}
		i := slices.IndexFunc(d.Steps, func(s diagnosis.Step) bool {
			return wrong == "" && s.State == diagnosis.Unknown || s.State == diagnosis.Wrong
		})
		if got := strings.Join(d.Wrong(), " "); got != wrong || wrong == "" && i >= 0 {
			return fmt.Errorf("wrong are %q: %+v", got, d.Steps)
		}
		for _, text := range says {
			if i < 0 || !strings.Contains(d.Steps[i].Seen+" // "+d.Steps[i].Do, text) {
				return fmt.Errorf("%q isn't said: %+v", text, d.Steps)
			}
		}
		return nil
	})
	return d
}

// coilctl why service names the fault of each Service that coil-lb-controller can't serve, and none of those that it serves.
func TestWhyService(t *testing.T) {
	s := servicesCluster(t)
	stop := s.start()
	s.coildsOf("n1", "n2")
	const long = 2 * time.Minute

	s.make("web", 80, func(o *corev1.Service) { o.Spec.Selector = map[string]string{"app": "web"} })
	s.tells("web", "192.0.2.0", "AddressAssigned")
	s.walks("web", "endpoints", 0, "no endpoint that serves", "kubernetes.io/service-name=web")
	s.slice("web", "n1")
	t.Cleanup(func() {
		testkit.Check(t, s.core.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).DeleteCollection(context.WithoutCancel(t.Context()), metav1.DeleteOptions{},
			metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=web"}))
	})
	healthy := s.walks("web", "", 0)
	if i := slices.IndexFunc(healthy.Steps, func(s diagnosis.Step) bool { return s.Step == diagnosis.StepHolder }); i < 0 || !strings.Contains(healthy.Steps[i].Seen, "node n1 answers for the address") {
		t.Errorf("%+v", healthy.Steps)
	}
	d := s.examiner(0).Address(t.Context(), netip.MustParseAddr("192.0.2.0"))
	if last := d.Steps[len(d.Steps)-1]; last.Step != diagnosis.StepService || last.State != diagnosis.Right || !strings.Contains(last.Seen, "default/web") {
		t.Errorf("its address: %+v", d.Steps)
	}

	s.make("late", 80, wants("192.0.2.0"))
	s.tells("late", "", "AddressInUse")
	s.walks("late", "claim endpoints", 0, "default/web has 192.0.2.0")
	s.make("lost", 80, func(o *corev1.Service) { o.Annotations[v2.AnnotationPool] = "none" })
	s.tells("lost", "", "PoolNotFound")
	s.walks("lost", "pool endpoints", 0, "there is no AddressPool none", "annotate service lost")
	// Nobody has changed the Service for two minutes, and no Service proxy serves it.
	s.make("foreign", 80, func(o *corev1.Service) { o.Spec.LoadBalancerClass = nil })
	s.walks("foreign", "service", long, "--serve-without-class")

	// Gateways have the addresses of another pool.
	s.gatewayPool()
	s.make("edge", 81, func(o *corev1.Service) { o.Annotations[v2.AnnotationPool] = "edge" })
	s.tells("edge", "", "AddressAssigned")
	s.walks("edge", "gateways endpoints", 0, "no LoadBalancerGateway names AddressPool edge")
	gateways := s.coil.CoilV2().LoadBalancerGateways()
	g := testkit.Must(gateways.Create(t.Context(), &v2.LoadBalancerGateway{
		ObjectMeta: metav1.ObjectMeta{Name: "gw1"}, Spec: v2.LoadBalancerGatewaySpec{Pools: []string{"edge"}},
	}, metav1.CreateOptions{}))(t)
	t.Cleanup(func() {
		testkit.Check(t, gateways.Delete(context.WithoutCancel(t.Context()), "gw1", metav1.DeleteOptions{}))
	})
	g.Status.LastContact = new(metav1.NewTime(time.Now().Add(-long)))
	g = testkit.Must(gateways.UpdateStatus(t.Context(), g, metav1.UpdateOptions{}))(t)
	s.walks("edge", "gateways endpoints", 0, "nothing was heard", "gw1")
	g.Status.LastContact, g.Status.Errors = new(metav1.Now()), []v2.GatewayError{{Service: "default/edge", Message: "port 81 has no NodePort"}}
	testkit.Must(gateways.UpdateStatus(t.Context(), g, metav1.UpdateOptions{}))(t)
	s.walks("edge", "gateways endpoints", 0, "gateway gw1: port 81 has no NodePort")

	// In two minutes nobody has renewed a Lease, as far as is known now. The address stays.
	stop()
	s.walks("web", "leader", long, "no coil-lb-controller, coil-ipam-controller leads")
	s.start()
	s.deletes("web", "late", "lost", "foreign", "edge")
	s.empty()
}

// gatewayPool makes the AddressPool edge. Gateways have its addresses.
func (s *served) gatewayPool() {
	p := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: "edge"}}
	p.Spec = v2.AddressPoolSpec{Purpose: v2.PurposeFloating, Announce: v2.AnnounceGateway, Subnets: []v2.SubnetSet{v4("198.51.100.0/29")}}
	testkit.Must(s.coil.CoilV2().AddressPools().Create(s.t.Context(), p, metav1.CreateOptions{}))(s.t)
}

// A step that needs a missing right is unknown, not wrong. With the rights that the help names every step is known, but those that coild answers.
func TestWhyServiceRights(t *testing.T) {
	s := servicesCluster(t)
	s.start()
	s.coildsOf("n1", "n2")
	s.make("web", 80)
	s.slice("web", "n1")
	t.Cleanup(func() {
		testkit.Check(t, s.core.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Delete(context.WithoutCancel(t.Context()), "web-1", metav1.DeleteOptions{}))
	})
	s.tells("web", "192.0.2.0", "AddressAssigned")
	user := fresh("operator")
	cfg := testkit.Must(s.api.UserConfig(user))(t)
	kubeconfig := writeKubeconfig(t, cfg)
	var help, errOut bytes.Buffer
	coilctl.Main([]string{"coilctl", "--kubeconfig=" + kubeconfig, "why", "service", "--help"}, strings.NewReader(""), &help, &errOut)

	// Each kind with the steps that aren't known without it.
	rules := map[string]struct {
		rule    rbacv1.PolicyRule
		unknown string
	}{
		"leases":               {rbacv1.PolicyRule{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"get"}}, "leader"},
		"addresspools":         {rbacv1.PolicyRule{APIGroups: []string{"coil.cybozu.com"}, Resources: []string{"addresspools"}, Verbs: []string{"list"}}, "pool"},
		"addressclaims":        {rbacv1.PolicyRule{APIGroups: []string{"coil.cybozu.com"}, Resources: []string{"addressclaims"}, Verbs: []string{"list"}}, "pool claim status"},
		"addressblocks":        {rbacv1.PolicyRule{APIGroups: []string{"coil.cybozu.com"}, Resources: []string{"addressblocks"}, Verbs: []string{"list"}}, "claim"},
		"loadbalancergateways": {rbacv1.PolicyRule{APIGroups: []string{"coil.cybozu.com"}, Resources: []string{"loadbalancergateways"}, Verbs: []string{"list"}}, ""},
		"endpointslices":       {rbacv1.PolicyRule{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: []string{"list"}}, "endpoints"},
		"nodes":                {rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list"}}, "holder node"},
		"pods":                 {rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"list"}}, "node"},
	}
	roles := s.core.RbacV1().ClusterRoles()
	role := testkit.Must(roles.Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: user}}, metav1.CreateOptions{}))(t)
	testkit.Must(s.core.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: user}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: user},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	}, metav1.CreateOptions{}))(t)
	e := coilctl.Examiner{Core: testkit.Must(kubernetes.NewForConfig(cfg))(t), Coil: testkit.Must(versioned.NewForConfig(cfg))(t), Ask: func(context.Context, *corev1.Pod, ...string) (*inspection.Answer, error) {
		return nil, fmt.Errorf("pods %q is forbidden", "exec")
	}}
	for _, without := range append(slices.Sorted(maps.Keys(rules)), "") {
		if without != "" && !strings.Contains(help.String(), without) {
			t.Errorf("the help doesn't name %s:\n%s", without, help.String())
		}
		role.Rules = []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"services"}, Verbs: []string{"get"}}}
		for kind, r := range rules {
			if kind != without {
				role.Rules = append(role.Rules, r.rule)
			}
		}
		role = testkit.Must(roles.Update(t.Context(), role, metav1.UpdateOptions{}))(t)
		want := rules[without].unknown
		testkit.Eventually(t, 20*time.Second, "the walk without "+without, func() error {
			testkit.Check(t, s.hold("services"))
			d, err := e.Service(t.Context(), metav1.NamespaceDefault, "web")
			if err != nil {
				return err
			}
			var unknown []string
			for _, s := range d.Steps {
				if s.State == diagnosis.Unknown && s.Step != diagnosis.StepRoutes { // of which coild isn't asked in any case
					unknown = append(unknown, s.Step)
				}
			}
			if got := strings.Join(unknown, " "); got != want || len(d.Wrong()) > 0 {
				return fmt.Errorf("unknown are %q, want %q; wrong are %q: %+v", got, want, d.Wrong(), d.Steps)
			}
			return nil
		})
	}
	if !strings.Contains(help.String(), "get leases of coordination.k8s.io in the namespace "+preflight.Namespace) {
		t.Errorf("the help doesn't say which Leases:\n%s", help.String())
	}
	s.deletes("web")
	s.empty()
}
