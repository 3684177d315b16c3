package apiserver

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// made returns a block that a test makes by hand: its node is known by name only.
func made(pool, node string, index int32, ipv4 string) *v2.AddressBlock {
	return &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("%s-%d", pool, index), Finalizers: []string{v2.Finalizer},
			Labels: map[string]string{v2.LabelPool: pool, v2.LabelNode: node},
		},
		Index: index, IPv4: &ipv4,
	}
}

func (c *cluster) deleteNode(t *testing.T, name string) {
	t.Helper()
	if err := c.core.CoreV1().Nodes().Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
}

// gone says whether a block of the name is there.
func (c *cluster) gone(ctx context.Context, block string) error {
	b, err := c.coil.CoilV2().AddressBlocks().Get(ctx, block, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("block %s is there, deleted at %v, with finalizers %q", block, b.DeletionTimestamp, b.Finalizers)
}

func (c *cluster) requireDeleting(t *testing.T, block string) {
	t.Helper()
	testkit.Eventually(t, 10*time.Second, "deletion of "+block, func() error {
		b, err := c.coil.CoilV2().AddressBlocks().Get(t.Context(), block, metav1.GetOptions{})
		if err == nil && b.DeletionTimestamp == nil {
			err = errors.New("it has no deletionTimestamp")
		}
		return err
	})
}

func TestControllerFreesBlocksOfLostNodes(t *testing.T) {
	const quarantine = 4 * time.Second
	c := ipamCluster(t)
	c.pool(t, "default", 0, v4("10.20.0.0/29"))
	lost, kept := c.node(t, "lost"), c.node(t, "kept")
	blocks := c.coil.CoilV2().AddressBlocks()
	reserved := made("default", "lost", 5, "10.20.0.5/32")
	reserved.Labels[v2.LabelReserved] = v2.ReservedValue
	noFinalizer := made("default", "lost", 6, "10.20.0.6/32")
	noFinalizer.Finalizers = nil
	noLabels := made("default", "", 7, "10.20.0.7/32")
	noLabels.Labels = nil
	for _, b := range []*v2.AddressBlock{
		made("default", "lost", 3, "10.20.0.3/32"), // of Coil 2.x
		made("default", "kept", 4, "10.20.0.4/32"), // of Coil 2.x
		reserved, noFinalizer, noLabels,
	} {
		testkit.Must(blocks.Create(t.Context(), b, metav1.CreateOptions{}))(t)
	}
	o := options()
	o.Quarantine = quarantine
	c.run(t, c.serviceAccount(t), o)
	c.ask(t, "r-lost", lost, "default")
	c.ask(t, "r-kept", kept, "default")
	ofLost, ofKept := c.answer(t, "r-lost").Status.AddressBlockName, c.answer(t, "r-kept").Status.AddressBlockName

	c.deleteNode(t, "lost")
	start := time.Now()
	for _, b := range []string{ofLost, "default-3", "default-6"} {
		c.requireDeleting(t, b)
	}
	// All the while the name is locked: the pool has one block left, then none.
	c.ask(t, "in-quarantine-0", kept, "default")
	c.ask(t, "in-quarantine-1", kept, "default")
	answers := []*v2.BlockRequest{c.answer(t, "in-quarantine-0"), c.answer(t, "in-quarantine-1")}
	full := 0
	for _, r := range answers {
		switch no := failed(r); {
		case no != nil && no.Reason == v2.ReasonPoolExhausted:
			full++
		case r.Status.AddressBlockName != "default-2":
			t.Errorf("answer in quarantine is %+v", r.Status)
		}
	}
	if full != 1 {
		t.Errorf("%d requests of 2 were told that the pool is exhausted, want 1", full)
	}
	if d := time.Since(start); d > quarantine {
		t.Fatalf("this machine is too slow for a quarantine of %s: %s have passed", quarantine, d)
	}
	for _, b := range []string{ofLost, "default-3", "default-6"} {
		testkit.Eventually(t, 3*quarantine, "end of the quarantine", func() error { return c.gone(t.Context(), b) })
		if d := time.Since(start); d < quarantine-time.Second { // times of the API are whole seconds
			t.Errorf("block %s was in quarantine for %s only", b, d)
		}
	}
	for _, b := range []string{ofKept, "default-4", "default-5", "default-7"} {
		if got := c.block(t, b); got.DeletionTimestamp != nil {
			t.Errorf("block %s of node %q is deleted", b, got.Labels[v2.LabelNode])
		}
	}
	t.Run("the addresses can be had again", func(t *testing.T) {
		c.ask(t, "after", kept, "default")
		if r := c.answer(t, "after"); r.Status.AddressBlockName == "" {
			t.Errorf("answer is %+v", r.Status)
		}
	})
	t.Run("the strange block is explained", func(t *testing.T) {
		o.GCInterval = time.Second
		o.Election.Namespace = metav1.NamespaceDefault
		c.allowLeases(t, o.Election.Namespace)
		c.run(t, c.serviceAccount(t), o)
		testkit.Eventually(t, 20*time.Second, "Event about default-7", func() error {
			es, err := c.core.EventsV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{FieldSelector: "regarding.name=default-7"})
			if err == nil && (len(es.Items) == 0 || !strings.Contains(es.Items[0].Note, v2.LabelNode)) {
				err = fmt.Errorf("events are %+v", es.Items)
			}
			return err
		})
	})
}

