package lbagent

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// What the gateway reads of an object stays, and all else goes.
func TestStrip(t *testing.T) {
	now := metav1.Now()
	full := metav1.ObjectMeta{
		Namespace: "shop", Name: "web", UID: "1", ResourceVersion: "2", Generation: 3, DeletionTimestamp: &now, Finalizers: []string{"x"}, Annotations: map[string]string{"x": "y"},
		OwnerReferences: []metav1.OwnerReference{{Name: "x"}}, ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "x"}},
		Labels: map[string]string{"x": "y", discoveryv1.LabelServiceName: "web", v2.LabelPool: "dmz", corev1.LabelNodeExcludeBalancers: ""},
	}
	with := func(labels map[string]string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "1", ResourceVersion: "2", Generation: 3, DeletionTimestamp: &now, Labels: labels}
	}
	ports := []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(80))}}
	places := []v2.FloatingPort{{Protocol: corev1.ProtocolTCP, Port: 80, Service: "shop/web"}}
	for _, c := range []struct{ full, want runtime.Object }{
		{
			&corev1.Service{ObjectMeta: full, Spec: corev1.ServiceSpec{ClusterIP: "10.0.0.1"}, Status: corev1.ServiceStatus{Conditions: []metav1.Condition{{Type: "x"}}}},
			&corev1.Service{ObjectMeta: with(nil), Spec: corev1.ServiceSpec{ClusterIP: "10.0.0.1"}},
		},
		{
			&corev1.Node{ObjectMeta: full, Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Address: "10.0.0.1"}}, Images: []corev1.ContainerImage{{SizeBytes: 1}}}},
			&corev1.Node{ObjectMeta: with(map[string]string{corev1.LabelNodeExcludeBalancers: ""}), Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Address: "10.0.0.1"}}}},
		},
		{
			&discoveryv1.EndpointSlice{ObjectMeta: full, Ports: ports, Endpoints: []discoveryv1.Endpoint{
				{Addresses: []string{"10.1.0.1"}, NodeName: new("n"), Zone: new("z"), TargetRef: &corev1.ObjectReference{Name: "x"}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}},
				{Addresses: []string{"10.1.0.2"}, Conditions: discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}},
			}},
			&discoveryv1.EndpointSlice{ObjectMeta: with(map[string]string{discoveryv1.LabelServiceName: "web"}), Ports: ports, Endpoints: []discoveryv1.Endpoint{
				{Addresses: []string{"10.1.0.1"}, NodeName: new("n"), Conditions: discoveryv1.EndpointConditions{Ready: new(true)}},
				{Addresses: []string{"10.1.0.2"}, Conditions: discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true)}},
			}},
		},
		{
			&v2.AddressBlock{ObjectMeta: full, Index: 4, IPv4: new("198.51.100.1/32"), Floating: &v2.Floating{Claim: "x", Ports: places, ReleasedAt: &now}},
			&v2.AddressBlock{ObjectMeta: with(map[string]string{v2.LabelPool: "dmz"}), Index: 4, IPv4: new("198.51.100.1/32"), Floating: &v2.Floating{Ports: places, ReleasedAt: &now}},
		},
	} {
		if d := cmp.Diff(c.want, testkit.Must(strip(c.full))(t), cmpopts.EquateEmpty()); d != "" {
			t.Errorf("%T (-want +got):\n%s", c.full, d)
		}
	}
}

// Endpoints on a node share the memory of its name.
func TestNames(t *testing.T) {
	var n names
	if a, b := n.one(new("n")), n.one(new("n")); a != b || *a != "n" {
		t.Errorf("%p %q and %p %q", a, *a, b, *b)
	}
	if got := n.one(nil); got != nil {
		t.Errorf("no name is %q", *got)
	}
}
