package policy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

func requirement(key string, op metav1.LabelSelectorOperator, values ...string) metav1.LabelSelector {
	return metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: key, Operator: op, Values: values}}}
}

// testPolicy is an EgressPolicy of the namespace shop.
func testPolicy(change func(*v2.EgressPolicy)) *v2.EgressPolicy {
	p := &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "p", UID: "u", Generation: 3, CreationTimestamp: metav1.NewTime(time.Unix(1000, 0))}}
	p.Spec.Egress = &v2.EgressReference{Namespace: "internet", Name: "nat"}
	if change != nil {
		change(p)
	}
	return p
}

func TestSelects(t *testing.T) {
	app := &metav1.LabelSelector{MatchLabels: map[string]string{"app": "a"}}
	resolved := func(generation int64, pods ...metav1.LabelSelector) v2.EgressPolicyStatus {
		return v2.EgressPolicyStatus{Resolved: &v2.ResolvedPolicy{ObservedGeneration: generation, Pods: pods}}
	}
	pod := func(app string, addrs ...string) Pod {
		p := Pod{Namespace: "shop", Labels: map[string]string{"app": app}}
		for _, a := range addrs {
			p.Addresses = append(p.Addresses, netip.MustParseAddr(a))
		}
		return p
	}
	elsewhere := pod("a")
	elsewhere.Namespace = "other"
	for _, tt := range []struct {
		name       string
		change     func(*v2.EgressPolicy)
		yes, no    []Pod
		unresolved bool
		fails      bool
	}{
		{name: "labels", change: func(p *v2.EgressPolicy) { p.Spec.Pods = app }, yes: []Pod{pod("a"), pod("a", "10.0.0.1")}, no: []Pod{pod("b"), {Namespace: "shop"}, elsewhere}},
		{name: "a label that none has", change: func(p *v2.EgressPolicy) {
			p.Spec.Pods = new(requirement("no-egress", metav1.LabelSelectorOpDoesNotExist))
		},
			yes: []Pod{pod("a"), {Namespace: "shop"}}, no: []Pod{{Namespace: "shop", Labels: map[string]string{"no-egress": ""}}, elsewhere}},
		{name: "ranges", change: func(p *v2.EgressPolicy) { p.Spec.PodCIDRs = []string{"10.1.0.0/16", "fd00::/64"} },
			yes: []Pod{pod("a", "10.1.2.3"), pod("b", "192.0.2.1", "fd00::1")}, no: []Pod{pod("a", "10.2.0.1"), pod("a")}},
		{name: "a range that is none", change: func(p *v2.EgressPolicy) { p.Spec.PodCIDRs = []string{"nonsense"} }, no: []Pod{pod("a", "10.1.2.3")}},
		{name: "an operator that is none", change: func(p *v2.EgressPolicy) { p.Spec.Pods = new(requirement("app", "Like", "a")) }, no: []Pod{pod("a")}, fails: true},
		{name: "Services", change: func(p *v2.EgressPolicy) {
			p.Spec.Services, p.Status = []string{"s", "t"}, resolved(3, *app, requirement("tier", metav1.LabelSelectorOpExists))
		}, yes: []Pod{pod("a"), {Namespace: "shop", Labels: map[string]string{"tier": "x"}}}, no: []Pod{pod("b"), elsewhere}},
		{name: "Services without pods", change: func(p *v2.EgressPolicy) { p.Spec.Services, p.Status = []string{"s"}, resolved(3) }, no: []Pod{pod("a")}},
		// Until it is known what they mean, any pod of the namespace may be meant.
		{name: "Services of another spec", change: func(p *v2.EgressPolicy) { p.Spec.Services, p.Status = []string{"s"}, resolved(2, *app) },
			yes: []Pod{pod("a"), pod("b")}, no: []Pod{elsewhere}, unresolved: true},
		{name: "Services that nobody has seen", change: func(p *v2.EgressPolicy) { p.Spec.Services = []string{"s"} }, yes: []Pod{pod("b")}, no: []Pod{elsewhere}, unresolved: true},
		{name: "labels don't need the status", change: func(p *v2.EgressPolicy) {
			p.Spec.Pods, p.Status = app, resolved(2, requirement("app", metav1.LabelSelectorOpExists))
		}, yes: []Pod{pod("a")}, no: []Pod{pod("b")}},
		{name: "a default that isn't known", change: func(p *v2.EgressPolicy) { p.Spec.Pods, p.Spec.Egress = app, nil }, yes: []Pod{pod("a")}, no: []Pod{pod("b")}, unresolved: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, err := Of(testPolicy(tt.change))
			if (err != nil) != tt.fails || p.Unresolved != tt.unresolved {
				t.Errorf("unresolved %t, error %v", p.Unresolved, err)
			}
			for i, pod := range slices.Concat(tt.yes, tt.no) {
				if got := p.Selects(pod); got != (i < len(tt.yes)) {
					t.Errorf("%+v: %t", pod, got)
				}
			}
		})
	}
}

