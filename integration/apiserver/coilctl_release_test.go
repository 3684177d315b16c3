package apiserver

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/testkit"
)

// A block of a node is taken when the machine is said to be off and no pod has an address of it, and not before.
func TestCoilctlRelease(t *testing.T) {
	c := ipamCluster(t)
	kubeconfig := writeKubeconfig(t, c.admin)
	c.pool(t, "blue", 2, v4("10.0.0.0/28"))
	node := c.node(t, "n1")
	block := testkit.Must(c.coil.CoilV2().AddressBlocks().Create(t.Context(), &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{Name: "blue-0", Labels: map[string]string{v2.LabelPool: "blue", v2.LabelNode: node.Name}, Finalizers: []string{v2.Finalizer}},
		IPv4:       new("10.0.0.0/30"),
	}, metav1.CreateOptions{}))(t)
	release := func(code int, says string) {
		t.Helper()
		var o output
		got := coilctl.Main([]string{"coilctl", "--kubeconfig=" + kubeconfig, "blocks", "release", block.Name, "--force", "--yes"}, strings.NewReader(""), &o, &o)
		if text := o.String(); got != code || !strings.Contains(text, says) {
			t.Fatalf("exit code %d, want %d and %q:\n%s", got, code, says, text)
		}
	}
	release(1, "and no coild runs on it\nIt isn't taken: turn the machine off")
	namespace := c.namespaceOf(t, "shop", "blue")
	c.runningPod(t, namespace, "web", "web", node.Name, "10.0.0.1")
	node = testkit.Must(c.core.CoreV1().Nodes().Get(t.Context(), node.Name, metav1.GetOptions{}))(t)
	node.Spec.Taints = append(node.Spec.Taints, corev1.Taint{Key: corev1.TaintNodeOutOfService, Value: "nodeshutdown", Effect: corev1.TaintEffectNoExecute})
	testkit.Must(c.core.CoreV1().Nodes().Update(t.Context(), node, metav1.UpdateOptions{}))(t)
	release(1, "Pod "+namespace+"/web of node n1 has 10.0.0.1\nIt isn't taken: 1 pods have addresses of it")
	testkit.Check(t, c.core.CoreV1().Pods(namespace).Delete(t.Context(), "web", *metav1.NewDeleteOptions(0)))
	release(0, "AddressBlock blue-0 is taken from node n1")
	if _, err := c.coil.CoilV2().AddressBlocks().Get(t.Context(), block.Name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the block is still there: %v", err)
	}
}
