package egress

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/testkit"
)

// policyOf is a policy of namespace ns for pods with the label app=web; an Egress is one of namespace net, and "" is none.
func policyOf(name, egress string, change ...func(*v2.EgressPolicy)) *v2.EgressPolicy {
	p := &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: "uid", Generation: 1}}
	p.Spec.Pods = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	if egress != "" {
		p.Spec.Egress = &v2.EgressReference{Namespace: "net", Name: egress}
	}
	for _, c := range change {
		c(p)
	}
	return p
}

// policyOfAll is a policy for all pods of all namespaces.
func policyOfAll(name, egress string) *v2.EgressClusterPolicy {
	p := &v2.EgressClusterPolicy{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "uid", Generation: 1}}
	p.Spec.Pods = &metav1.LabelSelector{}
	p.Spec.Egress = &v2.EgressReference{Namespace: "net", Name: egress}
	return p
}

func to(destinations ...string) func(*v2.EgressPolicy) {
	return func(p *v2.EgressPolicy) { p.Spec.Destinations = destinations }
}

func openly(p *v2.EgressPolicy) { p.Spec.OnFailure = v2.EgressFailureNode }

// bySubnet selects pods by their addresses instead.
func bySubnet(subnet string) func(*v2.EgressPolicy) {
	return func(p *v2.EgressPolicy) { p.Spec.Pods, p.Spec.PodCIDRs = nil, []string{subnet} }
}

// byServices selects pods by Services, which the controller hasn't looked up.
func byServices(p *v2.EgressPolicy) { p.Spec.Pods, p.Spec.Services = nil, []string{"frontend"} }

// resolved is what the controller says of the Services.
func resolved(app string) func(*v2.EgressPolicy) {
	return func(p *v2.EgressPolicy) {
		p.Status.Resolved = &v2.ResolvedPolicy{
			ObservedGeneration: 1, Egress: p.Spec.Egress, Pods: []metav1.LabelSelector{{MatchLabels: map[string]string{"app": app}}},
		}
	}
}

// labelled gives a pod a label.
func (w *world) labelled(pod, app string) {
	namespace, name := named(pod)
	w.pods[namespace+"/"+name].Labels = map[string]string{"app": app}
}

