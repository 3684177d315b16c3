package lbcontroller

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestScenario38Options(t *testing.T) {
	t.Setenv("COIL_POD_NAMESPACE", "coil")
	o := &Options{}
	o.AddFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
	if err := o.Validate(); err != nil || o.Namespace != "coil" || o.DefaultPool != "services" || o.WithoutClass {
		t.Errorf("the defaults are %+v, %v", o, err)
	}
	o.Namespace, o.DefaultPool = "", ""
	if err := o.Validate(); err == nil || !strings.Contains(err.Error(), "--claim-namespace") || !strings.Contains(err.Error(), "--default-pool") {
		t.Errorf("nothing is accepted: %v", err)
	}
}

// All that the controller decides by is still there.
func TestStrip(t *testing.T) {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{corev1.LabelNodeExcludeBalancers: "", "other": ""}}}
	n.Spec.Taints = []corev1.Taint{{Key: "a"}}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	n.Status.Images = make([]corev1.ContainerImage, 50)
	want := n.DeepCopy()
	want.Status.Images = nil
	delete(want.Labels, "other")
	if diff := cmp.Diff(any(want), testkit.Must(strip(n))(t)); diff != "" {
		t.Errorf("a Node (-want +got):\n%s", diff)
	}
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "s", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}}}
	s.Endpoints = []discoveryv1.Endpoint{{NodeName: new("n"), Addresses: []string{"10.0.0.9"}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}}}
	kept, _ := testkit.Must(strip(s))(t).(*discoveryv1.EndpointSlice)
	if kept == nil || len(kept.Endpoints) != 1 || kept.Endpoints[0].Addresses != nil || !loadbalancer.WithEndpoints([]*discoveryv1.EndpointSlice{kept})["n"] {
		t.Errorf("an EndpointSlice: %+v", kept)
	}
}
