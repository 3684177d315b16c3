package egresscontroller

import (
	"hash/maphash"
	"maps"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
)

// stripper takes from objects the fields that the controllers don't read.
type stripper struct{ labels labelSets }

// strip keeps the fields of Pods, Nodes and Services that the controllers read.
func (s *stripper) strip(obj any) (any, error) {
	switch o := obj.(type) {
	case *corev1.Pod:
		return s.stripPod(o), nil
	case *corev1.Node:
		return &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion},
			Spec:       corev1.NodeSpec{PodCIDRs: o.Spec.PodCIDRs},
			Status:     corev1.NodeStatus{Addresses: o.Status.Addresses},
		}, nil
	case *corev1.Service:
		return &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: o.Namespace, Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion},
			Spec:       corev1.ServiceSpec{Type: o.Spec.Type, Selector: s.labels.shared(o.Spec.Selector)},
		}, nil
	}
	return kube.Strip(obj)
}

func (s *stripper) stripPod(p *corev1.Pod) *corev1.Pod {
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
	kept.Spec.HostNetwork, kept.Status.Phase = p.Spec.HostNetwork, p.Status.Phase
	if egress.MayBeClient(p) { // which a policy may select
		kept.Labels, kept.Status.PodIPs = s.labels.shared(p.Labels), p.Status.PodIPs
	}
	if _, ok := plan.RouterOf(p.Labels); ok { // a router, which is asked, or of which is told why it isn't ready
		kept.Labels = s.labels.shared(p.Labels)
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

// maxLabelSets is how many sets of labels are remembered. When there are more, all are forgotten, and those that are used stay where
// they are.
const maxLabelSets = 10000

// labelSets lets objects with equal labels share them, as the pods of a Deployment do: decoded, each has a map of its own, and
// strings. Nobody may change what it returns.
type labelSets struct {
	mu   sync.Mutex
	seed maphash.Seed
	sets map[uint64]map[string]string
}

// shared returns labels that are equal to the given ones.
func (l *labelSets) shared(labels map[string]string) map[string]string {
	if len(labels) == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sets == nil || len(l.sets) >= maxLabelSets {
		l.sets, l.seed = map[uint64]map[string]string{}, maphash.MakeSeed()
	}
	var sum uint64
	for k, v := range labels {
		sum += maphash.Comparable(l.seed, [2]string{k, v})
	}
	if known := l.sets[sum]; maps.Equal(known, labels) {
		return known
	}
	l.sets[sum] = labels
	return labels
}