func TestClusterPolicySelects(t *testing.T) {
	team := map[string]string{"team": "a"}
	pod := func(ns map[string]string, app, addr string) Pod {
		return Pod{Namespace: "n", NamespaceLabels: ns, Labels: map[string]string{"app": app}, Addresses: []netip.Addr{netip.MustParseAddr(addr)}}
	}
	for _, tt := range []struct {
		name    string
		spec    v2.EgressClusterPolicySpec
		yes, no []Pod
		fails   bool
	}{
		{name: "all", spec: v2.EgressClusterPolicySpec{Pods: &metav1.LabelSelector{}}, yes: []Pod{pod(nil, "a", "10.0.0.1"), {}}},
		{name: "namespaces", spec: v2.EgressClusterPolicySpec{NamespaceSelector: metav1.LabelSelector{MatchLabels: team}, Pods: &metav1.LabelSelector{}},
			yes: []Pod{pod(team, "a", "10.0.0.1")}, no: []Pod{pod(nil, "a", "10.0.0.1")}},
		{name: "labels", spec: v2.EgressClusterPolicySpec{Pods: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "a"}}},
			yes: []Pod{pod(nil, "a", "10.0.0.1")}, no: []Pod{pod(nil, "b", "10.0.0.1")}},
		{name: "ranges", spec: v2.EgressClusterPolicySpec{NamespaceSelector: metav1.LabelSelector{MatchLabels: team}, PodCIDRs: []string{"10.0.0.0/30"}},
			yes: []Pod{pod(team, "a", "10.0.0.1")}, no: []Pod{pod(team, "a", "10.0.0.4"), pod(nil, "a", "10.0.0.1")}},
		{name: "namespaces that can't be understood", spec: v2.EgressClusterPolicySpec{NamespaceSelector: requirement("a", "Like"), Pods: &metav1.LabelSelector{}},
			no: []Pod{{}, pod(team, "a", "10.0.0.1")}, fails: true},
		{name: "labels that can't be understood", spec: v2.EgressClusterPolicySpec{Pods: new(requirement("a", "Like"))}, no: []Pod{{}, pod(team, "a", "10.0.0.1")}, fails: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, err := OfCluster(&v2.EgressClusterPolicy{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Spec: tt.spec})
			if (err != nil) != tt.fails || p.Name != (types.NamespacedName{Name: "c"}) {
				t.Errorf("%s, error %v", p.Name, err)
			}
			for i, pod := range slices.Concat(tt.yes, tt.no) {
				if got := p.Selects(pod); got != (i < len(tt.yes)) {
					t.Errorf("%+v: %t", pod, got)
				}
			}
		})
	}
}

// TestSelectsAsWritten compares random selectors with a plain reading of what Kubernetes' API says of them.
func TestSelectsAsWritten(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	word := func() string { return string(rune('a' + rng.IntN(3))) }
	some := func() map[string]string {
		m := map[string]string{}
		for range rng.IntN(4) {
			m[word()] = word()
		}
		return m
	}
	selected := 0
	for range 20000 {
		s := metav1.LabelSelector{MatchLabels: some()}
		if rng.IntN(2) == 0 {
			s.MatchLabels = nil
		}
		for range rng.IntN(3) {
			op := []metav1.LabelSelectorOperator{metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn, metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist}[rng.IntN(4)]
			r := metav1.LabelSelectorRequirement{Key: word(), Operator: op}
			if op == metav1.LabelSelectorOpIn || op == metav1.LabelSelectorOpNotIn {
				r.Values = []string{word(), word()}
			}
			s.MatchExpressions = append(s.MatchExpressions, r)
		}
		pod := Pod{Namespace: "shop", Labels: some()}
		p, err := Of(testPolicy(func(p *v2.EgressPolicy) { p.Spec.Pods = &s }))
		if err != nil {
			t.Fatal(err)
		}
		want := matches(s, pod.Labels)
		if got := p.Selects(pod); got != want {
			t.Fatalf("%+v of %v: %t, want %t", s, pod.Labels, got, want)
		}
		if want {
			selected++
		}
	}
	if selected < 1000 || selected > 19000 {
		t.Errorf("%d of 20000 are selected: the test hardly tests", selected)
	}
}

