package manifests

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/integration/lab/cluster"
	"github.com/coil-net/coil/integration/lab/image"
	"github.com/coil-net/coil/pkg/testkit"
)

const egressCluster = "egressonly"

// egressAnnotation asks for an Egress that nobody has made.
var egressAnnotation = map[string]string{"egress.coil.cybozu.com/internet": "nat"}

// TestEgressOnly puts Coil behind another network as README.md says, with the rights that the
// variant gives: pods have the other network's addresses, and coild is asked about each.
func TestEgressOnly(t *testing.T) {
	testkit.Need(t, testkit.Cluster)
	t.Parallel() // each cluster waits for its programs most of the time
	ctx := t.Context()
	down := func() {
		if err := cluster.Down(context.WithoutCancel(ctx), "", egressCluster); err != nil {
			t.Errorf("remove the cluster: %v", err)
		}
	}
	down() // what a killed run left
	t.Cleanup(down)
	opts := cluster.Options{
		Name: egressCluster, Nodes: 1, ReferenceCNI: true, Log: t.Output(),
		Kustomize: []string{filepath.Join(manifestsDir(t), "variants/egress-only")},
	}
	if err := opts.AddCoil(ctx); err != nil {
		t.Fatal(err)
	}
	c, err := cluster.Up(ctx, opts)
	if err != nil {
		t.Fatal(err)
	}
	// Its replicas use ports of the node: there is place for one.
	if out, err := c.Kubectl(ctx, "-n", namespace, "scale", "deployment/coil-egress-controller", "--replicas=1"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := c.WaitWorkloads(ctx, namespace); err != nil {
		t.Fatal(err)
	}
	addCoilToReference(t, c)
	client := kubernetes.NewForConfigOrDie(c.RESTConfig()).CoreV1()

	// The runtime reads the changed list a moment later: pods that it starts before don't count.
	asks := 0
	startPod(t, c, "asks-0", egressAnnotation)
	testkit.Eventually(t, time.Minute, "coild refuses a pod whose Egress doesn't exist", func() error {
		name := fmt.Sprint("asks-", asks)
		p, err := client.Pods("default").Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if p.Status.Phase == corev1.PodRunning {
			asks++
			startPod(t, c, fmt.Sprint("asks-", asks), egressAnnotation)
			return fmt.Errorf("%s was started without asking coild", name)
		}
		events, err := client.Events("default").List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + name})
		if err != nil {
			return err
		}
		var seen []string
		for _, e := range events.Items {
			if strings.Contains(e.Message, `plugin type="coil"`) && strings.Contains(e.Message, "internet/nat") {
				return nil
			}
			seen = append(seen, e.Message)
		}
		return fmt.Errorf("events of %s: %q", name, seen)
	})

	startPod(t, c, "plain", nil)
	testkit.Eventually(t, time.Minute, "a pod without egress has an address of the other network", func() error {
		p, err := client.Pods("default").Get(ctx, "plain", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if p.Status.Phase != corev1.PodRunning || !strings.HasPrefix(p.Status.PodIP, "10.244.") {
			return fmt.Errorf("phase %s, address %q", p.Status.Phase, p.Status.PodIP)
		}
		return nil
	})

	out, err := c.Kubectl(ctx, "-n", namespace, "logs", "daemonset/coild", "--all-containers")
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(out, []byte("forbidden")) {
		t.Errorf("coild lacks a right:\n%s", out)
	}
}

// addCoilToReference appends Coil to the other network's configuration list.
func addCoilToReference(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	const path = "/etc/cni/net.d/20-reference.conflist"
	node := c.Nodes()[0]
	out, err := c.Exec(t.Context(), node, "cat", path)
	if err != nil {
		t.Fatal(err)
	}
	var list map[string]any
	if err := json.Unmarshal(out, &list); err != nil {
		t.Fatal(err)
	}
	list["plugins"] = append(list["plugins"].([]any), map[string]string{"type": "coil", "socket": "/run/coild.sock"})
	if out, err = json.Marshal(list); err != nil {
		t.Fatal(err)
	}
	cmd, err := c.Command(t.Context(), node, "sh", "-c", "cat >$0.new && mv $0.new $0", path)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin = bytes.NewReader(out)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func startPod(t *testing.T, c *cluster.Cluster, name string, annotations map[string]string) {
	t.Helper()
	grace := int64(0)
	_, err := kubernetes.NewForConfigOrDie(c.RESTConfig()).CoreV1().Pods("default").Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &grace,
			Tolerations:                   []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			Containers: []corev1.Container{{
				Name: "c", Image: image.Tools, ImagePullPolicy: corev1.PullNever, Command: []string{"sleep", "infinity"},
			}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}
