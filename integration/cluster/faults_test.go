package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/lab/cluster"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestNoDefaultPool(t *testing.T) {
	e := use(t)
	t.Parallel()
	ns := namespaceName(t)
	e.namespace(t, ns, "")
	e.start(t, ns, "p", 1, e.Nodes()[1])
	e.event(t, ns, "p-0", time.Minute, "There is no AddressPool default")
}

func TestUnknownPool(t *testing.T) {
	e := use(t)
	t.Parallel()
	ns := namespaceName(t)
	e.namespace(t, ns, "nowhere")
	e.start(t, ns, "p", 1, e.Nodes()[1])
	e.event(t, ns, "p-0", time.Minute, "There is no AddressPool nowhere")
	// The pool is made: the pod gets its network without anybody's help.
	ipv4 := "10.70.0.0/28"
	pool := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: "nowhere"}, Spec: v2.AddressPoolSpec{
		BlockSizeBits: 2, Subnets: []v2.SubnetSet{{IPv4: &ipv4}},
	}}
	if _, err := e.coil.CoilV2().AddressPools().Create(t.Context(), pool, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.coil.CoilV2().AddressPools().Delete(context.WithoutCancel(t.Context()), "nowhere", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	pods := e.running(t, ns, 2*time.Minute)
	if got := ips(pods...); len(got) != 1 || !strings.HasPrefix(got[0], "10.70.0.") {
		t.Errorf("addresses %v, want one of the pool's single family", got)
	}
}

func TestPoolExhausted(t *testing.T) {
	e := use(t)
	t.Parallel()
	ns := e.pool(t, 1, "10.71.0.0/31", "fd00:71::/127")
	e.start(t, ns, "fits", 2, e.Nodes()[1])
	e.running(t, ns, time.Minute)
	e.start(t, ns, "late", 1, e.Nodes()[1])
	e.event(t, ns, "late-0", time.Minute, "AddressPool "+ns+" has no block left")
	testkit.Eventually(t, time.Minute, "the pool says that it is exhausted", func() error {
		p, err := e.coil.CoilV2().AddressPools().Get(t.Context(), ns, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range p.Status.Conditions {
			if c.Type == v2.PoolExhausted && c.Status == metav1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", p.Status.Conditions)
	})
	// A pod goes: the one that waits gets its address, although it hasn't cooled down.
	if err := e.core.CoreV1().Pods(ns).Delete(t.Context(), "fits-0", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 2*time.Minute, "the waiting pod runs", func() error {
		p, err := e.core.CoreV1().Pods(ns).Get(t.Context(), "late-0", metav1.GetOptions{})
		if err == nil && !isReady(p) {
			err = errors.New("it does not")
		}
		return err
	})
}

// With the controller down, pods get addresses as long as the node has some; the
// others say what to look at, and run when the controller is back.
func TestControllerDown(t *testing.T) {
	e := use(t)
	ns := e.pool(t, 1, "10.72.0.0/28", "fd00:72::/124")
	e.start(t, ns, "first", 1, e.Nodes()[1])
	e.running(t, ns, time.Minute)
	e.scaleController(t, 0)
	defer e.scaleController(t, 2)
	e.start(t, ns, "second", 1, e.Nodes()[1])
	e.running(t, ns, time.Minute)
	e.start(t, ns, "third", 1, e.Nodes()[1])
	e.event(t, ns, "third-0", time.Minute, ns, "coil-ipam-controller")
	e.scaleController(t, 2)
	e.running(t, ns, 2*time.Minute)
}

// A pod that is deleted while its ADD waits for a block leaves nothing.
func TestDeletedWhileWaiting(t *testing.T) {
	e := use(t)
	ns := e.pool(t, 0, "10.73.0.0/30", "fd00:73::/126")
	e.scaleController(t, 0)
	defer e.scaleController(t, 2)
	node := e.Nodes()[1]
	e.start(t, ns, "p", 1, node)
	testkit.Eventually(t, 30*time.Second, "the node asks for a block", func() error {
		l, err := e.coil.CoilV2().BlockRequests().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, r := range l.Items {
			if r.Spec.PoolName == ns && r.Spec.NodeName == node {
				return nil
			}
		}
		return errors.New("there is no BlockRequest")
	})
	if err := e.core.CoreV1().Pods(ns).Delete(t.Context(), "p-0", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, time.Minute, "the pod is gone", func() error {
		l, err := e.core.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{})
		if err == nil && len(l.Items) > 0 {
			err = errors.New("it is not")
		}
		return err
	})
	e.scaleController(t, 2)
	// The block that was asked for comes, is of no use, and goes back.
	testkit.Eventually(t, 3*time.Minute, "nothing is left", func() error {
		blocks, err := e.blocksOf(t, ns)
		if err != nil {
			return err
		}
		l, err := e.coil.CoilV2().BlockRequests().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		if len(blocks) > 0 || len(l.Items) > 0 {
			return fmt.Errorf("%d blocks, %d requests", len(blocks), len(l.Items))
		}
		return nil
	})
	if got := e.allocations(t, node, "namespace = '"+ns+"'"); len(got) > 0 {
		t.Errorf("recorded: %v", got)
	}
}

// scaleController sets the number of controllers, and waits until it is so.
func (e env) scaleController(t *testing.T, replicas int32) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	patch := fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas)
	if _, err := e.core.AppsV1().Deployments("kube-system").Patch(ctx, "coil-ipam-controller", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 2*time.Minute, fmt.Sprintf("%d controllers run", replicas), func() error {
		l, err := e.core.CoreV1().Pods("kube-system").List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=coil-ipam-controller"})
		if err != nil {
			return err
		}
		ready := int32(0)
		for _, p := range l.Items {
			if isReady(&p) {
				ready++
			}
		}
		if int32(len(l.Items)) != replicas || ready != replicas {
			return fmt.Errorf("%d pods, %d ready", len(l.Items), ready)
		}
		return nil
	})
}

