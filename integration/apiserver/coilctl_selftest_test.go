package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/watch"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/selftest"
	"github.com/coil-net/coil/pkg/testkit"
)

// selftester is a cluster with Nodes whose kubelets never start a pod, and a user who has the rights that the help of coilctl selftest names.
type selftester struct {
	*cluster
	t          *testing.T
	kubeconfig string
}

func newSelftester(t *testing.T) *selftester {
	c := &selftester{cluster: ipamCluster(t), t: t}
	t.Cleanup(c.sweep)
	user := fresh("tester")
	c.kubeconfig = writeKubeconfig(t, testkit.Must(c.api.UserConfig(user))(t))
	rule := func(group, verbs string, resources ...string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{group}, Verbs: strings.Fields(verbs), Resources: resources}
	}
	testkit.Must(c.core.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: user}, Rules: []rbacv1.PolicyRule{
		rule("", "list create delete", "namespaces", "pods"), rule("", "list", "nodes"), rule("", "create", "serviceaccounts"), rule("", "create get", "secrets"), rule("apps", "list", "daemonsets"),
		rule("", "get create", "pods/exec"), rule(v2.GroupVersion.Group, "get", "addresspools"), rule(v2.GroupVersion.Group, "list", "addressblocks"),
		rule(v2.GroupVersion.Group, "get list", "egresses"), rule(v2.GroupVersion.Group, "create get", "egresspolicies"), rule("", "create get", "services"),
		rule("coordination.k8s.io", "get", "leases"),
	}}, metav1.CreateOptions{}))(t)
	testkit.Must(c.core.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: user}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: user},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	}, metav1.CreateOptions{}))(t)
	return c
}

// sweep removes the Services and EgressPolicies of selftests: no controller here removes what is in a namespace, and the controllers of other tests would find them.
func (c *selftester) sweep() {
	ctx := context.WithoutCancel(c.t.Context())
	namespaces := testkit.Must(c.core.CoreV1().Namespaces().List(ctx, metav1.ListOptions{LabelSelector: selftest.Selector()}))(c.t)
	for _, ns := range namespaces.Items {
		err := c.core.CoreV1().Services(ns.Name).Delete(ctx, selftest.ServiceName, metav1.DeleteOptions{})
		if !apierrors.IsNotFound(err) {
			testkit.Check(c.t, err)
		}
		testkit.Check(c.t, c.coil.CoilV2().EgressPolicies(ns.Name).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}))
	}
}

// worker makes a Node that says to be ready, with a coild.
func (c *selftester) worker(name string) {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	testkit.Must(c.core.CoreV1().Nodes().Create(c.t.Context(), n, metav1.CreateOptions{}))(c.t)
	p := c.runningPod(c.t, metav1.NamespaceSystem, fresh("coild"), "", name, "10.9.0.1")
	p.Labels = map[string]string{"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "coild"}
	testkit.Must(c.core.CoreV1().Pods(p.Namespace).Update(c.t.Context(), p, metav1.UpdateOptions{}))(c.t)
}

// daemonSet makes that of coild.
func (c *selftester) daemonSet(image string) {
	l := map[string]string{"app.kubernetes.io/name": "coil", "app.kubernetes.io/component": "coild"}
	d := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: fresh("coild"), Labels: l}, Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: l}}}
	d.Spec.Template = corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: l}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "coild", Image: image}}}}
	sets := c.core.AppsV1().DaemonSets(metav1.NamespaceSystem)
	testkit.Must(sets.Create(c.t.Context(), d, metav1.CreateOptions{}))(c.t)
	c.t.Cleanup(func() {
		testkit.Check(c.t, sets.Delete(context.WithoutCancel(c.t.Context()), d.Name, metav1.DeleteOptions{}))
	})
}

