package pools

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

func TestNodeLimit(t *testing.T) {
	pods := func(n string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourcePods: resource.MustParse(n)}
	}
	for _, tt := range []struct {
		name   string
		status corev1.NodeStatus
		pods   int64
		limit  int64
	}{
		{"as kubelet says", corev1.NodeStatus{Allocatable: pods("110"), Capacity: pods("250")}, 110, 1308},
		{"allocatable is another", corev1.NodeStatus{Allocatable: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("8")}, Capacity: pods("250")}, 250, 1588},
		{"a Node that says nothing, as before kubelet does", corev1.NodeStatus{}, 1024, 3136},
		{"no pods", corev1.NodeStatus{Allocatable: pods("0"), Capacity: pods("110")}, 0, 1088},
		{"less than none", corev1.NodeStatus{Allocatable: pods("-7")}, 0, 1088},
		{"the most that count", corev1.NodeStatus{Allocatable: pods("4096")}, 4096, 9280},
		{"more than any kubelet runs", corev1.NodeStatus{Allocatable: pods("4097")}, 4096, 9280},
		{"a figure that overflows", corev1.NodeStatus{Allocatable: pods("9E")}, 4096, 9280},
	} {
		n := &corev1.Node{Status: tt.status}
		if got, limit := MostPods(n), NodeLimit(n, 32); got != tt.pods || limit != tt.limit {
			t.Errorf("%s: %d pods and %d addresses, want %d and %d", tt.name, got, limit, tt.pods, tt.limit)
		}
	}
}