func matches(s metav1.LabelSelector, labels map[string]string) bool {
	for k, v := range s.MatchLabels {
		if got, ok := labels[k]; !ok || got != v {
			return false
		}
	}
	for _, r := range s.MatchExpressions {
		v, has := labels[r.Key]
		ok := map[metav1.LabelSelectorOperator]bool{
			metav1.LabelSelectorOpIn: has && slices.Contains(r.Values, v), metav1.LabelSelectorOpNotIn: !has || !slices.Contains(r.Values, v),
			metav1.LabelSelectorOpExists: has, metav1.LabelSelectorOpDoesNotExist: !has,
		}[r.Operator]
		if !ok {
			return false
		}
	}
	return true
}

func TestOf(t *testing.T) {
	p, err := Of(testPolicy(func(p *v2.EgressPolicy) { p.Spec.PodCIDRs = []string{"10.0.0.0/8"} }))
	if err != nil || p.Name.String() != "shop/p" || p.UID != "u" || !p.Created.Equal(time.Unix(1000, 0)) || p.Egress.String() != "internet/nat" || p.Destinations != nil || p.OnFailure != v2.EgressFailureClosed {
		t.Errorf("%+v, error %v", p, err)
	}
	// Destinations that can't be understood aren't all of the Egress's.
	p, _ = Of(testPolicy(func(p *v2.EgressPolicy) { p.Spec.Destinations, p.Spec.OnFailure = []string{"x"}, v2.EgressFailureNode }))
	if p.Destinations == nil || len(p.Destinations) > 0 || p.OnFailure != v2.EgressFailureNode {
		t.Errorf("%#v", p)
	}
	// What is resolved holds until something else is known; spec.egress comes before it.
	other := v2.EgressPolicyStatus{Resolved: &v2.ResolvedPolicy{ObservedGeneration: 2, Egress: &v2.EgressReference{Namespace: "n", Name: "other"}}}
	for _, tt := range []struct {
		named      bool
		generation int64
		want       string
		unresolved bool
	}{{true, 2, "internet/nat", false}, {false, 2, "n/other", true}, {false, 3, "n/other", false}} {
		p, _ := Of(testPolicy(func(p *v2.EgressPolicy) {
			p.Status = *other.DeepCopy()
			p.Status.Resolved.ObservedGeneration = tt.generation
			if !tt.named {
				p.Spec.Egress = nil
			}
		}))
		if p.Egress.String() != tt.want || p.Unresolved != tt.unresolved {
			t.Errorf("%+v: %s, %t", tt, p.Egress, p.Unresolved)
		}
	}
}

func TestCompare(t *testing.T) {
	at := func(sec int64, ns, name string) Policy {
		return Policy{Created: time.Unix(sec, 0), Name: types.NamespacedName{Namespace: ns, Name: name}}
	}
	sorted := []Policy{Annotation(types.NamespacedName{}), at(1, "z", "z"), at(2, "", "z"), at(2, "a", "b"), at(2, "a", "c"), at(2, "b", "a"), at(3, "", "a")}
	for i, a := range sorted {
		for j, b := range sorted {
			if got, want := Compare(a, b), min(1, max(-1, i-j)); got != want {
				t.Errorf("%s to %s: %d, want %d", a.String(), b.String(), got, want)
			}
		}
	}
}

func BenchmarkSelects(b *testing.B) {
	var all []Policy
	for i := range 1000 {
		p, err := Of(testPolicy(func(p *v2.EgressPolicy) {
			p.Spec.Pods = &metav1.LabelSelector{MatchLabels: map[string]string{"app": fmt.Sprint(i), "tier": "x"}}
		}))
		if err != nil {
			b.Fatal(err)
		}
		all = append(all, p)
	}
	pod := Pod{Namespace: "shop", Labels: map[string]string{"app": "999", "tier": "x", "pod-template-hash": "y"}}
	for b.Loop() {
		if i := slices.IndexFunc(all, func(p Policy) bool { return p.Selects(pod) }); i != 999 {
			b.Fatal(i)
		}
	}
}
