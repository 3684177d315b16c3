package view

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// HostNetwork reads from the API server whether a Pod has the network of its node.
func (v *View) HostNetwork(ctx context.Context, pod types.NamespacedName) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, liveTimeout)
	defer cancel()
	var p corev1.Pod
	if err := v.clients.Core.Get().Namespace(pod.Namespace).Resource("pods").Name(pod.Name).Do(ctx).Into(&p); err != nil {
		return false, fmt.Errorf("read Pod %s: %w", pod, err)
	}
	return p.Spec.HostNetwork, nil
}
