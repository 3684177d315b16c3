package kube

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/pkg/testkit"
)

func TestCache(t *testing.T) {
	const byNode = "node"
	onNode := func(p *corev1.Pod) []string { return []string{p.Spec.NodeName} }
	c := Cache[corev1.Pod]{cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{byNode: IndexBy(onNode)})}
	for name, node := range map[string]string{"a": "one", "b": "one", "c": "two"} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: name}, Spec: corev1.PodSpec{NodeName: node}}
		testkit.NoError(t, c.Add(pod))
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
		if n := len(c.By(byNode, node)); n != want {
			t.Errorf("%d pods on node %s, want %d", n, node, want)
		}
	}
	defer func() {
		if recover() == nil {
			t.Error("an index that doesn't exist has no pods")
		}
	}()
	c.By("zone", "a")
}
