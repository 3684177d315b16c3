package policy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// world has Egresses and Services.
type world struct {
	egresses map[string]*v2.Egress
	services map[string]*corev1.Service
	facts    Facts
}

func newWorld() *world {
	w := &world{egresses: map[string]*v2.Egress{}, services: map[string]*corev1.Service{}}
	w.facts = Facts{
		Namespace: &Namespace{Name: "shop", Labels: map[string]string{"team": "a"}},
		Egress:    func(n types.NamespacedName) *v2.Egress { return w.egresses[n.String()] },
		Service:   func(name string) *corev1.Service { return w.services[name] },
		Refused:   func(*v2.Egress) []string { return nil },
		Conflict:  func(*v2.Egress) *Conflict { return nil },
		Now:       metav1.NewTime(time.Unix(1, 0)),
	}
	w.egress("internet/nat", "0.0.0.0/0", "::/0")
	w.use(nil)
	return w
}

func (w *world) egress(name string, destinations ...string) *v2.Egress {
	ns, n, _ := strings.Cut(name, "/")
	e := &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: n}, Spec: v2.EgressSpec{Destinations: destinations}}
	w.egresses[name] = e
	return e
}

func (w *world) service(name string, selector map[string]string) *corev1.Service {
	w.services[name] = &corev1.Service{Spec: corev1.ServiceSpec{Selector: selector}}
	return w.services[name]
}

// use makes the facts those of a policy.
func (w *world) use(change func(*v2.EgressPolicy)) {
	p := testPolicy(change)
	f := &w.facts
	f.Policy, f.Selector = Of(p)
	f.Use, f.Services, f.Generation, f.Status = p.Spec.EgressUse, p.Spec.Services, p.Generation, p.Status
}

// onlyA lets namespaces of team a use an Egress, onlyB those of team b.
func only(e *v2.Egress, team string) *v2.Egress {
	e.Spec.AllowedNamespaces = &metav1.LabelSelector{MatchLabels: map[string]string{"team": team}}
	return e
}

func accepted(st v2.EgressPolicyStatus) metav1.Condition {
	c := meta.FindStatusCondition(st.Conditions, v2.PolicyAccepted)
	if c == nil {
		return metav1.Condition{}
	}
	return *c
}

