package crash

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// TestReplacedMachine: a new machine has the name of one that lost the API server, whose pods
// still run. It takes nothing from that one's blocks, which coil-ipam-controller frees.
func TestReplacedMachine(t *testing.T) {
	c := newCluster(t, 2)
	n := c.node(rig.NodeOptions{})
	ctx := t.Context()
	pods := c.podsOf(n, 5)
	blocks := func() map[string]v2.AddressBlock {
		t.Helper()
		list, err := c.Coil.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{LabelSelector: v2.LabelNode + "=" + n.Name})
		if err != nil {
			t.Fatal(err)
		}
		all := map[string]v2.AddressBlock{}
		for _, b := range list.Items {
			all[b.Name] = b
		}
		return all
	}
	before := blocks()
	if len(before) < 2 {
		t.Fatalf("the node has blocks %v", before)
	}
	c.check(n.PowerCut(ctx), n.DeleteObject(ctx), n.CreateObject(ctx))
	state, err := filepath.Glob(n.StateDir() + "/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range state {
		c.check(os.RemoveAll(f))
	}
	c.check(n.PowerOn(ctx), n.Start(ctx))
	for _, s := range pods {
		c.check(s.Close())
	}
	c.podsOf(n, 3)
	after := blocks()
	for name, b := range after {
		_, old := before[name]
		if uid := b.Annotations[v2.AnnotationDisowned]; old && uid != string(n.UID()) || !old && uid != "" {
			t.Errorf("block %s, of the machine before: %t: it is disowned by %q", name, old, uid)
		}
	}
	exported := func() error {
		for name, b := range after {
			_, old := before[name]
			_, err := n.Run(ctx, "bash", "-c", fmt.Sprintf("ip route show table 119 | grep -q '^%s '", *b.IPv4))
			if old != (err != nil) {
				return fmt.Errorf("block %s, of the machine before: %t, is exported: %t", name, old, err == nil)
			}
		}
		return nil
	}
	testkit.Eventually(t, 10*time.Second, "only its own blocks are exported", exported)
	n.Coild.Stop()
	c.check(n.Start(ctx))
	c.podsOf(n, 1)
	if again := blocks(); len(again) < len(after) {
		t.Errorf("blocks are gone: %v", slices.Sorted(maps.Keys(again)))
	}
	c.check(exported())
}
