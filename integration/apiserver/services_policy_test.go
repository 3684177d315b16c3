package apiserver

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
)

// Scenario 25: with the rights of its account coil-lb-controller finds out that a NetworkPolicy of pods of a Service isn't honoured behind a gateway that translates sources. The Service says
// so until the NetworkPolicy is deleted.
func TestScenario25PoliciesBehindGateways(t *testing.T) {
	s, ctx, ns := servicesCluster(t), t.Context(), metav1.NamespaceDefault
	testkit.Must(s.coil.CoilV2().AddressPools().Patch(ctx, "services", types.MergePatchType, []byte(`{"spec":{"announce":"Gateway","purpose":"Floating"}}`), metav1.PatchOptions{}))(t)
	gateway := &v2.LoadBalancerGateway{ObjectMeta: metav1.ObjectMeta{Name: "gw1"}, Spec: v2.LoadBalancerGatewaySpec{Pools: []string{"services"}}}
	testkit.Must(s.coil.CoilV2().LoadBalancerGateways().Create(ctx, gateway, metav1.CreateOptions{}))(t)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web", Labels: map[string]string{"app": "web"}}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "web", Image: "web"}}}}
	testkit.Must(s.core.CoreV1().Pods(ns).Create(ctx, pod, metav1.CreateOptions{}))(t)
	policy := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "clients"}}
	policy.Spec.PodSelector.MatchLabels = pod.Labels
	policy.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "192.0.2.0/24"}}}}}
	testkit.Must(s.core.NetworkingV1().NetworkPolicies(ns).Create(ctx, policy, metav1.CreateOptions{}))(t)
	s.start()
	s.make("web", 80, func(o *corev1.Service) { o.Spec.Selector = pod.Labels })
	says := func(when, want string) {
		t.Helper()
		testkit.Eventually(t, 20*time.Second, when, func() error {
			o, err := s.core.CoreV1().Services(ns).Get(ctx, "web", metav1.GetOptions{})
			if err != nil {
				return err
			}
			c := meta.FindStatusCondition(o.Status.Conditions, loadbalancer.ConditionPolicies)
			if (c == nil) != (want == "") || c != nil && (c.Reason != "GatewayMasquerades" || !strings.Contains(c.Message, want)) {
				return fmt.Errorf("it says %+v", o.Status.Conditions)
			}
			return nil
		})
	}
	says("with a NetworkPolicy of clients", "NetworkPolicies (clients): gateways with spec.masquerade: Always (gw1)")
	testkit.Eventually(t, 10*time.Second, "an Event says so", func() error {
		all, err := s.core.EventsV1().Events(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range all.Items {
			if e.Reason == "GatewayMasquerades" && e.Regarding.Name == "web" && e.Type == corev1.EventTypeWarning {
				return nil
			}
		}
		return fmt.Errorf("there are %d others", len(all.Items))
	})
	testkit.Check(t, s.core.NetworkingV1().NetworkPolicies(ns).Delete(ctx, policy.Name, metav1.DeleteOptions{}))
	says("when the NetworkPolicy is deleted", "")
	testkit.Check(t, s.core.CoreV1().Services(ns).Delete(ctx, "web", metav1.DeleteOptions{}))
	testkit.Eventually(t, 20*time.Second, "its address is given back", func() error {
		claims, err := s.coil.CoilV2().AddressClaims("kube-system").List(ctx, metav1.ListOptions{})
		if err == nil && len(claims.Items) > 0 {
			err = fmt.Errorf("there are %d claims", len(claims.Items))
		}
		return err
	})
	testkit.Check(t, s.core.CoreV1().Pods(ns).Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}), s.coil.CoilV2().LoadBalancerGateways().Delete(ctx, "gw1", metav1.DeleteOptions{}))
}
