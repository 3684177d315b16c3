package apiserver

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/testkit"
)

// output is what a command prints while it runs.
type output struct{ testkit.Buffer }

// prints waits until a command has printed some words.
func (o *output) prints(t *testing.T, words string) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("it prints %q", words), func() error {
		if text := o.String(); !strings.Contains(text, words) {
			return fmt.Errorf("it printed %q", text)
		}
		return nil
	})
}

// runningPod makes a pod of a ReplicaSet that runs and has an address. Nothing has to stop its containers.
func (c *cluster) runningPod(t *testing.T, namespace, name, app, node, ip string) *corev1.Pod {
	t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace, Labels: map[string]string{"app": app},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: app, UID: "uid", Controller: new(true)}}},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "i"}}, AutomountServiceAccountToken: new(false), TerminationGracePeriodSeconds: new(int64(0))},
	}
	if app == "" {
		p.OwnerReferences = nil
	}
	pods := c.core.CoreV1().Pods(namespace)
	p = testkit.Must(pods.Create(t.Context(), p, metav1.CreateOptions{}))(t)
	t.Cleanup(func() {
		if err := pods.Delete(context.WithoutCancel(t.Context()), name, *metav1.NewDeleteOptions(0)); err != nil && !apierrors.IsNotFound(err) {
			t.Error(err)
		}
	})
	p.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
	return testkit.Must(pods.UpdateStatus(t.Context(), p, metav1.UpdateOptions{}))(t)
}

// namespaceOf makes a namespace whose pods get addresses of a pool.
func (c *cluster) namespaceOf(t *testing.T, prefix, pool string) string {
	t.Helper()
	n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fresh(prefix), Annotations: map[string]string{v2.AnnotationPool: pool}}}
	return testkit.Must(c.core.CoreV1().Namespaces().Create(t.Context(), n, metav1.CreateOptions{}))(t).Name
}

// allow has a PodDisruptionBudget allow so many evictions, as its controller does.
func (c *cluster) allow(t *testing.T, namespace, name string, n int32) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, "the status of the budget is written", func() error {
		b, err := c.core.PolicyV1().PodDisruptionBudgets(namespace).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		b.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: b.Generation, DisruptionsAllowed: n, CurrentHealthy: 2, DesiredHealthy: 2 - n, ExpectedPods: 2}
		_, err = c.core.PolicyV1().PodDisruptionBudgets(namespace).UpdateStatus(t.Context(), b, metav1.UpdateOptions{})
		return err
	})
}

// coilctl pools forecast has none of pools that were made just now, and tells what is free.
func TestCoilctlForecast(t *testing.T) {
	c := ipamCluster(t)
	c.run(t, c.serviceAccount(t), options())
	kubeconfig := writeKubeconfig(t, c.admin)
	c.pool(t, "blue", 2, v4("10.0.0.0/28"))
	c.pool(t, "red", 0, v4("10.1.0.0/24"))
	c.ask(t, "r", c.node(t, "n1"), "blue")
	c.answer(t, "r")
	testkit.Eventually(t, 20*time.Second, "the API server's cache has the block", func() error {
		var o output
		code := coilctl.Main([]string{"coilctl", "--kubeconfig=" + kubeconfig, "pools", "forecast", "red", "blue"}, strings.NewReader(""), &o, &o)
		for _, want := range []string{"NAME   FREE BLOCKS   TAKEN     FULL NOT BEFORE\n", "\nred    256           0 in ", "\nblue   3             1 in "} {
			if code != 0 || !strings.Contains(o.String(), want) || strings.Count(o.String(), "   -\n") != 2 {
				return fmt.Errorf("exit code %d, %s", code, &o)
			}
		}
		return nil
	})
}

