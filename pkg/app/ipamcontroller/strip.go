package ipamcontroller

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
)

// stripNode keeps the fields of Nodes that the controllers read, since there may be thousands
// and they are large.
func stripNode(obj any) (any, error) {
	n, ok := obj.(*corev1.Node)
	if !ok {
		return kube.Strip(obj)
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion, CreationTimestamp: n.CreationTimestamp,
		},
		Status: corev1.NodeStatus{
			Addresses: n.Status.Addresses, Capacity: kube.Only(n.Status.Capacity, corev1.ResourcePods), Allocatable: kube.Only(n.Status.Allocatable, corev1.ResourcePods),
		},
	}, nil
}

// ownFinalizers are those of nearly all blocks. Objects of a cache are never changed.
var ownFinalizers = []string{v2.Finalizer}

// stripBlock keeps the fields of AddressBlocks that the controllers read, since there are
// several for each Node. They patch blocks, and never write one back as a whole.
func stripBlock(obj any) (any, error) {
	b, ok := obj.(*v2.AddressBlock)
	if !ok {
		return kube.Strip(obj)
	}
	kept := &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{
			Name: b.Name, UID: b.UID, ResourceVersion: b.ResourceVersion,
			CreationTimestamp: b.CreationTimestamp, DeletionTimestamp: b.DeletionTimestamp,
			Labels:      kube.Only(b.Labels, v2.LabelPool, v2.LabelNode, v2.LabelRequest, v2.LabelReserved, v2.LabelFloating, v2.LabelAnnounce, v2.LabelClosed),
			Annotations: kube.Only(b.Annotations, v2.AnnotationNodeUID, v2.AnnotationNodeGone, v2.AnnotationDisowned),
			Finalizers:  b.Finalizers,
		},
		Index: b.Index, IPv4: b.IPv4, IPv6: b.IPv6, Floating: b.Floating, Status: b.Status,
	}
	if slices.Equal(b.Finalizers, ownFinalizers) {
		kept.Finalizers = ownFinalizers
	}
	return kept, nil
}