// cni calls the plugin on a node as a container runtime does, and returns what it
// prints and how it ends.
func (e env) cni(t *testing.T, node, command, container string) (string, error) {
	t.Helper()
	conf := `{"cniVersion":"1.1.0","name":"k8s-pod-network","type":"coil","socket":"/run/coild.sock"}`
	if command == "CHECK" {
		conf = strings.TrimSuffix(conf, "}") + `,"prevResult":{"cniVersion":"1.1.0","ips":[]}}`
	}
	env := []string{
		"CNI_COMMAND=" + command, "CNI_CONTAINERID=" + container, "CNI_IFNAME=eth0", "CNI_PATH=/opt/cni/bin",
		"CNI_NETNS=/run/netns/" + container, "CNI_ARGS='K8S_POD_NAMESPACE=" + namespaceName(t) + ";K8S_POD_NAME=" + container + "'",
	}
	script := fmt.Sprintf("echo '%s' | %s /opt/cni/bin/coil", conf, strings.Join(env, " "))
	out, err := e.Exec(t.Context(), node, "sh", "-c", script)
	return string(out), err
}

// With the API server down, ADD works as long as the node has free addresses.
func TestAPIServerDown(t *testing.T) {
	e := use(t)
	ns := e.pool(t, 3, "10.74.0.0/28", "fd00:74::/124")
	node := e.Nodes()[1]
	e.start(t, ns, "p", 1, node)
	e.running(t, ns, time.Minute)
	// The direct call is for a pod that coild knows, in a sandbox of its own.
	e.start(t, ns, "direct", 1, node)
	e.running(t, ns, time.Minute)

	if err := e.Stop(t.Context(), cluster.Fabric, "kube-apiserver"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := e.Start(context.WithoutCancel(t.Context()), cluster.Fabric, "kube-apiserver"); err != nil {
			t.Error(err)
		}
		testkit.Eventually(t, time.Minute, "the API server is back", func() error {
			_, err := e.core.CoreV1().Nodes().List(context.WithoutCancel(t.Context()), metav1.ListOptions{})
			return err
		})
	}()
	const container = "direct-0"
	if _, err := e.Exec(t.Context(), node, "ip", "netns", "add", container); err != nil {
		t.Fatal(err)
	}
	defer e.Exec(context.WithoutCancel(t.Context()), node, "ip", "netns", "delete", container)
	out, err := e.cni(t, node, "ADD", container)
	if err != nil {
		t.Fatalf("ADD: %v\n%s", err, out)
	}
	var result struct {
		IPs []struct{ Address string }
	}
	if err := json.Unmarshal([]byte(out), &result); err != nil || len(result.IPs) != 2 {
		t.Errorf("result %s: %v", out, err)
	}
	if out, err := e.cni(t, node, "STATUS", container); err != nil {
		t.Errorf("STATUS: %v\n%s", err, out)
	}
	if out, err := e.cni(t, node, "DEL", container); err != nil {
		t.Errorf("DEL: %v\n%s", err, out)
	}
}