func TestAddByPolicies(t *testing.T) {
	away := errors.New("the API server is away")
	for _, c := range []struct {
		name     string
		policies []metav1.Object
		unseen   []metav1.Object
		world    func(*world)
		pod      string
		says     string // the error, one that passes; empty is success
		has      string
		events   []string
	}{
		{name: "none", pod: "web", has: "untouched"},
		{name: "one", policies: []metav1.Object{policyOf("p", "a")}, pod: "web", has: "192.0.2.0/24 10.96.0.1"},
		{name: "of other pods", policies: []metav1.Object{policyOf("p", "a")}, pod: "db", has: "untouched"},
		{name: "by addresses", policies: []metav1.Object{policyOf("p", "a", bySubnet("10.0.0.0/24"))}, pod: "db", has: "192.0.2.0/24 10.96.0.1"},
		{name: "by other addresses", policies: []metav1.Object{policyOf("p", "a", bySubnet("10.0.1.0/24"))}, pod: "db", has: "untouched"},
		{name: "of all pods", policies: []metav1.Object{policyOfAll("p", "a")}, pod: "db", has: "192.0.2.0/24 10.96.0.1"},
		{name: "of all pods, and kube-system's", policies: []metav1.Object{policyOfAll("p", "a")}, pod: "kube-system/dns", has: "192.0.2.0/24 10.96.0.1"},
		{name: "of all pods, and a router", policies: []metav1.Object{policyOfAll("p", "a")}, pod: "net/router", has: "untouched"},
		{name: "of all pods, and one with a router's labels alone", policies: []metav1.Object{policyOfAll("p", "a")}, pod: "ns/router", has: "192.0.2.0/24 10.96.0.1"},
		{name: "some destinations", policies: []metav1.Object{policyOf("p", "a", to("192.0.2.16/28", "203.0.113.0/24"))}, pod: "web", has: "192.0.2.16/28 10.96.0.1"},
		{name: "two with one Egress", policies: []metav1.Object{policyOf("p", "a", to("192.0.2.16/28")), policyOf("q", "a", to("192.0.2.64/28"))}, pod: "web",
			has: "192.0.2.16/28 10.96.0.1, 192.0.2.64/28 10.96.0.1"},
		{name: "an annotation, too", policies: []metav1.Object{policyOf("p", "b", to("198.51.100.0/25"))}, pod: "annotated",
			has: "192.0.2.0/24 10.96.0.1, 198.51.100.0/25 10.96.0.2"},
		{name: "no Egress", policies: []metav1.Object{policyOf("p", "lost")}, pod: "web", says: "Egress net/lost of EgressPolicy ns/p doesn't exist", has: "untouched",
			events: []string{"web: EgressMissing: Egress net/lost of EgressPolicy ns/p doesn't exist"}},
		{name: "no Egress, by addresses", policies: []metav1.Object{policyOf("p", "lost", bySubnet("10.0.0.0/24"))}, pod: "web", has: "untouched",
			says: "Egress net/lost of EgressPolicy ns/p doesn't exist", events: []string{"web: EgressMissing: Egress net/lost of EgressPolicy ns/p doesn't exist"}},
		{name: "not allowed", policies: []metav1.Object{policyOf("p", "a")}, pod: "web", says: "Egress net/a of EgressPolicy ns/p isn't for pods of namespace ns", has: "untouched",
			world: func(w *world) {
				w.egresses["net/a"].Spec.AllowedNamespaces = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "red"}}
			},
			events: []string{"web: EgressNotAllowed: Egress net/a of EgressPolicy ns/p isn't for pods of namespace ns: spec.allowedNamespaces doesn't select its labels"}},
		{name: "Services that aren't resolved", policies: []metav1.Object{policyOf("p", "a", byServices)}, pod: "db", says: "EgressPolicy ns/p isn't resolved yet", has: "untouched"},
		{name: "Services", policies: []metav1.Object{policyOf("p", "a", byServices, resolved("web"))}, pod: "web", has: "192.0.2.0/24 10.96.0.1"},
		{name: "Services of other pods", policies: []metav1.Object{policyOf("p", "a", byServices, resolved("web"))}, pod: "db", has: "untouched"},
		{name: "a default that isn't resolved", policies: []metav1.Object{policyOf("p", "")}, pod: "web", says: "EgressPolicy ns/p isn't resolved yet", has: "untouched"},
		{name: "a default that isn't resolved, of other pods", policies: []metav1.Object{policyOf("p", "")}, pod: "db", has: "untouched"},
		{name: "no default", policies: []metav1.Object{policyOf("p", "", resolved("web"))}, pod: "web", says: "EgressPolicy ns/p names no Egress", has: "untouched",
			events: []string{"web: EgressMissing: EgressPolicy ns/p names no Egress, and neither the namespace nor the cluster has a default one that allows the namespace"}},
		{name: "nothing forwards", policies: []metav1.Object{policyOf("p", "nobody")}, pod: "web", has: "203.0.113.0/24 nowhere"},
		{name: "nothing forwards, open", policies: []metav1.Object{policyOf("p", "nobody", openly)}, pod: "web", has: ""},
		{name: "one that no cache has", unseen: []metav1.Object{policyOf("p", "a")}, pod: "web", has: "192.0.2.0/24 10.96.0.1"},
		{name: "one that no cache has, without its Egress", unseen: []metav1.Object{policyOf("p", "lost")}, pod: "web", has: "untouched",
			says: "Egress net/lost of EgressPolicy ns/p doesn't exist", events: []string{"web: EgressMissing: Egress net/lost of EgressPolicy ns/p doesn't exist"}},
		{name: "the API server is away", pod: "web", says: "away", has: "untouched", world: func(w *world) { w.policyErr = away }},
		{name: "the API server is away, with policies in the cache", policies: []metav1.Object{policyOf("p", "a")}, pod: "web", says: "away", has: "untouched",
			world: func(w *world) { w.policyErr = away }},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld()
			w.egress("a", "10.96.0.1", "192.0.2.0/24")
			w.egress("b", "10.96.0.2", "198.51.100.0/24")
			w.egress("nobody", "", "203.0.113.0/24")
			for _, pod := range []string{"web", "db", "kube-system/dns"} {
				w.pod(pod, "")
				w.labelled(pod, pod)
			}
			w.pod("annotated", "a")
			w.labelled("annotated", "web")
			for _, pod := range []string{"net/router", "ns/router"} {
				w.pod(pod, "")
				w.pods[pod].Labels = plan.RouterLabels("a")
			}
			w.policies, w.unseen = c.policies, c.unseen
			if c.world != nil {
				c.world(w)
			}
			m := w.manager(false)
			err := w.add(t, m, c.pod)
			if (err == nil) != (c.says == "") || err != nil && (!strings.Contains(err.Error(), c.says) || !errors.Is(err, node.ErrUnavailable)) {
				t.Errorf("error %v, want %q, of those that pass", err, c.says)
			}
			if has := w.has(c.pod); has != c.has {
				t.Errorf("it has %q, want %q", has, c.has)
			}
			if d := cmp.Diff(c.events, w.events); d != "" {
				t.Errorf("events (-want +got):\n%s", d)
			}
			if known := len(m.known) == 1; known != (err == nil) {
				t.Errorf("the sandbox is known: %t", known)
			}
		})
	}
}

