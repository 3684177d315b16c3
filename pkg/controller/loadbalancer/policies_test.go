package loadbalancer

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
)

// pod makes a pod with a label app, or changes it.
func (sc *scene) pod(namespace, name, app string) {
	sc.s.Put(podResource, &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": app}}})
}

// policy makes a NetworkPolicy of the pods with app=web that lets clients in from networks alone; without any it lets all in.
func (sc *scene) policy(namespace, name string, from ...string) {
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(namespace + name)}}
	p.Spec.PodSelector.MatchLabels = map[string]string{"app": "web"}
	p.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{}}
	for _, cidr := range from {
		p.Spec.Ingress[0].From = append(p.Spec.Ingress[0].From, networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: cidr}})
	}
	sc.s.Put(policyResource, p)
}

// told counts the Events of a reason that came since it was called last.
func (sc *scene) told(reason string) (n int) {
	for {
		select {
		case e := <-sc.events.Events:
			if strings.Contains(e, " "+reason+" ") {
				n++
			}
		default:
			return n
		}
	}
}

// Scenario 25: behind gateways that translate sources a Service says that NetworkPolicies of its pods can't tell clients apart, as long as that is so. Labels of pods are read only where
// there are such NetworkPolicies.
func TestScenario25PoliciesAreNotHonored(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		says := func(when, policies, gateways string, events int) {
			t.Helper()
			sc.does("gw1")
			sc.does("gw2")
			sc.run(8 * time.Second)
			c := meta.FindStatusCondition(sc.find("a").Status.Conditions, loadbalancer.ConditionPolicies)
			switch want := fmt.Sprintf("NetworkPolicies (%s): gateways with spec.masquerade: Always (%s)", policies, gateways); {
			case policies == "" && c != nil:
				t.Errorf("%s: %+v", when, c)
			case policies != "" && (c == nil || c.Status != metav1.ConditionFalse || c.Reason != "GatewayMasquerades" || !strings.Contains(c.Message, want)):
				t.Errorf("%s: %+v, want %q", when, c, want)
			}
			if n := sc.told(loadbalancer.ReasonMasquerade); n != events {
				t.Errorf("%s: %d Events, want %d", when, n, events)
			}
		}
		read := func() int { return sc.s.Calls()["list pods"] }
		masquerade := func(name string, m v2.GatewayMasquerade) {
			sc.gateway(name, func(g *v2.LoadBalancerGateway) { g.Spec.Masquerade = m })
		}
		sc.announce = v2.AnnounceGateway
		for i := range 3 {
			sc.pod("shop", fmt.Sprint("web-", i), "web")
		}
		sc.pod("other", "web-0", "web")
		sc.service("a", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "web"} })
		says("without a policy", "", "", 0)
		sc.policy("other", "clients", "192.0.2.0/24")
		says("with a policy of another namespace", "", "", 0)
		sc.policy("shop", "all")
		says("with one that lets all in", "", "", 0)
		if n := read(); n > 0 {
			t.Errorf("pods were read %d times without a need", n)
		}
		sc.s.Drop(policyResource, "shop/all")
		sc.policy("shop", "clients", "192.0.2.0/24")
		says("with one that chooses clients", "clients", "gw1, gw2", 1)
		sc.policy("shop", "others", "198.51.100.0/24")
		says("with two", "clients, others", "gw1, gw2", 0)
		masquerade("gw1", v2.MasqueradeNever)
		says("when one gateway keeps sources", "clients, others", "gw2", 0)
		before := read()
		masquerade("gw2", v2.MasqueradeNever)
		says("when both do", "", "", 0)
		if n := read() - before; n > 0 {
			t.Errorf("pods were read %d times where gateways keep sources", n)
		}
		masquerade("gw2", v2.MasqueradeAlways)
		says("when one translates them again", "clients, others", "gw2", 1)
		sc.stop()
		sc.start()
		says("when another controller leads", "clients, others", "gw2", 0)
		sc.policy("shop", "all")
		says("when another policy lets all in", "", "", 0)
		sc.s.Drop(policyResource, "shop/all")
		says("when that is deleted", "clients, others", "gw2", 1)
		sc.s.Drop(policyResource, "shop/clients")
		sc.s.Drop(policyResource, "shop/others")
		says("when they are deleted", "", "", 0)
		// Nobody tells of labels of pods; those of new endpoints are read when these come.
		sc.policy("shop", "clients", "192.0.2.0/24")
		says("with a policy again", "clients", "gw2", 1)
		for i := range 3 {
			sc.s.Drop(podResource, fmt.Sprint("shop/web-", i))
		}
		sc.run(podsAgain)
		says("without pods", "", "", 0)
		sc.pod("shop", "web-0", "web")
		sc.run(podsAgain)
		says("with a pod again", "clients", "gw2", 1)
		sc.service("a", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "db"} })
		says("with other pods", "", "", 0)
		sc.service("a", func(s *corev1.Service) { s.Spec.Selector = nil })
		says("without a selector", "", "", 0)
		sc.service("a", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "web"} })
		says("with its pods again", "clients", "gw2", 1)
		sc.service("a", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeClusterIP })
		says("of another type", "", "", 0)
	})
}