// secret makes a Secret that has a text, and returns its name.
func (c *selftester) secret(as corev1.SecretType, text string) string {
	s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: fresh("registry")}, Type: as, Data: map[string][]byte{corev1.DockerConfigJsonKey: []byte(`{"auths":{"` + text + `":{}}}`)}}
	testkit.Must(c.core.CoreV1().Secrets(s.Namespace).Create(c.t.Context(), s, metav1.CreateOptions{}))(c.t)
	return s.Namespace + "/" + s.Name
}

// pulls says whether pods of a selftest have Secrets with these texts.
func (c *selftester) pulls(namespace string, texts ...string) {
	c.t.Helper()
	for _, p := range testkit.Must(c.core.CoreV1().Pods(namespace).List(c.t.Context(), metav1.ListOptions{}))(c.t).Items {
		var got []string
		for _, ref := range p.Spec.ImagePullSecrets {
			s := testkit.Must(c.core.CoreV1().Secrets(namespace).Get(c.t.Context(), ref.Name, metav1.GetOptions{}))(c.t)
			_, text, _ := strings.Cut(string(s.Data[corev1.DockerConfigJsonKey]), `{"auths":{"`)
			got = append(got, strings.TrimSuffix(text, `":{}}}`))
		}
		if !slices.Equal(got, texts) {
			c.t.Errorf("pod %s pulls by %q, want %q", p.Name, got, texts)
		}
	}
}

// start runs the command.
func (c *selftester) start(args ...string) (out, errOut *output, ended chan int) {
	out, errOut, ended = &output{}, &output{}, make(chan int, 1)
	go func() {
		ended <- coilctl.Main(append([]string{"coilctl", "--kubeconfig=" + c.kubeconfig, "selftest"}, args...), strings.NewReader(""), out, errOut)
	}()
	return out, errOut, ended
}

// wants runs the command. Its exit code has to be code, and its output has to have some texts.
func (c *selftester) wants(code int, texts []string, args ...string) (stdout string) {
	c.t.Helper()
	out, errOut, ended := c.start(args...)
	got, all := <-ended, ""
	all = out.String() + errOut.String()
	for _, text := range texts {
		if !strings.Contains(all, text) {
			c.t.Errorf("coilctl selftest %q doesn't say %q", args, text)
		}
	}
	if got != code || c.t.Failed() {
		c.t.Errorf("coilctl selftest %q: exit code %d, want %d:\n%s", args, got, code, all)
	}
	return out.String()
}

// left are the pods of selftests, and their namespaces that aren't being removed.
func (c *selftester) left() (all []string) {
	c.t.Helper()
	o := metav1.ListOptions{LabelSelector: selftest.Selector()}
	for _, n := range testkit.Must(c.core.CoreV1().Namespaces().List(c.t.Context(), o))(c.t).Items {
		if n.DeletionTimestamp == nil {
			all = append(all, n.Name)
		}
	}
	for _, p := range testkit.Must(c.core.CoreV1().Pods(metav1.NamespaceAll).List(c.t.Context(), o))(c.t).Items {
		all = append(all, p.Namespace+"/"+p.Name)
	}
	slices.Sort(all)
	return all
}

