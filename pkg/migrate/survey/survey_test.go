package survey

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/version"
	fakediscovery "k8s.io/client-go/discovery/fake"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	coilfake "github.com/coil-net/coil/generated/clientset/versioned/fake"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/preflight"
	"github.com/coil-net/coil/pkg/testkit"
)

// clients has the objects of a cluster.
func clients(t *testing.T) (Clients, *fake.Clientset) {
	t.Helper()
	system := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name, Namespace: "kube-system"} }
	rule := func(groups ...string) []admissionv1.RuleWithOperations {
		return []admissionv1.RuleWithOperations{{Rule: admissionv1.Rule{APIGroups: groups}}}
	}
	core := fake.NewClientset(
		&admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "v"}, Webhooks: []admissionv1.ValidatingWebhook{
			{Name: "a", Rules: rule("apps")}, {Name: "b", Rules: rule("coil.cybozu.com", "x")}}},
		&admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "m"}, Webhooks: []admissionv1.MutatingWebhook{{Name: "a", Rules: rule("y")}}},
		&appsv1.DaemonSet{ObjectMeta: system("coild")}, &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "other", Namespace: "other"}},
		&appsv1.Deployment{ObjectMeta: system("coil-ipam-controller")},
		&corev1.ConfigMap{ObjectMeta: system("coil-config")},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "b"}},
		&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "app"}},
		&networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}},
	)
	discovery, ok := core.Discovery().(*fakediscovery.FakeDiscovery)
	if !ok {
		t.Fatalf("discovery is a %T", core.Discovery())
	}
	discovery.FakedServerVersion = &version.Info{GitVersion: "v1.36.3"}
	definition := func(name, group string) runtime.Object {
		return &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": name},
			"spec": map[string]any{"group": group}, "status": map[string]any{"storedVersions": []any{"v1", "v2"}},
		}}
	}
	kinds := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(),
		map[schema.GroupVersionResource]string{definitions: "CustomResourceDefinitionList"},
		definition("addresspools.coil.cybozu.com", "coil.cybozu.com"), definition("x.example.org", "example.org"))
	coil := coilfake.NewSimpleClientset(
		&v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: "default-0"}},
		&v2.Egress{ObjectMeta: metav1.ObjectMeta{Name: "nat", Namespace: "internet"}})
	return Clients{Kube: core, Coil: coil, Dynamic: kinds}, core
}

func TestRead(t *testing.T) {
	c, _ := clients(t)
	got := testkit.Must(Read(t.Context(), c))(t)
	if diff := cmp.Diff([]preflight.Webhook{
		{Kind: "ValidatingWebhookConfiguration", Name: "v", Groups: []string{"apps", "coil.cybozu.com", "x"}},
		{Kind: "MutatingWebhookConfiguration", Name: "m", Groups: []string{"y"}},
	}, got.Webhooks); diff != "" {
		t.Errorf("webhooks (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]preflight.CRD{{Name: "addresspools.coil.cybozu.com", Stored: []string{"v1", "v2"}}}, got.CRDs); diff != "" {
		t.Errorf("definitions (-want +got):\n%s", diff)
	}
	counts := []int{len(got.DaemonSets), len(got.Deployments), len(got.ConfigMaps), len(got.Nodes), len(got.Pods), len(got.Services), len(got.Pools), len(got.Blocks), len(got.Egresses)}
	if diff := cmp.Diff([]int{1, 1, 1, 2, 1, 1, 1, 1, 1}, counts); diff != "" {
		t.Errorf("numbers of objects (-want +got):\n%s", diff)
	}
	if got.Kubernetes != "v1.36.3" {
		t.Errorf("Kubernetes is %s", got.Kubernetes)
	}
}

// Kinds that aren't defined have no objects; those that may not be read are told, all of them.
func TestReadErrors(t *testing.T) {
	c, core := clients(t)
	refuse := func(resource string, err error) {
		core.PrependReactor("list", resource, func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, err })
	}
	refuse("servicecidrs", apierrors.NewNotFound(schema.GroupResource{Resource: "servicecidrs"}, ""))
	if got, err := Read(t.Context(), c); err != nil || len(got.Services) != 0 || len(got.Nodes) != 2 {
		t.Errorf("without a kind: %d Nodes, error %v", len(got.Nodes), err)
	}
	for _, resource := range []string{"nodes", "pods"} {
		refuse(resource, apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", errors.New("no right")))
	}
	_, err := Read(t.Context(), c)
	for _, want := range []string{"list Nodes", "list Pods"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v doesn't have %q", err, want)
		}
	}
}

