package egresscontroller

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/kube/leader"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
)

func TestDefaultsAreTheContract(t *testing.T) {
	t.Setenv("COIL_POD_NAMESPACE", "kube-system")
	t.Setenv("COIL_POD_NAME", "pod")
	o := &Options{}
	o.AddFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
	want := &Options{
		PodNamespace: "kube-system", PodName: "pod", EgressPort: 5555, EnableIPAM: true, EndpointsPerSlice: 100,
		Options: leading.Options{
			Observe:  observe.Options{MetricsAddr: ":9396", HealthAddr: ":9397"},
			Election: leader.Election{Namespace: "kube-system", LeaseDuration: 30 * time.Second, RenewDeadline: 20 * time.Second, RetryPeriod: 5 * time.Second},
		},
	}
	if diff := cmp.Diff(want, o); diff != "" {
		t.Errorf("defaults (-want +got):\n%s", diff)
	}
	if err := o.Validate(); err != nil {
		t.Errorf("the defaults are refused: %v", err)
	}
}

func TestValidateNamesAllProblems(t *testing.T) {
	err := (&Options{ExternalNodes: []string{"203.0.113.0/24", "203.0.113.1"}}).Validate()
	if err == nil {
		t.Fatal("nonsense is accepted")
	}
	for _, want := range []string{"COIL_POD_NAMESPACE", "COIL_POD_NAME", "--egress-port", "--max-endpoints-per-slice", "--node-external-cidrs", "--leader-election-retry-period"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not name %s: %v", want, err)
		}
	}
}

func TestOwnImage(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "pod"}, Spec: corev1.PodSpec{Containers: []corev1.Container{
		{Name: "sidecar", Image: "s"}, {Name: "coil-egress-controller", Image: "i", ImagePullPolicy: corev1.PullNever},
	}}}
	other := pod.DeepCopy()
	other.Name, other.Spec.Containers = "other", other.Spec.Containers[:1]
	core := fake.NewClientset(pod, other)
	got, err := ownImage(t.Context(), core, &Options{PodNamespace: "kube-system", PodName: "pod", EgressPort: 7})
	if want := (egress.RouterImage{Name: "i", PullPolicy: corev1.PullNever, Port: 7}); err != nil || got != want {
		t.Errorf("image %+v, error %v; want %+v", got, err, want)
	}
	for name, words := range map[string]string{"other": "no container coil-egress-controller", "none": "COIL_POD_NAME"} {
		if _, err := ownImage(t.Context(), core, &Options{PodNamespace: "kube-system", PodName: name}); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: error %v, want %q", name, err, words)
		}
	}
}

func TestStrip(t *testing.T) {
	meta := metav1.ObjectMeta{Namespace: "n", Name: "p", UID: "u", ResourceVersion: "7", CreationTimestamp: metav1.NewTime(time.Unix(1, 0))}
	full := func(annotations, labels map[string]string) *corev1.Pod {
		containers := []corev1.Container{{Name: "sidecar"}, {Name: "egress", Image: "i", Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: 8080}}}}
		p := &corev1.Pod{ObjectMeta: meta, Spec: corev1.PodSpec{HostNetwork: true, Containers: containers}, Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}}, HostIP: "192.0.2.1",
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady}}, ContainerStatuses: []corev1.ContainerStatus{{Name: "c"}},
		}}
		p.Annotations, p.Labels, p.ManagedFields = annotations, labels, make([]metav1.ManagedFieldsEntry, 2)
		return p
	}
	client := &corev1.Pod{ObjectMeta: meta, Spec: corev1.PodSpec{HostNetwork: true}, Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}}}}
	client.Annotations = map[string]string{"egress.coil.cybozu.com/internet": "nat"}
	router := &corev1.Pod{ObjectMeta: meta, Spec: corev1.PodSpec{Containers: []corev1.Container{
		{Name: "egress", Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: 8080}}},
	}}, Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady}}, ContainerStatuses: []corev1.ContainerStatus{{Name: "c"}},
	}}
	router.Labels = plan.RouterLabels("nat")
	more := plan.RouterLabels("nat")
	more["team"] = "a"
	for name, tt := range map[string]struct{ in, want *corev1.Pod }{
		"any pod": {full(map[string]string{"a": "b"}, map[string]string{"c": "d"}), &corev1.Pod{ObjectMeta: meta}},
		"client":  {full(map[string]string{"a": "b", "egress.coil.cybozu.com/internet": "nat"}, map[string]string{"c": "d"}), client},
		"router":  {full(nil, more), router},
	} {
		got, err := strip(tt.in)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("what is kept of a %s (-want +got):\n%s", name, diff)
		}
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: "u", ResourceVersion: "7"}, Spec: corev1.NodeSpec{PodCIDRs: []string{"10.0.0.0/24"}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}}}}
	big := node.DeepCopy()
	big.Labels, big.Status.Images = map[string]string{"a": "b"}, make([]corev1.ContainerImage, 5)
	got, err := strip(big)
	if diff := cmp.Diff(node, got); diff != "" || err != nil {
		t.Errorf("error %v; what is kept of a Node (-want +got):\n%s", err, diff)
	}
}