// coilctl pools drain shows what has addresses of a pool, moves pods within their budgets, leaves those that it can't move, can be interrupted, and
// goes on until the pool is drained.
func TestCoilctlDrain(t *testing.T) {
	c := ipamCluster(t)
	c.run(t, c.serviceAccount(t), options())
	kubeconfig := writeKubeconfig(t, c.admin)
	start := func(in string, args ...string) (o *output, ended chan int) {
		o, ended = &output{}, make(chan int, 1)
		go func() {
			ended <- coilctl.Main(append([]string{"coilctl", "--kubeconfig=" + kubeconfig, "pools", "drain"}, args...), strings.NewReader(in), o, o)
		}()
		return o, ended
	}
	wants := func(code int, want, in string, args ...string) {
		t.Helper()
		o, ended := start(in, args...)
		if got := <-ended; got != code {
			t.Errorf("coilctl pools drain %s: exit code %d, want %d", strings.Join(args, " "), got, code)
		}
		if diff := cmp.Diff(want, o.String()); diff != "" {
			t.Errorf("coilctl pools drain %s (-want +got):\n%s", strings.Join(args, " "), diff)
		}
	}
	drains := func(want bool) {
		t.Helper()
		if p := testkit.Must(c.coil.CoilV2().AddressPools().Get(t.Context(), "blue", metav1.GetOptions{}))(t); p.Spec.Drain != want {
			t.Errorf("spec.drain is %t", p.Spec.Drain)
		}
	}
	c.pool(t, "blue", 2, v4("10.0.0.0/28"))
	for i, n := range []string{"n1", "n2"} {
		c.ask(t, "r-"+n, c.node(t, n), "blue")
		if r := c.answer(t, "r-"+n); r.Status.AddressBlockName != fmt.Sprint("blue-", i) {
			t.Fatalf("node %s got %+v", n, r.Status)
		}
	}
	shop, left := c.namespaceOf(t, "a-shop", "red"), c.namespaceOf(t, "b-shop", "blue")
	c.runningPod(t, shop, "db", "db", "n1", "10.0.0.0")
	c.runningPod(t, shop, "web-1", "web", "n1", "10.0.0.1")
	c.runningPod(t, shop, "web-2", "web", "n2", "10.0.0.4")
	c.runningPod(t, shop, "bare", "", "n2", "10.0.0.5")
	c.runningPod(t, left, "old", "old", "n2", "10.0.0.6")
	c.runningPod(t, shop, "moved", "db", "n2", "10.9.0.1")
	budget := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: shop}, Spec: policyv1.PodDisruptionBudgetSpec{
		MinAvailable: new(intstr.FromInt32(2)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}}}
	testkit.Must(c.core.PolicyV1().PodDisruptionBudgets(shop).Create(t.Context(), budget, metav1.CreateOptions{}))(t)
	c.allow(t, shop, "web", 0)

	names := "stays: its namespace still names the pool, so its successor wouldn't start: name another one in the annotation coil.cybozu.com/pool of Namespace " + left
	bare := "stays: it has no controller, so nobody makes it again: delete it, or use --force"
	pad := func(s string) string { return fmt.Sprintf("%-*s", max(len(shop), len(left), len("NAMESPACE")), s) }
	plan := "NODE   " + pad("NAMESPACE") + "   POD     ADDRESS    ACTION\n" +
		"n1     " + pad(shop) + "   db      10.0.0.0   evict\n" +
		"n1     " + pad(shop) + "   web-1   10.0.0.1   evict\n" +
		"n2     " + pad(shop) + "   bare    10.0.0.5   " + bare + "\n" +
		"n2     " + pad(shop) + "   web-2   10.0.0.4   evict\n" +
		"n2     " + pad(left) + "   old     10.0.0.6   " + names + "\n\n" +
		"AddressPool blue: 5 pods have addresses of it, in 2 blocks on 2 nodes\n" +
		"New pods won't start in 1 namespace that names the pool: " + left + ". Name another one in the annotation coil.cybozu.com/pool first.\n"
	wants(0, plan, "", "blue", "--dry-run")
	wants(1, plan+"Have AddressPool blue give nothing new, and evict 3 pods? [y/N] error: nothing was changed: answer y, or use --yes\n", "no\n", "blue", "--follow")
	wants(1, "error: there is no AddressPool red\n", "", "red")
	wants(1, "error: --parallel can't be 0: it must be 1 or more\n", "", "blue", "--parallel=0")
	wants(0, "AddressPool blue doesn't drain\n", "", "blue", "--undo")
	drains(false)

	// A budget stands in the way of two pods; the third one moves. Somebody interrupts the command.
	o, ended := start("y\n", "blue", "--follow")
	o.prints(t, "Moved "+shop+"/db from node n1, 1 of 3\n")
	o.prints(t, "Pod "+shop+"/web-1 of node n1 waits: Cannot evict pod as it would violate the pod's disruption budget.\n")
	o.prints(t, "Pod "+shop+"/web-2 of node n2 waits: ")
	if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code := <-ended; code != 1 || !strings.HasSuffix(o.String(), "error: interrupted: AddressPool blue still drains. The same command goes on, and --undo ends that\n") {
		t.Errorf("exit code %d, %s", code, o)
	}
	if n := strings.Count(o.String(), "waits: "); n != 2 {
		t.Errorf("what a budget says is told %d times, want once for each pod:\n%s", n, o)
	}
	drains(true)

	// The budget allows one after the other. The command ends when it can't move the rest.
	o, ended = start("", "blue", "--follow", "--yes", "--parallel=2")
	o.prints(t, "web-1 of node n1 waits: ")
	c.allow(t, shop, "web", 1)
	o.prints(t, ", 1 of 2\n")
	c.allow(t, shop, "web", 1)
	if code := <-ended; code != 1 || !strings.HasSuffix(o.String(), ", 2 of 2\n"+
		"Pod "+shop+"/bare of node n2 "+bare+"\nPod "+left+"/old of node n2 "+names+"\n"+
		"AddressPool blue isn't drained; 2 pods were moved\nerror: the pool isn't drained\n") {
		t.Errorf("exit code %d, %s", code, o)
	}
	if err := c.drop(t.Context(), c.block(t, "blue-0")); err != nil { // its coild: no pod has an address of it
		t.Fatal(err)
	}

	// The namespace names another pool now, and the pod without a controller may go.
	ns := testkit.Must(c.core.CoreV1().Namespaces().Get(t.Context(), left, metav1.GetOptions{}))(t)
	ns.Annotations[v2.AnnotationPool] = "red"
	testkit.Must(c.core.CoreV1().Namespaces().Update(t.Context(), ns, metav1.UpdateOptions{}))(t)
	testkit.Eventually(t, 20*time.Second, "the API server's cache has the annotation", func() error {
		o, ended := start("", "blue", "--dry-run", "--force")
		if <-ended; strings.Contains(o.String(), "stays") {
			return fmt.Errorf("it prints %s", o)
		}
		return nil
	})
	o, ended = start("", "blue", "--follow", "--yes", "--force")
	o.prints(t, "Moved "+left+"/old from node n2, 2 of 2\n")
	o.prints(t, "Waits: 0 addresses are in use on 1 node, and 0 more cool down; 1 block is held by n2")
	if err := c.drop(t.Context(), c.block(t, "blue-1")); err != nil {
		t.Fatal(err)
	}
	if code := <-ended; code != 0 || !strings.HasSuffix(o.String(), "AddressPool blue is drained; 2 pods were moved\n") {
		t.Errorf("exit code %d, %s", code, o)
	}
	wants(0, "AddressPool blue would give addresses again\n", "", "blue", "--undo", "--dry-run")
	drains(true)
	wants(0, "AddressPool blue gives addresses again\n", "", "blue", "--undo")
	drains(false)
	if _, err := c.core.CoreV1().Pods(shop).Get(t.Context(), "moved", metav1.GetOptions{}); err != nil {
		t.Errorf("a pod with an address of another pool: %v", err)
	}
}
