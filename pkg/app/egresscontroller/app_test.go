package egresscontroller

import (
	"fmt"
	"reflect"
	"runtime"
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
		p := &corev1.Pod{ObjectMeta: meta, Spec: corev1.PodSpec{Containers: containers}, Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}}, HostIP: "192.0.2.1",
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady}}, ContainerStatuses: []corev1.ContainerStatus{{Name: "c"}},
		}}
		p.Annotations, p.Labels, p.ManagedFields = annotations, labels, make([]metav1.ManagedFieldsEntry, 2)
		return p
	}
	client := &corev1.Pod{ObjectMeta: meta, Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}}}}
	client.Labels = map[string]string{"c": "d"}
	naming := client.DeepCopy()
	naming.Annotations = map[string]string{"egress.coil.cybozu.com/internet": "nat"}
	ended := &corev1.Pod{ObjectMeta: meta, Status: corev1.PodStatus{Phase: corev1.PodSucceeded}}
	router := &corev1.Pod{ObjectMeta: meta, Spec: corev1.PodSpec{Containers: []corev1.Container{
		{Name: "egress", Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: 8080}}},
	}}, Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady}}, ContainerStatuses: []corev1.ContainerStatus{{Name: "c"}},
	}}
	more := plan.RouterLabels("nat")
	more["team"] = "a"
	router.Labels = more
	host := func(p *corev1.Pod) *corev1.Pod { p.Spec.HostNetwork = true; return p }
	job := full(nil, map[string]string{"c": "d"})
	job.Status.Phase = corev1.PodSucceeded
	hostOnly := &corev1.Pod{ObjectMeta: meta, Spec: corev1.PodSpec{HostNetwork: true}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	s := &stripper{}
	for name, tt := range map[string]struct{ in, want *corev1.Pod }{
		"any pod":         {full(map[string]string{"a": "b"}, map[string]string{"c": "d"}), client},
		"client":          {full(map[string]string{"a": "b", "egress.coil.cybozu.com/internet": "nat"}, map[string]string{"c": "d"}), naming},
		"router":          {full(nil, more), router},
		"pod of the host": {host(full(nil, map[string]string{"c": "d"})), hostOnly},
		"Job":             {job, ended},
	} {
		got, err := s.strip(tt.in)
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
	got, err := s.strip(big)
	if diff := cmp.Diff(node, got); diff != "" || err != nil {
		t.Errorf("error %v; what is kept of a Node (-want +got):\n%s", err, diff)
	}
}

func TestStripService(t *testing.T) {
	want := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "s", UID: "u", ResourceVersion: "7"},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, Selector: map[string]string{"a": "b"}}}
	big := want.DeepCopy()
	big.Annotations, big.Spec.Ports, big.Spec.ClusterIP = map[string]string{"a": "b"}, make([]corev1.ServicePort, 5), "10.0.0.1"
	got, err := (&stripper{}).strip(big)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("error %v; what is kept of a Service (-want +got):\n%s", err, diff)
	}
}

// Labels are what they were, shared or not, and however many sets there are.
func TestLabelsAreShared(t *testing.T) {
	var sets labelSets
	same := func(a, b map[string]string) bool { return reflect.ValueOf(a).Pointer() == reflect.ValueOf(b).Pointer() }
	labels := func(i int) map[string]string { return map[string]string{"app": "a", "n": fmt.Sprint(i)} }
	first := sets.shared(labels(0))
	if again := sets.shared(labels(0)); !same(first, again) {
		t.Error("equal labels aren't shared")
	}
	if sets.shared(nil) != nil || sets.shared(map[string]string{}) != nil {
		t.Error("no labels are some")
	}
	for i := range 3 * maxLabelSets {
		if diff := cmp.Diff(labels(i), sets.shared(labels(i))); diff != "" || len(sets.sets) > maxLabelSets {
			t.Fatalf("%d sets (-want +got):\n%s", len(sets.sets), diff)
		}
	}
}

// BenchmarkPodMemory says what a pod costs, of a Deployment of 20.
func BenchmarkPodMemory(b *testing.B) {
	const pods = 10000
	for b.Loop() {
		s, kept := &stripper{}, make([]any, 0, pods)
		before := heap()
		for i := range pods {
			p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: fmt.Sprintf("app-%d-5b9b7c5d7-%d", i/20, i), Labels: map[string]string{}}}
			for _, k := range []string{"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/version", "pod-template-hash"} {
				p.Labels[strings.Clone(k)] = fmt.Sprintf("value-%d", i/20)
			}
			p.Status.PodIPs = []corev1.PodIP{{IP: fmt.Sprintf("10.0.%d.%d", i/250, i%250)}}
			stripped, _ := s.strip(p)
			kept = append(kept, stripped)
		}
		b.ReportMetric(float64(heap()-before)/pods, "B/pod")
		runtime.KeepAlive(kept)
	}
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