func TestStatus(t *testing.T) {
	noEgress := func(p *v2.EgressPolicy) { p.Spec.Egress = nil }
	to := func(destinations ...string) func(*world) {
		return func(w *world) { w.use(func(p *v2.EgressPolicy) { p.Spec.Destinations = destinations }) }
	}
	for _, tt := range []struct {
		name    string
		setup   func(*world)
		reason  string
		says    string
		egress  string
		inForce bool
	}{
		{"an Egress", func(*world) {}, ReasonAccepted, "Egress internet/nat", "internet/nat", true},
		{"no Egress of the name", func(w *world) { delete(w.egresses, "internet/nat") }, ReasonEgressNotFound, "no Egress internet/nat: make it, or correct spec.egress", "internet/nat", false},
		{"a selector", func(w *world) {
			w.use(func(p *v2.EgressPolicy) { p.Spec.Pods = new(requirement("a", "Like")) })
		}, ReasonSelectorInvalid, `correct spec.pods: "Like" is not a valid label selector operator`, "internet/nat", false},

		{"no default", func(w *world) { w.use(noEgress) }, ReasonNoDefaultEgress, "set spec.egress, the annotation coil.cybozu.com/egress of the Namespace, or spec.default of an Egress", "", false},
		{"the default of the cluster", func(w *world) { w.use(noEgress); w.facts.Default = w.egress("a/b") }, ReasonAccepted, "", "a/b", true},
		{"the default of the cluster isn't allowed", func(w *world) { w.use(noEgress); w.facts.Default = only(w.egress("a/b"), "b") }, ReasonNoDefaultEgress, "Egress a/b, the default of the cluster, doesn't allow Namespace shop", "", false},
		{"the default of the namespace", func(w *world) {
			w.use(noEgress)
			w.facts.Default, w.facts.Namespace.Egress = w.egress("a/b"), "internet/nat"
		}, ReasonAccepted, "", "internet/nat", true},
		{"the default of the namespace isn't allowed, that of the cluster is", func(w *world) {
			w.use(noEgress)
			only(w.egresses["internet/nat"], "b")
			w.facts.Default, w.facts.Namespace.Egress = w.egress("a/b"), "internet/nat"
		}, ReasonAccepted, "", "a/b", true},
		{"the default of the namespace isn't allowed, and there is no other", func(w *world) {
			w.use(noEgress)
			only(w.egresses["internet/nat"], "b")
			w.facts.Namespace.Egress = "internet/nat"
		}, ReasonNoDefaultEgress, "Egress internet/nat, the default of the Namespace, doesn't allow it", "", false},
		// What a namespace names isn't replaced by something else: partners would see another address.
		{"the default of the namespace isn't there", func(w *world) {
			w.use(noEgress)
			w.facts.Default, w.facts.Namespace.Egress = w.egress("a/b"), "internet/typo"
		}, ReasonEgressNotFound, "no Egress internet/typo, which the annotation coil.cybozu.com/egress of Namespace shop names", "", false},
		{"the default of the namespace isn't a name", func(w *world) {
			w.use(noEgress)
			w.facts.Default, w.facts.Namespace.Egress = w.egress("a/b"), strings.Repeat("nat", 9999)
		}, ReasonEgressNotFound, "correct it, as in internet/nat", "", false},
		{"a name that can't be written", func(w *world) { w.use(noEgress); w.egress("a/b.c"); w.facts.Namespace.Egress = "a/b.c" }, ReasonEgressNotFound, "correct it", "", false},
		{"the policy of a cluster has no other default", func(w *world) { w.use(noEgress); w.facts.Namespace = nil }, ReasonNoDefaultEgress, "the cluster has no default", "", false},
		{"the policy of a cluster has that of the cluster", func(w *world) {
			w.use(noEgress)
			w.facts.Namespace, w.facts.Default = nil, w.egress("a/b")
		}, ReasonAccepted, "", "a/b", true},

		{"the namespace isn't allowed", func(w *world) { only(w.egresses["internet/nat"], "b") }, ReasonNamespaceNotAllowed, "Egress internet/nat doesn't allow Namespace shop (spec.allowedNamespaces): label the Namespace", "internet/nat", true},
		{"the namespace is allowed", func(w *world) { only(w.egresses["internet/nat"], "a") }, ReasonAccepted, "", "internet/nat", true},
		{"nobody can be allowed", func(w *world) {
			w.egresses["internet/nat"].Spec.AllowedNamespaces = new(requirement("a", "Like"))
		}, ReasonNamespaceNotAllowed, "Like", "internet/nat", true},
		{"some namespaces aren't allowed", func(w *world) {
			w.facts.Namespace, w.facts.Refused = nil, func(*v2.Egress) []string { return []string{"a", "b", "c", "d"} }
		}, ReasonNamespaceNotAllowed, "Namespace a, b, c and 1 more", "internet/nat", true},

		{"a destination", to("203.0.113.0/24", "2001:db8::/32"), ReasonAccepted, "", "internet/nat", true},
		{"a destination outside", func(w *world) { to("198.51.100.0/24", "203.0.113.0/24")(w); w.egress("internet/nat", "203.0.113.0/24") }, ReasonDestinationOutside,
			"Destination 198.51.100.0/24 is within no destination of Egress internet/nat: add it there, or take it out here", "internet/nat", false},
		{"a destination beyond one", func(w *world) { to("203.0.112.0/23")(w); w.egress("internet/nat", "203.0.113.0/24") }, ReasonDestinationOutside, "203.0.112.0/23", "internet/nat", false},
		{"the other family", func(w *world) { to("::/0")(w); w.egress("internet/nat", "0.0.0.0/0") }, ReasonDestinationOutside, "::/0", "internet/nat", false},
		{"a private network within all", to("10.1.0.0/16"), ReasonDestinationOutside, "Private networks aren't within", "internet/nat", false},
		{"a private network within a private one", func(w *world) { to("10.1.0.0/16")(w); w.egress("internet/nat", "10.0.0.0/8") }, ReasonAccepted, "", "internet/nat", true},
		{"a link-local network", func(w *world) { to("169.254.169.254/32")(w); w.egress("internet/nat", "169.254.0.0/16") }, ReasonDestinationOutside, "link-local ones are reached without an Egress", "internet/nat", false},
		{"in the cluster", func(w *world) {
			to("203.0.113.0/24")(w)
			w.egresses["internet/nat"].Status.InClusterCIDRs = []string{"203.0.112.0/20"}
		}, ReasonDestinationInCluster, "Destination 203.0.113.0/24 is inside of the cluster", "internet/nat", false},
		{"around the cluster", func(w *world) {
			to("203.0.112.0/20")(w)
			w.egresses["internet/nat"].Status.InClusterCIDRs = []string{"203.0.113.0/24"}
		}, ReasonAccepted, "", "internet/nat", true},
		{"a private network that the Egress takes out of the cluster's", func(w *world) {
			to("10.1.2.0/24")(w)
			w.egress("internet/nat", "10.1.0.0/16").Status.InClusterCIDRs = []string{"10.0.0.0/8"}
		}, ReasonAccepted, "", "internet/nat", true},
		{"a private network of the cluster", func(w *world) {
			to("10.1.2.0/24")(w)
			w.egress("internet/nat", "10.0.0.0/8").Status.InClusterCIDRs = []string{"10.1.0.0/16"}
		}, ReasonDestinationInCluster, "10.1.2.0/24", "internet/nat", false},
		{"several problems", func(w *world) {
			w.use(func(p *v2.EgressPolicy) { p.Spec.Services, p.Spec.Destinations = []string{"s"}, []string{"10.0.0.0/8"} })
		}, ReasonDestinationOutside, "There is no Service s", "internet/nat", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld()
			tt.setup(w)
			st := Status(w.facts)
			c := accepted(st)
			if want := map[bool]metav1.ConditionStatus{true: metav1.ConditionTrue, false: metav1.ConditionFalse}[tt.reason == ReasonAccepted]; c.Reason != tt.reason || c.Status != want || !strings.Contains(c.Message, tt.says) {
				t.Errorf("%s %s: %s", c.Status, c.Reason, c.Message)
			}
			if got := InForce(st); got != tt.inForce {
				t.Errorf("in force: %t", got)
			}
			if st.Summary.Egress != tt.egress || st.ObservedGeneration != 3 || st.Resolved.ObservedGeneration != 3 || (st.Resolved.Egress == nil) != (tt.egress == "") || len(c.Message) > 1000 {
				t.Errorf("%+v", st)
			}
			w.facts.Status, w.facts.Now = st, metav1.NewTime(time.Unix(99, 0))
			if diff := cmp.Diff(st, Status(w.facts)); diff != "" {
				t.Errorf("the second time (-want +got):\n%s", diff)
			}
		})
	}
	if InForce(v2.EgressPolicyStatus{}) {
		t.Error("a policy that nobody has seen is in force")
	}
}

