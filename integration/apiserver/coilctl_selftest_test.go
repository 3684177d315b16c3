package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/coilctl"
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
	user := fresh("tester")
	c.kubeconfig = writeKubeconfig(t, testkit.Must(c.api.UserConfig(user))(t))
	rule := func(group, verbs string, resources ...string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{group}, Verbs: strings.Fields(verbs), Resources: resources}
	}
	testkit.Must(c.core.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: user}, Rules: []rbacv1.PolicyRule{
		rule("", "list create get delete", "namespaces", "pods"), rule("", "list", "nodes"), rule("", "create", "serviceaccounts"), rule("apps", "list", "daemonsets"),
		rule("", "get create", "pods/exec"), rule(v2.GroupVersion.Group, "get", "addresspools"), rule(v2.GroupVersion.Group, "list", "addressblocks"),
	}}, metav1.CreateOptions{}))(t)
	testkit.Must(c.core.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: user}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: user},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	}, metav1.CreateOptions{}))(t)
	return c
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

// start runs the command.
func (c *selftester) start(args ...string) (out, errOut *output, ended chan int) {
	out, errOut, ended = &output{}, &output{}, make(chan int, 1)
	go func() {
		ended <- coilctl.Main(append([]string{"coilctl", "--kubeconfig=" + c.kubeconfig, "selftest"}, args...), strings.NewReader(""), out, errOut)
	}()
	return out, errOut, ended
}

// wants runs the command, and wants its exit code and texts in what it prints.
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
		"--pool=blue", "--timeout=1s", "--nodes=n1,n9", "--keep-failed")
	kept := c.left()
	if len(kept) != 3 {
		t.Fatalf("there is %q, want a namespace and two pods", kept)
	}
	text := c.wants(1, []string{"Namespace " + kept[0] + " of an earlier selftest is removed\n"}, "--pool=blue", "--timeout=1s", "--image=localhost/other:1", "-o", "json")
	var report selftest.Report
	if err := json.Unmarshal([]byte(text), &report); err != nil || report.Image != "localhost/other:1" || report.Count(selftest.Wrong) != 2 || !strings.HasPrefix(report.Namespace, selftest.Prefix) {
		t.Errorf("the report is %+v, %v", report, err)
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
	if code := <-ended; code != 1 || errOut.String() != "error: interrupted\n" {
		t.Errorf("exit code %d, %s%s", code, out, errOut)
	}
	if all := c.left(); len(all) > 0 {
		t.Errorf("there is %q", all)
	}
}