// On nodes a Service has no such condition, and no pod is read.
func TestScenario25PoliciesOnNodes(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.pod("shop", "web-0", "web")
		sc.policy("shop", "clients", "192.0.2.0/24")
		sc.gateway("gw1", nil)
		sc.service("a", func(s *corev1.Service) {
			s.Spec.Selector, s.Spec.ExternalTrafficPolicy = map[string]string{"app": "web"}, corev1.ServiceExternalTrafficPolicyLocal
		})
		sc.run(podsAgain)
		if c := meta.FindStatusCondition(sc.find("a").Status.Conditions, loadbalancer.ConditionPolicies); c != nil || sc.s.Calls()["list pods"] > 0 {
			t.Errorf("%+v, %v", c, sc.s.Calls())
		}
	})
}

// The labels of pods are read in pages, up to the first pod that has the answer: of 100,000 pods never more than one page is in memory.
func TestPodsInPages(t *testing.T) {
	const pages = 5
	for enough, want := range map[int]int{1: 1, podsPage: 1, podsPage + 1: 2, pages * podsPage: pages, pages*podsPage + 1: pages} {
		read, seen := 0, 0
		api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			q := r.URL.Query()
			if q.Get("limit") != fmt.Sprint(podsPage) || q.Get("continue") != strings.Repeat("x", read) || q.Get("labelSelector") != "app=web" || r.URL.Path != "/api/v1/namespaces/shop/pods" ||
				!strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadataList") {
				t.Errorf("page %d is asked for by %s, %s", read, r.URL, r.Header)
			}
			page := metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"}}
			page.Items = make([]metav1.PartialObjectMetadata, podsPage)
			if read++; read < pages {
				page.Continue = strings.Repeat("x", read)
			}
			w.Header().Set("Content-Type", "application/json")
			testkit.Check(t, json.NewEncoder(w).Encode(page))
		}))
		client := testkit.Must(metadata.NewForConfig(&rest.Config{Host: api.URL}))(t)
		err := eachPod(t.Context(), client, "shop", labels.SelectorFromSet(labels.Set{"app": "web"}), func(*metav1.PartialObjectMetadata) bool {
			seen++
			return seen == enough
		})
		api.Close()
		if err != nil || read != want {
			t.Errorf("%d pages were read up to pod %d, want %d: %v", read, enough, want, err)
		}
	}
}

// A Service that gets another address doesn't repeat what it said of NetworkPolicies at the former one.
func TestPoliciesOfAFormerAddress(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		honored := func() *metav1.Condition {
			sc.does("gw1")
			sc.run(8 * time.Second)
			return meta.FindStatusCondition(sc.find("a").Status.Conditions, loadbalancer.ConditionPolicies)
		}
		class := new(loadbalancer.Class)
		sc.announce = v2.AnnounceGateway
		sc.gateway("gw1", nil)
		sc.pod("shop", "web", "web")
		sc.policy("shop", "clients", "192.0.2.0/24")
		sc.service("a", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "web"} })
		if c := honored(); c == nil {
			t.Error("with a policy of clients: nothing is said")
		}
		sc.service("a", func(s *corev1.Service) { s.Spec.Type, s.Spec.LoadBalancerClass = corev1.ServiceTypeClusterIP, nil })
		sc.run(20 * time.Second)
		sc.s.Drop(policyResource, "shop/clients")
		sc.run(20 * time.Second)
		sc.slow, sc.answers = true, 0
		sc.service("a", func(s *corev1.Service) { s.Spec.Type, s.Spec.LoadBalancerClass = corev1.ServiceTypeLoadBalancer, class })
		sc.run(8 * time.Second)
		sc.slow = false
		if c := honored(); c != nil {
			t.Errorf("without the policy, at another address: %+v", c)
		}
	})
}
