package plan

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

func TestEgressRefs(t *testing.T) {
	got := EgressRefs(map[string]string{
		"egress.coil.cybozu.com/internet": " nat, other,,nat ,", "egress.coil.cybozu.com/a": "z", "coil.cybozu.com/pool": "p", "egress.coil.cybozu.com": "x",
	})
	want := []types.NamespacedName{{Namespace: "a", Name: "z"}, {Namespace: "internet", Name: "nat"}, {Namespace: "internet", Name: "other"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// An annotation has room for tens of thousands of names, which a tenant changes as often as he likes.
func TestEgressRefsAreBounded(t *testing.T) {
	var names []string
	for i := range 20000 {
		names = append(names, fmt.Sprintf("e%d", i))
	}
	annotations := map[string]string{"egress.coil.cybozu.com/a": "z", "egress.coil.cybozu.com/b": strings.Join(names, ",")}
	got := EgressRefs(annotations)
	if n := len(got); n != MostEgresses+1 || got[0].Name != "z" || got[n-1].Name != fmt.Sprintf("e%d", MostEgresses-1) {
		t.Errorf("%d Egresses: %v", n, got)
	}
	// A list of all of them would be as long as the text.
	if n := testing.AllocsPerRun(10, func() { EgressRefs(annotations) }); n > 100 {
		t.Errorf("%.0f allocations", n)
	}
}

// Whatever a tenant writes into annotations, the references are those that a plain reading of all of them begins with.
func FuzzEgressRefs(f *testing.F) {
	f.Add("egress.coil.cybozu.com/internet", " nat, other,,nat ,", "egress.coil.cybozu.com/a", "z")
	f.Add("egress.coil.cybozu.com/", ",,\u00a0,", "coil.cybozu.com/pool", "egress.coil.cybozu.com/a")
	f.Add("egress.coil.cybozu.com/b", "same", "egress.coil.cybozu.com/b/c", "same")
	f.Add("egress.coil.cybozu.com/many", strings.Repeat("a,b,c,d,e,", 20)+"\xff", "egress.coil.cybozu.com/more", "x"+strings.Join(strings.Split(strings.Repeat("y", 70), ""), ",z"))
	f.Fuzz(func(t *testing.T, key, value, otherKey, otherValue string) {
		annotations := map[string]string{key: value, otherKey: otherValue}
		var all []types.NamespacedName
		for _, k := range slices.Sorted(maps.Keys(annotations)) {
			if !strings.HasPrefix(k, v2.AnnotationEgressPrefix) {
				continue
			}
			for _, name := range strings.Split(annotations[k], ",") {
				ref := types.NamespacedName{Namespace: k[len(v2.AnnotationEgressPrefix):], Name: strings.TrimSpace(name)}
				if ref.Name != "" && !slices.Contains(all, ref) {
					all = append(all, ref)
				}
			}
		}
		got := EgressRefs(annotations)
		if diff := cmp.Diff(all[:min(len(all), MostEgresses+1)], got, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%q (-want +got):\n%s", annotations, diff)
		}
	})
}

func TestAllowsNamespace(t *testing.T) {
	red := &metav1.LabelSelector{MatchLabels: map[string]string{"team": "red"}}
	for _, c := range []struct {
		name     string
		selector *metav1.LabelSelector
		labels   map[string]string
		want     bool
		fails    bool
	}{
		{"unset", nil, nil, true, false},
		{"empty", &metav1.LabelSelector{}, nil, true, false},
		{"matches", red, map[string]string{"team": "red"}, true, false},
		{"another", red, map[string]string{"team": "blue"}, false, false},
		{"no labels", red, nil, false, false},
		{"nonsense", &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "team", Operator: "Like"}}}, nil, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := &v2.Egress{}
			e.Spec.AllowedNamespaces = c.selector
			got, err := AllowsNamespace(e, c.labels)
			if got != c.want || (err != nil) != c.fails {
				t.Errorf("%t, %v", got, err)
			}
		})
	}
}

func TestDefaultEgresses(t *testing.T) {
	make := func(name string, age int64, change func(*v2.Egress)) *v2.Egress {
		e := &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, CreationTimestamp: metav1.NewTime(time.Unix(age, 0))}, Spec: v2.EgressSpec{Default: true}}
		if change != nil {
			change(e)
		}
		return e
	}
	var got []string
	for _, e := range DefaultEgresses([]*v2.Egress{
		make("young", 3, nil), make("c", 2, nil), make("b", 2, nil), make("old", 1, func(e *v2.Egress) { e.Spec.Default = false }),
		make("ending", 1, func(e *v2.Egress) { e.DeletionTimestamp = new(metav1.Now()) }), make("a", 2, func(e *v2.Egress) { e.Namespace = "o" }),
	}) {
		got = append(got, e.Name)
	}
	if diff := cmp.Diff([]string{"b", "c", "a", "young"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Clients and routers look at an Egress anew when its addresses are others and, if they are the routers', when they are elsewhere.
func TestSameEgress(t *testing.T) {
	egress := func(use v2.EgressAddressUse, change func(*v2.Egress)) *v2.Egress {
		e := &v2.Egress{Spec: v2.EgressSpec{Addresses: &v2.EgressAddresses{Use: use}}}
		e.Generation, e.Status.ObservedGeneration = 1, 1
		e.Status.Addresses = []v2.EgressAddressStatus{{Block: "b", EgressAddress: v2.EgressAddress{IPv4: "198.51.100.1"}, Node: "n", Router: "r"}}
		change(e)
		return e
	}
	for _, c := range []struct {
		name             string
		change           func(*v2.Egress)
		clients, routers bool // whether it is the same
	}{
		{"nothing", func(*v2.Egress) {}, true, true},
		{"the number of clients", func(e *v2.Egress) { e.Status.Clients = 7 }, true, true},
		{"the spec", func(e *v2.Egress) { e.Generation = 2 }, false, false},
		{"ranges of the cluster", func(e *v2.Egress) { e.Status.InClusterCIDRs = []string{"10.0.0.0/8"} }, false, false},
		{"another address", func(e *v2.Egress) { e.Status.Addresses[0].IPv4 = "198.51.100.2" }, false, false},
		{"another router", func(e *v2.Egress) { e.Status.Addresses[0].Router = "s" }, true, false},
		{"no router", func(e *v2.Egress) { e.Status.Addresses[0].Router = "" }, true, false},
		{"no address", func(e *v2.Egress) { e.Status.Addresses = nil }, false, false},
	} {
		for use, want := range map[v2.EgressAddressUse]bool{v2.EgressAddressOfClient: c.clients, v2.EgressAddressOfRouter: c.routers} {
			if got := SameEgress(egress(use, func(*v2.Egress) {}), egress(use, c.change)); got != want {
				t.Errorf("%s, use %s: the same is %t, want %t", c.name, use, got, want)
			}
		}
	}
}
