package lbagent

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
)

// strip keeps the fields that the gateway reads, since there may be thousands of objects and they are large.
func strip(obj any) (any, error) {
	switch o := obj.(type) {
	case *corev1.Service:
		return &corev1.Service{ObjectMeta: kept(o), Spec: o.Spec}, nil
	case *corev1.Node:
		n := &corev1.Node{ObjectMeta: kept(o), Spec: corev1.NodeSpec{Taints: o.Spec.Taints}, Status: corev1.NodeStatus{Addresses: o.Status.Addresses, Conditions: o.Status.Conditions}}
		n.Labels = kube.Only(o.Labels, corev1.LabelNodeExcludeBalancers)
		return n, nil
	case *discoveryv1.EndpointSlice:
		s := &discoveryv1.EndpointSlice{ObjectMeta: kept(o), Ports: o.Ports}
		s.Labels = kube.Only(o.Labels, discoveryv1.LabelServiceName)
		s.Endpoints = make([]discoveryv1.Endpoint, len(o.Endpoints))
		for i, e := range o.Endpoints {
			s.Endpoints[i] = discoveryv1.Endpoint{
				Addresses: e.Addresses, NodeName: nodeNames.one(e.NodeName),
				Conditions: discoveryv1.EndpointConditions{Ready: flag(e.Conditions.Ready), Serving: flag(e.Conditions.Serving)},
			}
		}
		return s, nil
	case *v2.AddressBlock:
		b := &v2.AddressBlock{ObjectMeta: kept(o), Index: o.Index, IPv4: o.IPv4, IPv6: o.IPv6}
		b.Labels = kube.Only(o.Labels, v2.LabelPool)
		if f := o.Floating; f != nil {
			b.Floating = &v2.Floating{Ports: f.Ports, ReleasedAt: f.ReleasedAt}
		}
		return b, nil
	}
	return kube.Strip(obj)
}

// kept are the metadata that are read of all.
func kept(o metav1.Object) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: o.GetNamespace(), Name: o.GetName(), UID: o.GetUID(), ResourceVersion: o.GetResourceVersion(), Generation: o.GetGeneration(),
		DeletionTimestamp: o.GetDeletionTimestamp(),
	}
}

// flags are all values of a condition.
var flags = map[bool]*bool{false: new(false), true: new(true)}

// flag returns a condition that all endpoints share.
func flag(b *bool) *bool {
	if b == nil {
		return nil
	}
	return flags[*b]
}

// nodeNames has the name of each node once, though thousands of endpoints are there.
var nodeNames names

// names are texts that are kept until the process ends.
type names struct{ all sync.Map }

// one returns the text that all share who have an equal one.
func (n *names) one(text *string) *string {
	if text == nil {
		return nil
	}
	shared, _ := n.all.LoadOrStore(*text, text)
	return shared.(*string)
}