// A router stays one though the cache lacks its Egress, and policies select its pod. One that has its labels alone is a pod like others.
func TestRouterOfAnEgressThatTheCacheLacks(t *testing.T) {
	w := newWorld()
	w.egress("a", "10.96.0.1", "192.0.2.0/24")
	w.egress("b", "10.96.0.2", "198.51.100.0/24")
	for _, pod := range []string{"net/router", "ns/router"} {
		w.pod(pod, "")
		w.pods[pod].Labels = plan.RouterLabels("a")
	}
	w.behind = map[string]bool{"net/a": true}
	m := w.manager(false)
	for pod, want := range map[string]string{"net/router": "untouched", "ns/router": "198.51.100.0/24 10.96.0.2"} {
		w.policies = nil
		if err := w.add(t, m, pod); err != nil {
			t.Fatal(err)
		}
		w.policies = []metav1.Object{policyOfAll("p", "b")}
		for range 3 {
			if err := m.sync(t.Context(), pod); err != nil {
				t.Fatal(err)
			}
		}
		if got := w.has(pod); got != want {
			t.Errorf("%s has %q, want %q", pod, got, want)
		}
	}
}

// A pod of the node's network has no sandbox. It is told of an annotation, and not of policies: these select many pods.
func TestPoliciesOfTheNodesNetwork(t *testing.T) {
	w := newWorld()
	w.egress("a", "10.96.0.1", "192.0.2.0/24")
	w.pod("p", "")
	w.host = map[string]bool{"ns/p": true}
	w.policies = []metav1.Object{policyOfAll("p", "a")}
	m := w.manager(false)
	m.PoliciesChanged("ns")
	testkit.Check(t, m.tellIgnored(t.Context(), types.NamespacedName{Namespace: "ns", Name: "p"}))
	if len(w.events) > 0 || w.live > 0 {
		t.Errorf("events %q, and the API server was asked %d times", w.events, w.live)
	}
}

// slowPolicies is a cluster whose API server doesn't say which policies there are.
type slowPolicies struct{ *world }

func (s slowPolicies) Policies(ctx context.Context, pod *metav1.PartialObjectMetadata, live bool) ([]policy.Policy, map[string]string, error) {
	if !live {
		return s.world.Policies(ctx, pod, live)
	}
	<-ctx.Done()
	return nil, nil, ctx.Err()
}

// A pod isn't started before it is known which policies there are; ADD fails after two seconds, and takes nothing before it asks.
func TestAddWaitsForPolicies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.pod("p", "")
		m := w.manager(false)
		m.cluster = slowPolicies{w}
		defer running(t, m)()
		begin := time.Now()
		err := w.add(t, m, "p")
		if !errors.Is(err, node.ErrUnavailable) || time.Since(begin) != policiesWait {
			t.Errorf("after %s: %v", time.Since(begin), err)
		}
		if len(m.known) != 0 || w.has("p") != "untouched" {
			t.Error("something is left")
		}
	})
}

