package apiserver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/integration/lab/controlplane"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/node/view"
	"github.com/coil-net/coil/pkg/testkit"
)

// coild, with its rights, follows policies: at first without their definitions, then with them, without a new start. As of a pod it knows
// each policy that is older, whatever its caches have.
func TestCoildFollowsEgressPolicies(t *testing.T) {
	t.Parallel() // it has API servers of its own
	api := own(t, controlplane.Options{})
	isPolicy := func(crd *unstructured.Unstructured) bool {
		return strings.HasSuffix(crd.GetName(), "policies.coil.cybozu.com")
	}
	definitions := func(policies bool) func() ([]*unstructured.Unstructured, error) {
		return func() ([]*unstructured.Unstructured, error) {
			all, err := readCRDs()
			return slices.DeleteFunc(all, func(crd *unstructured.Unstructured) bool { return isPolicy(crd) != policies }), err
		}
	}
	err := installCRDs(t.Context(), api.RESTConfig(), definitions(false))
	for _, file := range []string{"coild.yaml", "coild-egress.yaml"} {
		err = errors.Join(err, installRBAC(t.Context(), api.RESTConfig(), file))
	}
	if err != nil {
		t.Fatal(err)
	}
	core := testkit.Must(kubernetes.NewForConfig(api.RESTConfig()))(t)
	admin := testkit.Must(versioned.NewForConfig(api.RESTConfig()))(t).CoilV2()
	const shop, node = "shop", "node-1"
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: shop, Labels: map[string]string{"team": "red"}}}
	testkit.Must(core.CoreV1().Namespaces().Create(t.Context(), namespace, metav1.CreateOptions{}))(t)
	testkit.Must(core.CoreV1().ServiceAccounts(shop).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{}))(t)
	unbound := func(name string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: name, Labels: map[string]string{"app": "web"}}}
		p.Spec.Containers = []corev1.Container{{Name: "c", Image: "none"}}
		return testkit.Must(core.CoreV1().Pods(shop).Create(t.Context(), p, metav1.CreateOptions{}))(t)
	}
	bind := func(p *corev1.Pod) *metav1.PartialObjectMetadata {
		to := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: p.Name, UID: p.UID}, Target: corev1.ObjectReference{Kind: "Node", Name: node}}
		testkit.Check(t, core.CoreV1().Pods(shop).Bind(t.Context(), to, metav1.CreateOptions{}))
		return &metav1.PartialObjectMetadata{ObjectMeta: testkit.Must(core.CoreV1().Pods(shop).Get(t.Context(), p.Name, metav1.GetOptions{}))(t).ObjectMeta}
	}
	pod := func(name string) *metav1.PartialObjectMetadata { return bind(unbound(name)) }

	cfg := api.RESTConfig()
	cfg.QPS = -1
	cfg.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:kube-system:coild",
		Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:kube-system", "system:authenticated"},
	}
	clients := testkit.Must(kube.NewClients(cfg))(t)
	testkit.Eventually(t, 30*time.Second, "coild's rights are in force", func() error {
		_, err := clients.Coil.Egresses("").List(t.Context(), metav1.ListOptions{})
		return err
	})
	var w kube.Watches
	woken := make(chan string, 100)
	none := func(types.NamespacedName) {}
	v := view.WatchEgresses(&w, clients, node, view.WatchNamespaces(&w, clients), view.EgressHandlers{
		Pod: none, Egress: none, Namespace: func(string) {}, Policies: func(ns string) { woken <- ns },
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer w.Shutdown()
	defer cancel()
	w.Start(ctx)
	if err := w.Register(); err != nil {
		t.Fatal(err)
	}
	asking := make(chan error, 1)
	go func() { asking <- v.Run(ctx) }()
	defer func() {
		cancel()
		testkit.Check(t, <-asking)
	}()
	filling, done := context.WithTimeout(ctx, testkit.Timeout(30*time.Second))
	defer done()
	if err := kube.WaitForSync(filling, w.Synced()...); err != nil {
		t.Fatal("without the definitions of policies the caches aren't filled:", err)
	}

	policies := func(pod *metav1.PartialObjectMetadata, live bool) string {
		t.Helper()
		all, labels, err := v.Policies(t.Context(), pod, live)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, p := range all {
			names = append(names, p.String())
		}
		slices.Sort(names)
		return fmt.Sprint(strings.Join(names, ", "), " ", labels["team"])
	}
	cached := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: "any"}}
	if got := policies(pod("before"), true); got != " " {
		t.Errorf("without definitions there are %s", got)
	}

	if err := installCRDs(t.Context(), api.RESTConfig(), definitions(true)); err != nil {
		t.Fatal(err)
	}
	egress := &v2.EgressReference{Namespace: "internet", Name: "nat"}
	web := &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	one := &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: "one"}, Spec: v2.EgressPolicySpec{Pods: web, EgressUse: v2.EgressUse{Egress: egress}}}
	testkit.Must(admin.EgressPolicies(shop).Create(t.Context(), one, metav1.CreateOptions{}))(t)
	all := &v2.EgressClusterPolicy{ObjectMeta: metav1.ObjectMeta{Name: "all"}, Spec: v2.EgressClusterPolicySpec{Pods: web, EgressUse: v2.EgressUse{Egress: egress}}}
	testkit.Must(admin.EgressClusterPolicies().Create(t.Context(), all, metav1.CreateOptions{}))(t)
	const both = "EgressClusterPolicy all, EgressPolicy shop/one red"
	if got := policies(pod("after"), true); got != both {
		t.Errorf("a pod that is newer than policies has %s, want %s", got, both)
	}
	if got := policies(cached, false); got != both {
		t.Errorf("the caches have, with what was read, %s, want %s", got, both)
	}
	testkit.Eventually(t, time.Minute, "the caches follow by themselves, and the pods are woken", func() error {
		select {
		case ns := <-woken:
			if ns != shop {
				return fmt.Errorf("woken is %s", ns)
			}
			return nil
		default:
			return errors.New("no pod is woken")
		}
	})

	// From now on caches follow at once; a pod need not wait for them.
	for i := range 20 {
		name := fmt.Sprint("p", i)
		waits := unbound(name)
		p := one.DeepCopy()
		p.Name = name
		testkit.Must(admin.EgressPolicies(shop).Create(t.Context(), p, metav1.CreateOptions{}))(t)
		if got := policies(bind(waits), true); !strings.Contains(got, "EgressPolicy shop/"+name) {
			t.Errorf("a pod that is bound after the policy %s was made has %s", name, got)
		}
	}
	const labelled = `{"metadata":{"labels":{"team":"blue"}}}`
	testkit.Must(core.CoreV1().Namespaces().Patch(t.Context(), shop, types.MergePatchType, []byte(labelled), metav1.PatchOptions{}))(t)
	if got := policies(pod("of-blue"), true); !strings.HasSuffix(got, " blue") {
		t.Errorf("a pod that is newer than the labels of its namespace has %s", got)
	}
	if got := policies(cached, false); !strings.HasSuffix(got, " blue") {
		t.Errorf("the caches have, with what was read, %s", got)
	}

	everything := metav1.ListOptions{}
	err = errors.Join(admin.EgressPolicies(shop).DeleteCollection(t.Context(), metav1.DeleteOptions{}, everything),
		admin.EgressClusterPolicies().DeleteCollection(t.Context(), metav1.DeleteOptions{}, everything))
	if err != nil {
		t.Fatal(err)
	}
	if got := policies(pod("last"), true); got != " " {
		t.Errorf("all policies are gone, and a newer pod has %s", got)
	}
	testkit.Eventually(t, 30*time.Second, "the caches follow", func() error {
		if got := policies(cached, false); got != " " {
			return fmt.Errorf("they have %s", got)
		}
		return nil
	})
}
