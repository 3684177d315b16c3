package policy

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// A policy that selects a pod concerns the pod's namespace.
func TestConcerns(t *testing.T) {
	own := &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "p"}}
	own.Spec.Pods = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	of := &v2.EgressClusterPolicy{ObjectMeta: metav1.ObjectMeta{Name: "p"}}
	of.Spec.NamespaceSelector.MatchLabels = map[string]string{"team": "red"}
	of.Spec.Pods = &metav1.LabelSelector{}
	one, err := Of(own)
	if err != nil {
		t.Fatal(err)
	}
	all, err := OfCluster(of)
	if err != nil {
		t.Fatal(err)
	}
	if got := one.String() + ", " + all.String(); got != "EgressPolicy shop/p, EgressClusterPolicy p" {
		t.Error(got)
	}
	for _, c := range []struct {
		namespace, team string
		one, all        bool
	}{
		{"shop", "red", true, true},
		{"shop", "blue", true, false},
		{"other", "red", false, true},
		{"other", "", false, false},
	} {
		labels := map[string]string{"team": c.team}
		if one, all := one.Concerns(c.namespace, labels), all.Concerns(c.namespace, labels); one != c.one || all != c.all {
			t.Errorf("%s of team %q: %t, %t", c.namespace, c.team, one, all)
		}
		pod := Pod{Namespace: c.namespace, NamespaceLabels: labels, Labels: map[string]string{"app": "web"}}
		if one, all := one.Selects(pod), all.Selects(pod); one != c.one || all != c.all {
			t.Errorf("a pod of %s of team %q: %t, %t", c.namespace, c.team, one, all)
		}
	}
}