func TestLivePolicies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.egress("a", "10.96.0.1", "192.0.2.0/24")
		w.egress("b", "10.96.0.2", "0.0.0.0/0")
		for _, p := range []string{"web", "db"} {
			w.pod(p, "")
			w.labelled(p, p)
		}
		m := w.manager(false)
		for _, p := range []string{"web", "db"} {
			if err := w.add(t, m, p); err != nil {
				t.Fatal(err)
			}
		}
		stop := running(t, m)
		defer func() { stop() }()
		check := func(what, pod, want string) {
			t.Helper()
			time.Sleep(time.Second)
			synctest.Wait()
			if got := w.has(pod); got != want {
				t.Errorf("%s: %s has %q, want %q", what, pod, got, want)
			}
		}
		policies := func(all ...metav1.Object) {
			w.mu.Lock()
			w.policies = all
			w.mu.Unlock()
			m.PoliciesChanged("ns")
		}
		check("at first", "web", "untouched")
		policies(policyOf("p", "a"))
		check("a policy", "web", "192.0.2.0/24 10.96.0.1")
		check("of others", "db", "untouched")
		w.change(m, func() { w.labelled("db", "web") })
		check("the label", "db", "192.0.2.0/24 10.96.0.1")
		w.change(m, func() { w.labelled("db", "db") })
		check("not the label any more", "db", "")
		policies(policyOf("p", "a"), policyOf("q", "b", to("203.0.113.0/24")))
		check("another policy", "web", "192.0.2.0/24 10.96.0.1, 203.0.113.0/24 10.96.0.2")
		policies(policyOf("p", "a"), policyOf("q", "b", to("203.0.113.128/25")))
		check("other destinations", "web", "192.0.2.0/24 10.96.0.1, 203.0.113.128/25 10.96.0.2")
		if err := m.Check(t.Context(), sandboxOf("web").ID); err != nil {
			t.Errorf("CHECK: %v", err)
		}

		// What isn't resolved changes nothing of a pod that runs.
		policies(policyOf("p", "a"), policyOf("q", "b", to("198.51.100.0/24"), byServices))
		check("not resolved, and selected before", "web", "192.0.2.0/24 10.96.0.1, 203.0.113.128/25 10.96.0.2")
		check("not resolved, and not selected before", "db", "")
		policies(policyOf("p", "a"), policyOf("q", "b", to("198.51.100.0/24"), byServices, resolved("db")))
		check("resolved, for others", "web", "192.0.2.0/24 10.96.0.1")
		check("resolved, for this one", "db", "198.51.100.0/24 10.96.0.2")

		// Destinations are closed as long as it isn't known who gets them.
		policies(policyOf("p", "lost"))
		check("an Egress that isn't there", "web", "192.0.2.0/24 nowhere")
		w.change(m, func() { w.egress("lost", "10.96.0.3", "192.0.2.0/24") })
		check("that is made", "web", "192.0.2.0/24 10.96.0.3")
		w.change(m, func() { delete(w.egresses, "net/lost") })
		check("that is deleted", "web", "192.0.2.0/24 nowhere")

		// The destinations are remembered by the record, too.
		stop()
		m = w.manager(false)
		w.netns = map[string]client.Client{}
		if err := m.Restore(t.Context(), []node.Sandbox{sandboxOf("web"), sandboxOf("db")}); err != nil {
			t.Fatal(err)
		}
		stop = running(t, m)
		check("deleted, after a restart", "web", "192.0.2.0/24 nowhere")
		policies(policyOf("p", "", resolved("web")))
		check("no Egress any more", "web", "192.0.2.0/24 nowhere")
		policies(policyOf("p", "", resolved("web")), policyOf("q", "b", to("203.0.113.0/24")))
		check("another policy", "web", "192.0.2.0/24 nowhere, 203.0.113.0/24 10.96.0.2")
		policies(policyOf("p", "", resolved("web")))
		check("that is gone, while nothing is known of the first", "web", "192.0.2.0/24 nowhere")
		policies()
		check("no policy any more", "web", "")
		if len(w.records) != 0 {
			t.Errorf("records %v", w.records)
		}
		policies(policyOf("p", "a"))
		w.change(m, func() {
			w.egresses["net/a"].Spec.AllowedNamespaces = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "red"}}
		})
		check("not allowed", "web", "192.0.2.0/24 nowhere")
		policies(policyOf("p", "a", openly))
		check("not allowed, and open", "web", "192.0.2.0/24 nowhere")
	})
}