// The old block of a Node that was made again under its name stays when the new
// coild claims it, or has said nothing yet, and is freed when that disowns it.
func TestControllerNodeMadeAgain(t *testing.T) {
	c := ipamCluster(t)
	c.pool(t, "default", 0, v4("10.21.0.0/29"))
	n := c.node(t, "node")
	o := options()
	o.Quarantine = 4 * time.Second
	stop := c.run(t, c.serviceAccount(t), o)
	for _, r := range []string{"r-0", "r-1", "r-2"} {
		c.ask(t, r, n, "default")
		c.answer(t, r)
	}
	stop()
	c.deleteNode(t, "node")
	again := c.node(t, "node")
	c.run(t, c.serviceAccount(t), o)
	if err := c.claim(t.Context(), "default-0", again.UID); err != nil {
		t.Fatal(err)
	}
	if err := c.note(t.Context(), "default-1", v2.AnnotationDisowned, again.UID); err != nil {
		t.Fatal(err)
	}
	c.requireDeleting(t, "default-1")
	testkit.Eventually(t, 20*time.Second, "end of the quarantine", func() error { return c.gone(t.Context(), "default-1") })
	if b := c.block(t, "default-0"); b.DeletionTimestamp != nil {
		t.Error("the claimed block is deleted")
	}
	if b := c.block(t, "default-2"); b.DeletionTimestamp != nil {
		t.Error("the block of which the node's coild has said nothing is deleted: pods may still use it")
	}
}

// claim is what coild does to a block of its node's name.
func (c *cluster) claim(ctx context.Context, block string, uid types.UID) error {
	return c.note(ctx, block, v2.AnnotationNodeUID, uid)
}

func (c *cluster) note(ctx context.Context, block, annotation string, uid types.UID) error {
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, annotation, uid)
	_, err := c.coil.CoilV2().AddressBlocks().Patch(ctx, block, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	return err
}

// comeBack makes the Node of a block again, unless it is there, and claims the block.
func (c *cluster) comeBack(ctx context.Context, block string) (first bool, err error) {
	b, err := c.coil.CoilV2().AddressBlocks().Get(ctx, block, metav1.GetOptions{})
	if err != nil {
		return false, err
	}
	nodes := c.core.CoreV1().Nodes()
	n, err := nodes.Get(ctx, b.Labels[v2.LabelNode], metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		first = true
		n, err = nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: b.Labels[v2.LabelNode]}}, metav1.CreateOptions{})
	}
	if err != nil {
		return false, err
	}
	return first, c.claim(ctx, block, n.UID)
}

// Between the controller's reads and its writes the Node comes back and claims the
// block. Whatever the moment, the block stays.
func TestControllerNodeComesBackBeforeDelete(t *testing.T) {
	c := ipamCluster(t)
	p := c.pool(t, "default", 0, v4("10.22.0.0/24"))
	for _, tt := range []struct {
		name, method string
	}{
		{"before the time is noted", http.MethodPatch},
		{"before the deletion", http.MethodDelete},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var raced atomic.Int64
			o := options()
			o.Quarantine = time.Hour // the Node that comes back is young
			stop := c.run(t, intercept(c.serviceAccount(t), func(r *http.Request, next http.RoundTripper) (*http.Response, error) {
				if isWrite(r, tt.method, "addressblocks") {
					first, err := c.comeBack(r.Context(), r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:])
					if err != nil {
						return nil, err
					}
					if first {
						raced.Add(1)
					}
				}
				return next.RoundTrip(r)
			}), o)
			var blocks []string
			for i := range int32(20) {
				index := int32(len(c.blocksOf(t, "default")))
				n := c.node(t, fresh("node"))
				b := made("default", n.Name, index, fmt.Sprintf("10.22.0.%d/32", index))
				b.Annotations = map[string]string{v2.AnnotationNodeUID: string(n.UID)}
				b.OwnerReferences = []metav1.OwnerReference{{APIVersion: "coil.cybozu.com/v2", Kind: "AddressPool", Name: p.Name, UID: p.UID}}
				testkit.Must(c.coil.CoilV2().AddressBlocks().Create(t.Context(), b, metav1.CreateOptions{}))(t)
				blocks = append(blocks, b.Name)
				c.deleteNode(t, n.Name)
				testkit.Eventually(t, 10*time.Second, "an attempt", func() error {
					if got := raced.Load(); got != int64(i)+1 {
						return fmt.Errorf("%d attempts to free a block", got)
					}
					return nil
				})
			}
			stop()
			for _, name := range blocks {
				if b := c.block(t, name); b.DeletionTimestamp != nil {
					t.Errorf("block %s was deleted although its node had it", name)
				}
			}
		})
	}
}