// With coild down, the plugin answers at once: ADD and CHECK "try again later",
// STATUS "not available", and DEL succeeds and is done when coild is back.
func TestCoildDown(t *testing.T) {
	e := use(t)
	ns := e.pool(t, 3, "10.75.0.0/28", "fd00:75::/124")
	node := e.Nodes()[1]
	const container = "direct-0"
	e.start(t, ns, "direct", 1, node)
	e.running(t, ns, time.Minute)
	if _, err := e.Exec(t.Context(), node, "ip", "netns", "add", container); err != nil {
		t.Fatal(err)
	}
	defer e.Exec(context.WithoutCancel(t.Context()), node, "ip", "netns", "delete", container)
	if out, err := e.cni(t, node, "ADD", container); err != nil {
		t.Fatalf("ADD: %v\n%s", err, out)
	}
	inUse := len(e.allocations(t, node, "container = '"+container+"'"))
	if inUse != 1 {
		t.Fatalf("%d records of the container", inUse)
	}

	e.withoutCoild(t, node, func() {
		for command, code := range map[string]int{"ADD": 11, "CHECK": 11, "STATUS": 50} {
			start := time.Now()
			out, err := e.cni(t, node, command, "other")
			var e struct {
				Code         int
				Msg, Details string
			}
			if json.Unmarshal([]byte(out), &e); err == nil || e.Code != code || !strings.Contains(e.Msg+e.Details, "coild") {
				t.Errorf("%s: %v, %s; want code %d and words about coild", command, err, out, code)
			}
			// kubelet waits for minutes. The plugin itself is given a second, a busy machine more to start it.
			if took := time.Since(start); took > testkit.Timeout(10*time.Second) {
				t.Errorf("%s took %s, want about a second", command, took)
			}
		}
		if out, err := e.cni(t, node, "DEL", container); err != nil {
			t.Errorf("DEL: %v\n%s", err, out)
		}
	})
	testkit.Eventually(t, time.Minute, "the queued DEL is done", func() error {
		if got := e.allocations(t, node, "container = '"+container+"'"); len(got) > 0 {
			return fmt.Errorf("recorded: %v", got)
		}
		out, err := e.Exec(t.Context(), node, "ls", "/var/lib/coil/del-queue")
		if err == nil && len(out) > 0 {
			err = fmt.Errorf("queued: %s", out)
		}
		return err
	})
}

// withoutCoild runs f while no coild runs on a node.
func (e env) withoutCoild(t *testing.T, node string, f func()) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	label := func(value string) {
		patch := fmt.Appendf(nil, `{"spec":{"template":{"spec":{"affinity":%s}}}}`, value)
		if _, err := e.core.AppsV1().DaemonSets("kube-system").Patch(ctx, "coild", types.StrategicMergePatchType, patch, metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	label(`{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"kubernetes.io/hostname","operator":"NotIn","values":["` + node + `"]}]}]}}}`)
	defer func() {
		label("null")
		testkit.Eventually(t, 2*time.Minute, "coild is back on every node", func() error {
			ds, err := e.core.AppsV1().DaemonSets("kube-system").Get(ctx, "coild", metav1.GetOptions{})
			if err != nil {
				return err
			}
			if s := ds.Status; s.ObservedGeneration != ds.Generation || s.UpdatedNumberScheduled != 3 || s.NumberReady != 3 {
				return fmt.Errorf("status %+v", s)
			}
			return nil
		})
	}()
	testkit.Eventually(t, time.Minute, "coild is away", func() error {
		l, err := e.core.CoreV1().Pods("kube-system").List(ctx, metav1.ListOptions{
			LabelSelector: "app.kubernetes.io/component=coild", FieldSelector: "spec.nodeName=" + node,
		})
		if err == nil && len(l.Items) > 0 {
			err = errors.New("it is not")
		}
		return err
	})
	f()
}
