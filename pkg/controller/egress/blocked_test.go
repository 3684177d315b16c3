package egress

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
)

// A Node that is gone drops no packets of an address any more. One that is there says so itself.
func TestBlockedNodeGoes(t *testing.T) {
	f := newFixture(t)
	f.coil.PrependReactor("patch", "addressblocks", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, nil })
	f.withAddresses(t, "partners")
	nodes := f.cfg.Cluster.Core().V1().Nodes().Informer().GetIndexer()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	f.put(t, nodes, node)
	rival := metav1.Condition{Type: v2.BlockConflicting, Status: metav1.ConditionTrue, Message: plan.AtNode("a") + "a rival"}
	for name, c := range map[string]metav1.ConditionStatus{"partners-0": metav1.ConditionTrue, "partners-1": metav1.ConditionFalse} {
		b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "block", ResourceVersion: "7"}, Floating: &v2.Floating{
			Owner: v2.FloatingOwner{Kind: "Egress", Namespace: nat.Namespace, Name: nat.Name, UID: "uid"},
		}}
		b.Status.Conditions = []metav1.Condition{rival, {Type: v2.BlockForwardingBlocked, Status: c, Message: plan.AtNode("a") + "dropped"}}
		f.put(t, f.cfg.Floating.Blocks.GetIndexer(), b)
	}
	places := func() {
		t.Helper()
		if err := f.syncPlaces(t.Context(), nat); err != nil {
			t.Fatal(err)
		}
	}
	places()
	expect(t, f.patched("addressblocks"))
	if err := nodes.Delete(node); err != nil {
		t.Fatal(err)
	}
	places()
	expect(t, f.patched("addressblocks"), []string{"patch partners-0 ", `"resourceVersion":"7"`, `"status":"False"`, `node a: the Node is gone`, `node a: a rival`})
}