// states are what happens to pods, by the names of their nodes.
var states = map[string]corev1.PodStatus{
	"fine":    {Phase: corev1.PodSucceeded},
	"evicted": {Phase: corev1.PodFailed, Reason: "Evicted", Message: "no memory"},
	"slow":    {Phase: corev1.PodPending},
	"no-image": {Phase: corev1.PodPending, ContainerStatuses: []corev1.ContainerStatus{
		{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "not there"}}}}},
}

// kubelets is a cluster in which pods come into their states at once, and write a log.
func kubelets(log string, objects ...runtime.Object) *fake.Clientset {
	core := fake.NewClientset(objects...)
	core.PrependReactor("create", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		pod := a.(clienttesting.CreateAction).GetObject().(*corev1.Pod)
		pod.Status = states[pod.Spec.NodeName]
		if pod.Spec.NodeName == "refused" {
			return true, nil, errors.New("no more pods")
		}
		return false, nil, nil
	})
	core.PrependReactor("get", "pods/log", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, &runtime.Unknown{Raw: []byte(log)}, nil
	})
	return core
}

func nodes(names ...string) (all []*corev1.Node) {
	for _, n := range names {
		all = append(all, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n}})
	}
	return all
}

func left(t *testing.T, core *fake.Clientset) (names []string) {
	t.Helper()
	for _, p := range testkit.Must(core.CoreV1().Pods("ns").List(t.Context(), metav1.ListOptions{}))(t).Items {
		names = append(names, p.Name)
	}
	return names
}

func TestProbes(t *testing.T) {
	old := func(name, component string, phase corev1.PodPhase) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns", Labels: map[string]string{"app.kubernetes.io/component": component}}, Status: corev1.PodStatus{Phase: phase}}
	}
	core := kubelets("I1126 Starting\n{\"kernel\":\"6.1.0\"}\nI1126 Ended\n",
		old("another's", "other", corev1.PodSucceeded), old("killed", component, corev1.PodFailed), old("of another admin", component, corev1.PodRunning))
	all := nodes("fine", "evicted", "slow", "no-image", "refused", "windows", "away")
	all[5].Labels = map[string]string{corev1.LabelOSStable: "windows"}
	all[6].Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}
	got := Probes{Pods: core.CoreV1().Pods("ns"), Image: "coil:v3", Timeout: 300 * time.Millisecond}.Run(t.Context(), all)
	want := map[string]string{
		"fine": "6.1.0", "evicted": "Evicted: no memory", "slow": "is Pending: not within 300ms (--timeout)",
		"no-image": "ImagePullBackOff: not there: import the image on the node, or give one that the node can pull (--image)", "refused": "no more pods",
	}
	if len(got) != len(want) {
		t.Errorf("%d nodes, want %d: %v", len(got), len(want), got)
	}
	for node, text := range want {
		said := fmt.Sprint(got[node].Err)
		if r := got[node].Result; r != nil {
			said = r.Kernel
		}
		if !strings.Contains(said, text) {
			t.Errorf("node %s: %q, want %q", node, said, text)
		}
	}
	if diff := cmp.Diff([]string{"another's", "of another admin"}, left(t, core)); diff != "" {
		t.Errorf("pods afterwards (-want +got):\n%s", diff)
	}
}

func TestProbeSaysNothing(t *testing.T) {
	core := kubelets("E1126 Ended err=\"uname\"\n")
	got := Probes{Pods: core.CoreV1().Pods("ns"), Timeout: time.Minute}.Run(t.Context(), nodes("fine"))
	if err := got["fine"].Err; err == nil || !strings.Contains(err.Error(), "uname") {
		t.Errorf("error %v, want one with the log", err)
	}
}

// When the program is told to end, no pod stays, and no further one is made.
func TestProbesEnd(t *testing.T) {
	core := kubelets("")
	ctx, cancel := context.WithCancel(t.Context())
	made := make(chan struct{}, 100)
	core.PrependReactor("create", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		made <- struct{}{}
		return false, nil, nil
	})
	var all []*corev1.Node
	for range probesAtOnce + 4 {
		all = append(all, nodes("slow")...)
	}
	done := make(chan map[string]preflight.Probe)
	go func() {
		done <- Probes{Pods: core.CoreV1().Pods("ns"), Timeout: time.Hour}.Run(ctx, all)
	}()
	for range probesAtOnce {
		<-made
	}
	cancel()
	if got := (<-done)["slow"]; !errors.Is(got.Err, context.Canceled) {
		t.Errorf("error %v, want that it was cancelled", got.Err)
	}
	if pods := left(t, core); len(pods) > 0 || len(made) > 0 {
		t.Errorf("pods %q stay, and %d were made afterwards", pods, len(made))
	}
}
