package ipamcontroller

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/kube/leader"
	"github.com/coil-net/coil/pkg/observe"
)

func TestDefaultsAreTheContract(t *testing.T) {
	o := &Options{}
	o.AddFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
	want := &Options{
		Options: leading.Options{
			Observe:  observe.Options{MetricsAddr: ":9386", HealthAddr: ":9387"},
			Election: leader.Election{Namespace: "kube-system", LeaseDuration: 30 * time.Second, RenewDeadline: 20 * time.Second, RetryPeriod: 5 * time.Second},
		},
		GCInterval: time.Hour, Quarantine: 10 * time.Minute,
	}
	if diff := cmp.Diff(want, o); diff != "" {
		t.Errorf("defaults (-want +got):\n%s", diff)
	}
	if err := o.Validate(); err != nil {
		t.Errorf("the defaults are refused: %v", err)
	}
}

func TestValidateNamesAllProblems(t *testing.T) {
	o := &Options{GCInterval: -time.Second, Quarantine: -time.Second, Options: leading.Options{
		Election: leader.Election{LeaseDuration: time.Second, RenewDeadline: time.Second},
	}}
	err := o.Validate()
	if err == nil {
		t.Fatal("nonsense is accepted")
	}
	for _, want := range []string{"--gc-interval", "--quarantine", "--leader-election-retry-period", "--leader-election-namespace", "--leader-election-lease-duration"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not name %s: %v", want, err)
		}
	}
}

func TestNoQuarantineIsAllowed(t *testing.T) {
	o := &Options{}
	o.AddFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
	o.Quarantine = 0
	if err := o.Validate(); err != nil {
		t.Error(err)
	}
}

func TestStripNode(t *testing.T) {
	addrs := []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}}
	kept := metav1.ObjectMeta{Name: "n", UID: types.UID("u"), ResourceVersion: "7", CreationTimestamp: metav1.NewTime(time.Unix(1, 0))}
	pods := corev1.ResourceList{corev1.ResourcePods: resource.MustParse("110")}
	full := &corev1.Node{ObjectMeta: kept, Status: corev1.NodeStatus{Addresses: addrs, Images: make([]corev1.ContainerImage, 50)}}
	full.Status.Capacity = corev1.ResourceList{corev1.ResourcePods: pods[corev1.ResourcePods], corev1.ResourceCPU: resource.MustParse("8")}
	full.Status.Allocatable = full.Status.Capacity
	full.Labels = map[string]string{"a": "b"}
	full.ManagedFields = make([]metav1.ManagedFieldsEntry, 3)
	got, err := stripNode(full)
	if err != nil {
		t.Fatal(err)
	}
	want := &corev1.Node{ObjectMeta: kept, Status: corev1.NodeStatus{Addresses: addrs, Capacity: pods, Allocatable: pods}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what is kept of a Node (-want +got):\n%s", diff)
	}
}

func TestStripBlock(t *testing.T) {
	labels := map[string]string{v2.LabelPool: "p", v2.LabelNode: "n", v2.LabelRequest: "r", v2.LabelReserved: v2.ReservedValue, v2.LabelFloating: v2.FloatingValue, v2.LabelAnnounce: "Neighbor"}
	annotations := map[string]string{v2.AnnotationNodeUID: "u", v2.AnnotationNodeGone: "then u", v2.AnnotationDisowned: "v"}
	now := metav1.NewTime(time.Unix(1, 0))
	want := &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{
			Name: "p-7", UID: types.UID("u"), ResourceVersion: "9", CreationTimestamp: now, DeletionTimestamp: &now,
			Labels: labels, Annotations: annotations, Finalizers: []string{v2.Finalizer},
		},
		Index: 7, IPv4: new("10.0.0.0/27"), IPv6: new("fd00::/123"), Floating: &v2.Floating{Claim: "c"}, Status: v2.AddressBlockStatus{Allocated: 3, Cooling: 4},
	}
	full := want.DeepCopy()
	full.Labels["other"], full.Annotations["other"] = "x", "x"
	full.OwnerReferences = []metav1.OwnerReference{{Kind: "AddressPool", Name: "p"}}
	full.ManagedFields = make([]metav1.ManagedFieldsEntry, 3)
	got, err := stripBlock(full)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what is kept of an AddressBlock (-want +got):\n%s", diff)
	}
	full.Finalizers = []string{v2.Finalizer, "foregroundDeletion"}
	if got, err = stripBlock(full); err != nil {
		t.Fatal(err)
	}
	if b, ok := got.(*v2.AddressBlock); !ok || len(b.Finalizers) != 2 {
		t.Errorf("finalizers of others are lost: %+v", got)
	}
}
