package egresscontroller

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan"
)

// strip keeps the fields of Pods and Nodes that the controller reads: of most pods, their names.
func strip(obj any) (any, error) {
	switch o := obj.(type) {
	case *corev1.Pod:
		return stripPod(o), nil
	case *corev1.Node:
		return &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion},
			Spec:       corev1.NodeSpec{PodCIDRs: o.Spec.PodCIDRs},
			Status:     corev1.NodeStatus{Addresses: o.Status.Addresses},
		}, nil
	}
	return kube.Strip(obj)
}

func stripPod(p *corev1.Pod) *corev1.Pod {
	kept := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion,
		CreationTimestamp: p.CreationTimestamp, DeletionTimestamp: p.DeletionTimestamp,
	}}
	for k, v := range p.Annotations {
		if strings.HasPrefix(k, v2.AnnotationEgressPrefix) {
			if kept.Annotations == nil {
				kept.Annotations = map[string]string{}
			}
			kept.Annotations[k] = v
		}
	}
	if kept.Annotations != nil { // a client
		kept.Spec.HostNetwork = p.Spec.HostNetwork
		kept.Status.Phase, kept.Status.PodIPs = p.Status.Phase, p.Status.PodIPs
	}
	if egress, ok := plan.RouterOf(p.Labels); ok { // a router, which is asked, or of which is told why it isn't ready
		kept.Labels = plan.RouterLabels(egress)
		for _, c := range p.Spec.Containers {
			if c.Name == v2.EgressContainerName {
				kept.Spec.Containers = []corev1.Container{{Name: c.Name, Ports: c.Ports}}
			}
		}
		kept.Spec.NodeName = p.Spec.NodeName
		kept.Status.PodIPs = p.Status.PodIPs
		kept.Status.Conditions = p.Status.Conditions
		kept.Status.InitContainerStatuses, kept.Status.ContainerStatuses = p.Status.InitContainerStatuses, p.Status.ContainerStatuses
	}
	return kept
}