// With onFailure Node, packets leave as those of other pods do as long as nothing can forward them, and not otherwise.
func TestOpenPolicies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.egress("all", "10.96.0.9", "0.0.0.0/0")
		w.egress("a", "10.96.0.1", "192.0.2.0/24")
		w.pod("p", "all")
		w.labelled("p", "web")
		w.policies = []metav1.Object{policyOf("p", "a", openly)}
		m := w.manager(false)
		if err := w.add(t, m, "p"); err != nil {
			t.Fatal(err)
		}
		defer running(t, m)()
		check := func(what, want string) {
			t.Helper()
			time.Sleep(time.Second)
			synctest.Wait()
			if got := w.has("p"); got != want {
				t.Errorf("%s: it has %q, want %q", what, got, want)
			}
			// No other Egress gets what leaves as that of other pods.
			throws := slices.ContainsFunc(client.StateOf(w.netns["/p"]).Routes, func(r client.Route) bool {
				return r.Dst.String() == "192.0.2.0/24" && r.Type == dataplane.Throw
			})
			if open := !strings.Contains(want, "192.0.2.0/24"); throws != open {
				t.Errorf("%s: its packets leave as others do: %t", what, throws)
			}
		}
		const others = "0.0.0.0/0 10.96.0.9"
		check("a Service", others+", 192.0.2.0/24 10.96.0.1")
		w.change(m, func() { w.egress("a", "", "192.0.2.0/24") })
		check("no Service", others)
		w.change(m, func() { w.egress("a", "10.96.0.1", "192.0.2.0/24") })
		check("a Service again", others+", 192.0.2.0/24 10.96.0.1")
		w.change(m, func() { delete(w.egresses, "net/a") })
		check("deleted", others)
		w.change(m, func() {
			w.egress("a", "10.96.0.1", "192.0.2.0/24").Spec.Peering = v2.EgressPeeringDirect
			w.routers["net/a"] = nil
		})
		check("no router", others)
		w.change(m, func() { w.policies = []metav1.Object{policyOf("p", "a")} })
		check("closed", others+", 192.0.2.0/24 nowhere")
	})
}

func TestTooManyPolicies(t *testing.T) {
	w := newWorld()
	w.egress("a", "10.96.0.1", "0.0.0.0/0")
	w.pod("p", "a")
	w.labelled("p", "web")
	for i := range plan.MostEgresses {
		w.policies = append(w.policies, policyOf(fmt.Sprintf("p%02d", i), "a", to(fmt.Sprintf("203.0.%d.0/24", i))))
	}
	m := w.manager(false)
	const says = "more than 64 Egresses: only the first ones are used, those of annotations before those of policies, and of these the oldest; net/a of EgressPolicy ns/p63 is too much"
	if err := w.add(t, m, "p"); err == nil || !strings.Contains(err.Error(), says) || !errors.Is(err, node.ErrUnavailable) {
		t.Errorf("%v", err)
	}
	w.policies = w.policies[1:]
	if err := w.add(t, m, "p"); err != nil {
		t.Errorf("one less: %v", err)
	}
}

// A client of an Egress by several policies counts once, and each policy is recorded.
func TestRecordOfPolicies(t *testing.T) {
	w := newWorld()
	w.egress("a", "10.96.0.1", "192.0.2.0/24")
	w.pod("p", "")
	w.labelled("p", "web")
	w.policies = []metav1.Object{policyOf("p", "a", to("192.0.2.0/28")), policyOf("q", "a", to("192.0.2.16/28"), openly)}
	m := w.manager(false)
	if err := w.add(t, m, "p"); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, k := range w.records[sandboxOf("p").ID].Egresses {
		got = append(got, fmt.Sprint(k.Name, " ", k.Policy, " ", k.Destinations, " ", k.Open))
	}
	want := []string{"net/a EgressPolicy ns/p [192.0.2.0/28] false", "net/a EgressPolicy ns/q [192.0.2.16/28] true"}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("records (-want +got):\n%s", d)
	}
	if err := testutil.GatherAndCompare(m.metrics(), strings.NewReader(`
# HELP coil_egress_node_client_pods Pods of the node that use an Egress, or would if it existed, by Egress.
# TYPE coil_egress_node_client_pods gauge
coil_egress_node_client_pods{egress="a",namespace="net"} 1
`), "coil_egress_node_client_pods"); err != nil {
		t.Error(err)
	}
}

// A pod of which it isn't known whether a policy selects it stays as it is: its namespace isn't in the cache.
func TestNamespaceOfNoCache(t *testing.T) {
	w := newWorld()
	w.egress("a", "10.96.0.1", "192.0.2.0/24")
	w.pod("p", "")
	w.policies = []metav1.Object{policyOfAll("p", "a")}
	m := w.manager(false)
	if err := w.add(t, m, "p"); err != nil {
		t.Fatal(err)
	}
	m.cluster = noNamespaces{w}
	if err := m.sync(t.Context(), "p"); err != nil {
		t.Error(err)
	}
	if got := w.has("p"); got != "192.0.2.0/24 10.96.0.1" {
		t.Errorf("it has %q", got)
	}
}

// noNamespaces is a cluster whose cache lacks namespaces.
type noNamespaces struct{ *world }

func (n noNamespaces) Policies(context.Context, *metav1.PartialObjectMetadata, bool) ([]policy.Policy, map[string]string, error) {
	_, err := get(n.world, false, n.namespaces, "none")
	return nil, nil, err
}
