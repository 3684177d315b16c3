package crash

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

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

// TestMachineThatComesBack: another machine registers the name of one that runs. That one announces
// nothing and gives no address, also after coild was started again, until the Node is its own for
// a while.
func TestMachineThatComesBack(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	n := c.node(rig.NodeOptions{})
	ctx := t.Context()
	pod, late := c.pod(n), c.sandbox(n)
	register := func(id string) {
		t.Helper()
		patch := fmt.Sprintf(`{"status":{"nodeInfo":{"machineID":%q}}}`, id)
		_, err := c.Core.CoreV1().Nodes().Patch(ctx, n.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
		c.check(err)
	}
	refuses := func(why string) {
		t.Helper()
		testkit.Eventually(t, 20*time.Second, "ADD is refused, and nothing is announced", func() error {
			var e *cnitypes.Error
			if err := n.Status(ctx); !errors.As(err, &e) || !strings.Contains(err.Error(), why) {
				return fmt.Errorf("STATUS says %v", err)
			}
			table, err := n.Run(ctx, "ip", "route", "show", "table", "119")
			if err == nil && table != "" {
				err = errors.New(table)
			}
			return err
		})
		if _, err := late.Add(ctx); err == nil {
			t.Error("ADD is served")
		}
	}
	register("the-other-machine")
	refuses("another machine")
	n.Coild.Kill()
	c.check(n.Coild.Start())
	refuses("not reachable") // until there is a Node of this machine
	register(n.MachineID())
	c.check(n.AwaitReady(ctx, 2*time.Minute))
	c.works(n, pod)
	events, err := c.Core.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: "reason=OtherMachine"})
	if err != nil || len(events.Items) == 0 {
		t.Errorf("Events: %v, %v", events, err)
	}
	c.check(late.Close(), end(ctx, pod))
}