// coilctl selftest says which pods don't run, and removes all that it has made: at its end, after an interrupt, and what an earlier one has left.
func TestCoilctlSelftest(t *testing.T) {
	c := newSelftester(t)
	testkit.Eventually(t, 20*time.Second, "the API server knows the rights", func() error {
		out, errOut, ended := c.start()
		<-ended
		if text := out.String() + errOut.String(); !strings.Contains(text, "error: there is no DaemonSet of coild") {
			return errors.New(text)
		}
		return nil
	})
	c.daemonSet("localhost/coil:v9")
	c.wants(1, []string{"error: there is no AddressPool default, of which the pods would get addresses: choose one with --pool\n"})
	c.pool(t, "blue", 2, v4("10.0.0.0/28"))
	c.wants(1, []string{"error: there is no node to test\n"}, "--pool=blue")
	c.wants(1, []string{"error: --image-pull-secret: read Secret default/none: secrets \"none\" not found\n"}, "--pool=blue", "--image-pull-secret=default/none")
	c.wants(1, []string{"is of the type Opaque, which has no credentials of registries"}, "--pool=blue", "--image-pull-secret="+c.secret(corev1.SecretTypeOpaque, "x"))
	c.wants(1, []string{"--at-once can't be 1", "--port can't be 80", "--timeout can't be 0s"}, "--at-once=1", "--port=80", "--timeout=0s")
	c.worker("n1")
	c.worker("n2")
	if all := c.left(); len(all) > 0 {
		t.Errorf("there is %q", all)
	}

	// Pods that never run are told, and go.
	c.wants(1, []string{
		"of the image localhost/coil:v9\n", "FAILED  pods       n1: the pod doesn't run: it is Pending, and kubelet hasn't seen it\n", "-> coilctl why node n1\n",
		"FAILED  pods       n2: ", "-       routes     all: fewer than two pods run\n", "0 checks have succeeded, 2 failed, 1 skipped\n", "error: the selftest has failed\n",
	}, "--pool=blue", "--timeout=1s", "--at-once=2")
	if all := c.left(); len(all) > 0 {
		t.Errorf("there is %q", all)
	}

	// Those of failed checks are kept, and go with the next one.
	c.wants(1, []string{"FAILED  nodes      n9: there is no such Node\n", " keeps 2 pods: the next selftest removes it, or kubectl delete namespace coil-selftest-", "-> coilctl why pod coil-selftest-"},
		"--pool=blue", "--timeout=1s", "--nodes=n1,n9", "--keep-failed", "--image-pull-secret="+c.secret(corev1.SecretTypeDockerConfigJson, "one")+","+c.secret(corev1.SecretTypeDockerConfigJson, "two"))
	kept := c.left()
	if len(kept) != 3 {
		t.Fatalf("there is %q, want a namespace and two pods", kept)
	}
	c.pulls(kept[0], "one", "two")
	text := c.wants(1, []string{"Namespace " + kept[0] + " of an earlier selftest is removed\n"}, "--pool=blue", "--timeout=1s", "--image=localhost/other:1", "-o", "json")
	var report selftest.Report
	if err := json.Unmarshal([]byte(text), &report); err != nil || report.Image != "localhost/other:1" || report.Count(selftest.Wrong) != 2 || !strings.HasPrefix(report.Namespace, selftest.Prefix) {
		t.Errorf("the report is %+v, %v", report, err)
	}
	if all := c.left(); len(all) > 0 {
		t.Errorf("there is %q", all)
	}

	// Of more nodes some have pods at a time, and each part begins with the last one of the part before.
	c.worker("n3")
	stop := c.kubelet()
	text = c.wants(1, []string{"FAILED  routes     n1 -> n2: ", "FAILED  routes     n2 -> n1: ", "FAILED  routes     n2 -> n3: ", "FAILED  routes     n3 -> n2: "}, "--pool=blue", "--timeout=1s", "--at-once=2")
	stop()
	if strings.Contains(text, "n1 -> n3") || strings.Contains(text, "n3 -> n1") || strings.Count(text, "  addresses  ") != 3 || strings.Index(text, "n2 -> n1") > strings.Index(text, "n2 -> n3") {
		t.Errorf("with two nodes at a time it says\n%s", text)
	}
	if all := c.left(); len(all) > 0 {
		t.Errorf("there is %q", all)
	}

	// It is interrupted while it waits for its pods.
	out, errOut, ended := c.start("--pool=blue", "--timeout=10m")
	out.prints(t, " has the pods of the selftest")
	testkit.Eventually(t, 20*time.Second, "its pods are there", func() error {
		if all := c.left(); len(all) < 3 {
			return fmt.Errorf("there is %q", all)
		}
		return nil
	})
	testkit.Check(t, syscall.Kill(os.Getpid(), syscall.SIGINT))
	if code := <-ended; code != 1 || !strings.HasPrefix(errOut.String(), "Interrupted: the pods of Namespace coil-selftest-") || !strings.HasSuffix(errOut.String(), "removes the rest\nerror: interrupted\n") {
		t.Errorf("exit code %d, %s%s", code, out, errOut)
	}
	if all := c.left(); len(all) > 0 {
		t.Errorf("there is %q", all)
	}
}