func TestControllerPoolStatus(t *testing.T) {
	c := ipamCluster(t)
	c.pool(t, "tiny", 1, v4("10.23.0.0/30"))
	c.pool(t, "wide", 5, dual("10.0.0.0/9", "fd00::/105"))
	n := c.node(t, "node")
	c.run(t, c.serviceAccount(t), options())
	wait := func(pool, condition string, status metav1.ConditionStatus, words string) {
		t.Helper()
		testkit.Eventually(t, 10*time.Second, "condition", func() error {
			got, err := c.condition(t, pool, condition)
			if err == nil && (got.Status != status || !strings.Contains(got.Message, words)) {
				err = fmt.Errorf("condition is %+v, want %s with %q", got, status, words)
			}
			return err
		})
	}
	wait("tiny", v2.PoolOverlapping, metav1.ConditionTrue, "AddressPool wide (10.0.0.0/9)")
	wait("wide", v2.PoolOverlapping, metav1.ConditionTrue, "AddressPool tiny (10.23.0.0/30)")
	wait("wide", v2.PoolOverlapping, metav1.ConditionTrue, "ServiceCIDR kubernetes (10.96.0.0/16)")
	wait("tiny", v2.PoolExhausted, metav1.ConditionFalse, "")
	for _, r := range []string{"r-0", "r-1"} {
		c.ask(t, r, n, "tiny")
		c.answer(t, r)
	}
	wait("tiny", v2.PoolExhausted, metav1.ConditionTrue, "append a subnet")
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.23.0.2"}}
	n = testkit.Must(c.core.CoreV1().Nodes().UpdateStatus(t.Context(), n, metav1.UpdateOptions{}))(t)
	wait("tiny", v2.PoolOverlapping, metav1.ConditionTrue, "Node node (10.23.0.2)")
	t.Run("the wide pool skips what the tiny one has", func(t *testing.T) {
		// 10.23.0.0 is in block 23*65536/32 of the pool: make it the next.
		_, err := c.coil.CoilV2().AddressPools().Patch(t.Context(), "wide", types.MergePatchType, []byte(`{"status":{"lastIndex":47103}}`), metav1.PatchOptions{}, "status")
		if err != nil {
			t.Fatal(err)
		}
		c.ask(t, "r-wide", n, "wide")
		if r := c.answer(t, "r-wide"); r.Status.AddressBlockName != "wide-47105" {
			t.Errorf("answer is %+v, want block 47105 after the last index 47103 and the taken 47104", r.Status)
		}
	})
	t.Run("a subnet more ends it", func(t *testing.T) {
		_, err := c.coil.CoilV2().AddressPools().Patch(t.Context(), "tiny", types.JSONPatchType, []byte(`[{"op":"add","path":"/spec/subnets/-","value":{"ipv4":"192.168.23.0/30"}}]`), metav1.PatchOptions{})
		if err != nil {
			t.Fatal(err)
		}
		wait("tiny", v2.PoolExhausted, metav1.ConditionFalse, "")
		c.ask(t, "r-2", n, "tiny")
		if r := c.answer(t, "r-2"); r.Status.AddressBlockName != "tiny-2" {
			t.Errorf("answer is %+v", r.Status)
		}
	})
	t.Run("Events say so once", func(t *testing.T) {
		for _, reason := range []string{v2.ReasonPoolExhausted, "PoolOverlapping"} {
			testkit.Eventually(t, 10*time.Second, "Event", func() error {
				es, err := c.core.EventsV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{FieldSelector: "regarding.kind=AddressPool,regarding.name=tiny,reason=" + reason})
				if err == nil && len(es.Items) != 1 {
					err = fmt.Errorf("%d events %s", len(es.Items), reason)
				}
				return err
			})
		}
	})
}
