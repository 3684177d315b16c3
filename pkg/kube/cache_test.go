package kube

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/pkg/testkit"
)

func TestCache(t *testing.T) {
	c := Cache[corev1.Pod]{cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})}
	byNode := c.IndexBy(func(p *corev1.Pod) []string { return []string{p.Spec.NodeName} })
	for name, node := range map[string]string{"a": "one", "b": "one", "c": "two"} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: name}, Spec: corev1.PodSpec{NodeName: node}}
		testkit.Check(t, c.Add(pod))
	}
	if p := c.Find("apps/c"); p == nil || p.Name != "c" {
		t.Errorf("apps/c: %v", p)
	}
	if p := c.Find("c"); p != nil {
		t.Errorf("a pod without its namespace: %v", p)
	}
	if n := len(c.All()); n != 3 {
		t.Errorf("%d pods, want 3", n)
	}
	for node, want := range map[string]int{"one": 2, "two": 1, "three": 0} {
		if n := len(byNode.Under(node)); n != want {
			t.Errorf("%d pods on node %s, want %d", n, node, want)
		}
	}
	if all, none := len(c.In("apps")), len(c.In("web")); all != 3 || none != 0 {
		t.Errorf("%d pods in apps, %d in web", all, none)
	}
	if keys := byNode.Keys(); !slices.Equal(slices.Sorted(slices.Values(keys)), []string{"one", "two"}) {
		t.Errorf("nodes %q", keys)
	}
	byName := c.IndexBy(func(p *corev1.Pod) []string { return []string{p.Name} })
	if n, nodes := len(byName.Under("a")), len(byNode.Under("one")); n != 1 || nodes != 2 {
		t.Errorf("with a second index: %d pods of the name a, %d on node one", n, nodes)
	}
}