// kubelet says of each pod of a selftest that it runs, with an address of 10.0.0.0/24, until it is stopped. It runs none, so that nobody can be asked.
func (c *selftester) kubelet() (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.t.Context()))
	var work sync.WaitGroup
	w := testkit.Must(c.core.CoreV1().Pods(metav1.NamespaceAll).Watch(ctx, metav1.ListOptions{LabelSelector: selftest.Selector()}))(c.t)
	last := 0
	work.Go(func() {
		for e := range w.ResultChan() {
			p, ok := e.Object.(*corev1.Pod)
			if !ok || e.Type != watch.Added {
				continue
			}
			last++
			p.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIPs: []corev1.PodIP{{IP: fmt.Sprint("10.0.0.", last)}}, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
			p.Status.PodIP = p.Status.PodIPs[0].IP
			if _, err := c.core.CoreV1().Pods(p.Namespace).UpdateStatus(ctx, p, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) && ctx.Err() == nil {
				c.t.Error(err)
			}
		}
	})
	stop = func() {
		w.Stop()
		cancel()
		work.Wait()
	}
	c.t.Cleanup(stop)
	return stop
}

// coilctl selftest makes clients of Egresses by an annotation and by a policy, a pod in the network of a node, and a Service; and says that pods which nobody runs can't be asked.
func TestCoilctlSelftestWays(t *testing.T) {
	c := newSelftester(t)
	c.daemonSet("localhost/coil:v9")
	c.pool(t, "default", 8, v4("10.0.0.0/24"))
	block := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: "default-0", Labels: map[string]string{v2.LabelPool: "default", v2.LabelNode: "n1"}}, IPv4: new("10.0.0.0/24")}
	testkit.Must(c.coil.CoilV2().AddressBlocks().Create(t.Context(), block, metav1.CreateOptions{}))(t)
	for _, name := range []string{"n1", "n2"} {
		c.worker(name)
		n := testkit.Must(c.core.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{}))(t)
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "127.0.0.1"}}
		n.Status.DaemonEndpoints.KubeletEndpoint.Port = 1 // nobody listens there
		testkit.Must(c.core.CoreV1().Nodes().UpdateStatus(t.Context(), n, metav1.UpdateOptions{}))(t)
	}
	e := &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: fresh("nat")}, Spec: v2.EgressSpec{Destinations: []string{"127.0.0.0/8"}, Replicas: 1}}
	e = testkit.Must(c.coil.CoilV2().Egresses(e.Namespace).Create(t.Context(), e, metav1.CreateOptions{}))(t)
	t.Cleanup(func() {
		testkit.Check(t, c.coil.CoilV2().Egresses(e.Namespace).Delete(context.WithoutCancel(t.Context()), e.Name, metav1.DeleteOptions{}))
	})
	e.Status.Conditions = []metav1.Condition{{Type: v2.EgressAvailable, Status: metav1.ConditionTrue, Reason: "Ready", LastTransitionTime: metav1.Now()}}
	testkit.Must(c.coil.CoilV2().Egresses(e.Namespace).UpdateStatus(t.Context(), e, metav1.UpdateOptions{}))(t)
	now := metav1.NowMicro()
	leases := c.core.CoordinationV1().Leases(metav1.NamespaceSystem)
	testkit.Must(leases.Create(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: plan.LBLease}, Spec: coordinationv1.LeaseSpec{HolderIdentity: new("x"), RenewTime: &now}}, metav1.CreateOptions{}))(t)
	t.Cleanup(func() {
		testkit.Check(t, leases.Delete(context.WithoutCancel(t.Context()), plan.LBLease, metav1.DeleteOptions{}))
	})
	c.kubelet()
	testkit.Eventually(t, 20*time.Second, "the API server knows the rights", func() error {
		out, errOut, ended := c.start("--nodes=n9", "--egress=default/none")
		<-ended
		if text := out.String() + errOut.String(); !strings.Contains(text, "error: there is no node to test") {
			return errors.New(text)
		}
		return nil
	})

	text := c.wants(1, []string{
		" of AddressPool default\n", "FAILED  addresses  n2: the pod has 10.0.0.", "and no AddressBlock of the node has 10.0.0.",
		"FAILED  routes     n1 -> n2: the pod node-0 couldn't ask: exec in pod coil-selftest-", "FAILED  routes     n2 -> n1: the pod node-1 ",
		"FAILED  egress     default/" + e.Name + ", from n1: the pod egress-0 couldn't ask: ", "FAILED  policies   default/" + e.Name + ", from n1: the pod policy-0 couldn't ask: ",
		"FAILED  services   the Service: it has got no address\n", "1 check has succeeded, 6 failed, 0 skipped\n", "error: the selftest has failed\n",
	}, "--timeout=1s", "--keep-failed", "--egress="+e.Namespace+"/"+e.Name)
	_, namespace, _ := strings.Cut(text, "Namespace ")
	namespace, _, _ = strings.Cut(namespace, " ")
	kept := c.left()
	if want := []string{namespace, namespace + "/egress-0", namespace + "/host-0", namespace + "/node-0", namespace + "/node-1", namespace + "/policy-0"}; !slices.Equal(kept, want) {
		t.Errorf("there is %q, want %q", kept, want)
	}
	p := testkit.Must(c.core.CoreV1().Pods(namespace).Get(t.Context(), "policy-0", metav1.GetOptions{}))(t)
	policy := testkit.Must(c.coil.CoilV2().EgressPolicies(namespace).Get(t.Context(), "selftest", metav1.GetOptions{}))(t)
	service := testkit.Must(c.core.CoreV1().Services(namespace).Get(t.Context(), selftest.ServiceName, metav1.GetOptions{}))(t)
	selects := testkit.Must(metav1.LabelSelectorAsSelector(policy.Spec.Pods))(t)
	if !selects.Matches(labels.Set(p.Labels)) || policy.Spec.Egress.Name != e.Name || service.Spec.Selector[selftest.LabelPod] != "node-1" {
		t.Errorf("the policy is %+v, the Service %+v", policy.Spec, service.Spec)
	}
	client := testkit.Must(c.core.CoreV1().Pods(namespace).Get(t.Context(), "egress-0", metav1.GetOptions{}))(t)
	if client.Annotations["egress.coil.cybozu.com/default"] != e.Name || len(p.Annotations) > 0 {
		t.Errorf("annotations are %v, and of the pod of the policy %v", client.Annotations, p.Annotations)
	}

	// A destination outside needs no pod in the network of a node, and so no such namespace.
	text = c.wants(1, []string{"FAILED  egress     default/" + e.Name + ", from n1: "}, "--timeout=1s", "--nodes=n1", "--destination=127.0.0.9:443", "--keep-failed")
	_, text, _ = strings.Cut(text, "removed\nNamespace ")
	namespace, _, _ = strings.Cut(text, " ")
	n := testkit.Must(c.core.CoreV1().Namespaces().Get(t.Context(), namespace, metav1.GetOptions{}))(t)
	if n.Labels["pod-security.kubernetes.io/enforce"] != "restricted" {
		t.Errorf("the namespace is %+v", n.Labels)
	}
	c.wants(1, []string{"-       egress     default/" + e.Name + ": its clients reach 192.0.2.1 without its routers\n"}, "--timeout=1s", "--nodes=n2", "--destination=192.0.2.1:443")
	if all := c.left(); len(all) > 0 {
		t.Errorf("there is %q", all)
	}
}