// The Services of a policy, one state after another.
func TestServices(t *testing.T) {
	w := newWorld()
	spec := func(p *v2.EgressPolicy) { p.Spec.Services = []string{"a", "b"} }
	w.use(spec)
	for _, step := range []struct {
		name   string
		change func()
		want   string
		reason string
	}{
		{"none is there", func() {}, "", ReasonServiceNotFound},
		{"one is there", func() { w.service("a", map[string]string{"app": "a"}) }, "app=a", ReasonServiceNotFound},
		{"both are", func() { w.service("b", map[string]string{"app": "b"}) }, "app=a app=b", ReasonAccepted},
		{"one goes: its pods stay", func() { delete(w.services, "a") }, "app=b app=a", ReasonServiceNotFound},
		{"one has no selector: its pods stay", func() { w.service("a", map[string]string{"app": "a"}); w.service("b", nil) }, "app=a app=b", ReasonServiceWithoutSelector},
		{"another selector", func() { w.service("b", map[string]string{"app": "c"}) }, "app=a app=c", ReasonAccepted},
		{"a name of DNS", func() { w.services["b"].Spec.Type = corev1.ServiceTypeExternalName }, "app=a app=c", ReasonServiceWithoutSelector},
		{"twins", func() { w.service("b", map[string]string{"app": "a"}) }, "app=a", ReasonAccepted},
		{"both go", func() { clear(w.services) }, "app=a", ReasonServiceNotFound},
		{"another spec forgets", func() { w.facts.Generation++ }, "", ReasonServiceNotFound},
	} {
		step.change()
		st := Status(w.facts)
		var got []string
		for _, s := range st.Resolved.Pods {
			got = append(got, metav1.FormatLabelSelector(&s))
		}
		if c := accepted(st); strings.Join(got, " ") != step.want || c.Reason != step.reason || !InForce(st) {
			t.Errorf("%s: %q, %s: %s", step.name, got, c.Reason, c.Message)
		}
		w.facts.Status = st
	}
	// No more than the status may have, whatever is kept.
	for i := range 40 {
		w.facts.Status.Resolved.Pods = append(w.facts.Status.Resolved.Pods, metav1.LabelSelector{MatchLabels: map[string]string{"app": fmt.Sprint(i)}})
	}
	if n := len(Status(w.facts).Resolved.Pods); n != maxSelectors {
		t.Errorf("%d selectors", n)
	}
	if got := accepted(Status(w.facts)).Message; !strings.Contains(got, "no Service a, b in the namespace: make it, or take it out of spec.services. Until then pods stay selected") {
		t.Errorf("message %q", got)
	}
}

