package cluster

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/testkit"
)

// A pool drains: a pod that is started with it is told so, though its node has free addresses of it. The pods of a Deployment with a budget move to another pool, and the
// pool is empty.
func TestPoolDrains(t *testing.T) {
	e := use(t)
	t.Parallel()
	ns := e.pool(t, 3, "10.78.0.0/24", "fd00:78::/120")
	next := netip.MustParsePrefix("10.79.0.0/24")
	p := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: ns + "-next"}, Spec: v2.AddressPoolSpec{
		BlockSizeBits: 3, Subnets: []v2.SubnetSet{{IPv4: new(next.String()), IPv6: new("fd00:79::/120")}}, Exclude: []string{"10.79.0.0-10.79.0.7"},
	}}
	testkit.Must(e.coil.CoilV2().AddressPools().Create(t.Context(), p, metav1.CreateOptions{}))(t)
	t.Cleanup(func() {
		testkit.Check(t, e.coil.CoilV2().AddressPools().Delete(context.WithoutCancel(t.Context()), p.Name, metav1.DeleteOptions{}))
	})

	labels := map[string]string{"app": "web"}
	pod := corev1.PodSpec{TerminationGracePeriodSeconds: new(int64(0)), AutomountServiceAccountToken: new(false),
		Containers: []corev1.Container{{Name: "main", Image: tools, ImagePullPolicy: corev1.PullNever, Command: []string{"sleep", "86400"}}}}
	web := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: ns}, Spec: appsv1.DeploymentSpec{
		Replicas: new(int32(4)), Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: pod},
	}}
	testkit.Must(e.core.AppsV1().Deployments(ns).Create(t.Context(), web, metav1.CreateOptions{}))(t)
	budget := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: ns}, Spec: policyv1.PodDisruptionBudgetSpec{
		MinAvailable: new(intstr.FromInt32(3)), Selector: &metav1.LabelSelector{MatchLabels: labels}}}
	testkit.Must(e.core.PolicyV1().PodDisruptionBudgets(ns).Create(t.Context(), budget, metav1.CreateOptions{}))(t)
	var before []corev1.Pod
	testkit.Eventually(t, 2*time.Minute, "the Deployment has its pods", func() error {
		if before = e.running(t, ns, 2*time.Minute); len(before) != 4 {
			return fmt.Errorf("%d pods run", len(before))
		}
		return nil
	})

	drain := func(args ...string) (int, string) {
		var out bytes.Buffer
		code := coilctl.Main(append([]string{"coilctl", "--kubeconfig=" + e.Kubeconfig(), "pools", "drain", ns}, args...), strings.NewReader(""), &out, &out)
		return code, out.String()
	}
	if code, out := drain("--yes"); code != 0 || !strings.HasSuffix(out, "AddressPool "+ns+" gives nothing new\n") {
		t.Fatalf("exit code %d, %s", code, out)
	}
	testkit.Eventually(t, time.Minute, "all blocks are closed", func() error {
		blocks, err := e.blocksOf(t, ns)
		if i := slices.IndexFunc(blocks, func(b v2.AddressBlock) bool { return b.Labels[v2.LabelClosed] != v2.ClosedDrain }); err == nil && i >= 0 {
			err = fmt.Errorf("%s isn't: %v", blocks[i].Name, blocks[i].Labels)
		}
		return err
	})
	e.start(t, ns, "late", 1, before[0].Spec.NodeName)
	e.event(t, ns, "late-0", time.Minute, "AddressPool "+ns+" drains and gives nothing new (spec.drain)", "choose another one by the annotation coil.cybozu.com/pool")
	if code, out := drain("--follow", "--yes"); code != 1 || !strings.Contains(out, "its namespace still names the pool") || strings.Contains(out, "Moved ") {
		t.Errorf("pods whose successors can't start: exit code %d, %s", code, out)
	}

	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, v2.AnnotationPool, p.Name)
	testkit.Must(e.core.CoreV1().Namespaces().Patch(t.Context(), ns, types.MergePatchType, []byte(patch), metav1.PatchOptions{}))(t)
	testkit.Eventually(t, 2*time.Minute, "the pod that waited runs", func() error {
		late, err := e.core.CoreV1().Pods(ns).Get(t.Context(), "late-0", metav1.GetOptions{})
		if err == nil && !isReady(late) {
			err = fmt.Errorf("its status is %+v", late.Status)
		}
		return err
	})
	code, out := drain("--follow", "--yes", "--parallel=4")
	if code != 0 || !strings.HasSuffix(out, "AddressPool "+ns+" is drained; 4 pods were moved\n") {
		t.Errorf("exit code %d, %s", code, out)
	}
	t.Logf("coilctl pools drain:\n%s", out)
	for _, now := range e.running(t, ns, 2*time.Minute) {
		addr := netip.MustParseAddr(now.Status.PodIP)
		if !next.Contains(addr) || netip.MustParsePrefix("10.79.0.0/29").Contains(addr) {
			t.Errorf("pod %s has %s, want an address of the other pool that isn't excluded", now.Name, addr)
		}
	}
	pool := testkit.Must(e.coil.CoilV2().AddressPools().Get(t.Context(), ns, metav1.GetOptions{}))(t)
	if !meta.IsStatusConditionTrue(pool.Status.Conditions, v2.PoolDrained) || pool.Status.Blocks.Used != 0 {
		t.Errorf("the pool says %+v", pool.Status)
	}
}