func TestConflicting(t *testing.T) {
	w := newWorld()
	conflict := func() *metav1.Condition {
		w.facts.Status = Status(w.facts)
		return meta.FindStatusCondition(w.facts.Status.Conditions, v2.PolicyConflicting)
	}
	if c := conflict(); c != nil {
		t.Errorf("%+v", c)
	}
	rival := Rival{Policy: Policy{Name: types.NamespacedName{Name: "all"}, Egress: types.NamespacedName{Namespace: "a", Name: "b"}}, Destination: w.facts.Policy.reaches(w.facts.Egress)[0]}
	pod := types.NamespacedName{Namespace: "shop", Name: "x"}
	w.facts.Conflict = func(*v2.Egress) *Conflict { return &Conflict{rival, pod} }
	if c := conflict(); c == nil || c.Status != metav1.ConditionTrue || c.Reason != ReasonOlderPolicy || !strings.Contains(c.Message, "Pod shop/x reaches 0.0.0.0/0 through Egress a/b, by the older EgressClusterPolicy all:") {
		t.Errorf("%+v", c)
	}
	rival.Policy = Annotation(rival.Egress)
	if c := conflict(); c == nil || c.Reason != ReasonAnnotation || !strings.Contains(c.Message, "by its annotation") {
		t.Errorf("%+v", c)
	}
	if c := accepted(w.facts.Status); c.Status != metav1.ConditionTrue {
		t.Errorf("a conflict isn't accepted: %+v", c)
	}
	w.facts.Conflict = func(*v2.Egress) *Conflict { return nil }
	if c := conflict(); c != nil {
		t.Errorf("%+v", c)
	}
}

func TestRivals(t *testing.T) {
	w := newWorld()
	w.egress("a/b", "203.0.113.0/24", "0.0.0.0/0")
	make := func(at int64, name, egress string, destinations ...string) Policy {
		p, err := Of(testPolicy(func(p *v2.EgressPolicy) {
			p.Name, p.CreationTimestamp = name, metav1.NewTime(time.Unix(at, 0))
			ns, n, _ := strings.Cut(egress, "/")
			p.Spec.Egress, p.Spec.Destinations = &v2.EgressReference{Namespace: ns, Name: n}, destinations
		}))
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	mine := make(10, "mine", "internet/nat")
	all := []Policy{
		mine, make(5, "older", "a/b"), make(5, "also", "a/b", "203.0.113.0/24", "0.0.0.0/0"), make(15, "younger", "a/b"), make(5, "same-egress", "internet/nat"),
		make(5, "smaller", "a/b", "203.0.113.0/24"), make(5, "gone", "no/egress"), Annotation(types.NamespacedName{Namespace: "a", Name: "b"}),
	}
	for _, tt := range []struct {
		policy Policy
		want   []string
	}{
		{mine, []string{" 0.0.0.0/0", "also 0.0.0.0/0", "older 0.0.0.0/0"}},
		{make(10, "mine", "internet/nat", "203.0.113.0/24"), []string{" 203.0.113.0/24", "also 203.0.113.0/24", "older 203.0.113.0/24", "smaller 203.0.113.0/24"}},
		{make(10, "mine", "internet/nat", "203.0.113.128/25"), nil}, // it is the smallest
		{make(1, "mine", "internet/nat"), []string{" 0.0.0.0/0"}},
		{make(10, "mine", "no/egress"), nil},
	} {
		var got []string
		for _, r := range Rivals(tt.policy, slices.Clone(all), w.facts.Egress) {
			got = append(got, r.Name.Name+" "+r.Destination.String())
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("rivals of %+v (-want +got):\n%s", tt.policy, diff)
		}
	}
}
