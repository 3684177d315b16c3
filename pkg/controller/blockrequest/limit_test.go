package blockrequest

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/plantest"
)

// fewPods returns a Node of 10 pods. Its limit is 2*10+1024+2*64 addresses: 18 blocks of 64 are below it, 19 are above.
func fewPods() *corev1.Node {
	n := testNode("node")
	n.Status.Allocatable = corev1.ResourceList{corev1.ResourcePods: resource.MustParse("10")}
	return n
}

func TestNodeGetsNoMoreThanItsPodsNeed(t *testing.T) {
	const enough = 19
	ofPool := func(pool, node string, i int) *v2.AddressBlock {
		return plantest.Block(pool, int32(i), fmt.Sprintf("10.%d.%d.%d/26", len(pool), i/4, i%4*64), node)
	}
	for _, tt := range []struct {
		name   string
		blocks int
		block  func(i int) *v2.AddressBlock
		claim  string
		// limited says that the request is refused.
		limited bool
	}{
		{name: "one more", blocks: enough - 1, block: func(i int) *v2.AddressBlock { return ofPool("default", "node", i) }},
		{name: "enough", blocks: enough, block: func(i int) *v2.AddressBlock { return ofPool("default", "node", i) }, limited: true},
		{name: "deleted, and kept by the node", blocks: enough, block: func(i int) *v2.AddressBlock {
			b := ofPool("default", "node", i)
			b.DeletionTimestamp = &b.CreationTimestamp
			return b
		}, limited: true},
		{name: "another node's", blocks: enough, block: func(i int) *v2.AddressBlock { return ofPool("default", "other", i) }},
		{name: "another pool's", blocks: enough, block: func(i int) *v2.AddressBlock { return ofPool("others", "node", i) }},
		{name: "reserved by an admin", blocks: enough, block: func(i int) *v2.AddressBlock {
			b := ofPool("default", "node", i)
			b.Labels[v2.LabelReserved] = v2.ReservedValue
			return b
		}},
		{name: "a claim", blocks: enough - 1, block: func(i int) *v2.AddressBlock { return ofPool("default", "node", i) }, claim: "default-60"},
		{name: "a claim of too many", blocks: enough, block: func(i int) *v2.AddressBlock { return ofPool("default", "node", i) },
			claim: "default-60", limited: true},
		{name: "a claim of a block that is there", blocks: enough, block: func(i int) *v2.AddressBlock { return ofPool("default", "node", i) },
			claim: "default-7"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			api := newFakeAPI(t)
			api.addPool(plantest.Pool("default", 6, "10.7.0.0/20"))
			for i := range tt.blocks {
				api.addBlock(tt.block(i))
			}
			req := api.addRequest("r", "node", "default")
			req.Spec.Claim = tt.claim
			api.putRequest(req)
			r := newReplica(t, api, 0, fewPods())
			r.DeliverAll()
			if err := r.sync(t.Context(), "r"); err != nil {
				t.Fatal(err)
			}
			c := conditionOf(t, api.requests()["r"])
			if !tt.limited {
				if c.Type != v2.BlockRequestComplete {
					t.Errorf("answer is %+v, want a block", c)
				}
				return
			}
			if c.Type != v2.BlockRequestFailed || c.Reason != v2.ReasonNodeLimit || len(api.blocks()) != tt.blocks {
				t.Errorf("answer is %+v with %d blocks, want none more", c, len(api.blocks()))
			}
			for _, words := range []string{"Node node holds 19 blocks of AddressPool default", "1216 addresses", "the 1172 that its 10 pods", "maxPods"} {
				if !strings.Contains(c.Message, words) {
					t.Errorf("message %q lacks %q", c.Message, words)
				}
			}
		})
	}
}

// A stolen token makes requests faster than the cache shows the blocks.
func TestNodeLimitCountsBlocksBeforeTheirEvents(t *testing.T) {
	api := newFakeAPI(t)
	api.addPool(plantest.Pool("default", 6, "10.7.0.0/20"))
	for i := range 64 {
		api.addRequest(fmt.Sprintf("r-%d", i), "node", "default")
	}
	r := newReplica(t, api, api.Events(), fewPods())
	for i := range 64 {
		if err := r.sync(t.Context(), fmt.Sprintf("r-%d", i)); err != nil {
			t.Fatal(err)
		}
		if i == 9 {
			r.DeliverAll() // the cache shows the first
		}
	}
	if len(api.blocks()) != 19 {
		t.Errorf("the node got %d blocks, want 19", len(api.blocks()))
	}
	api.dropBlock("default-3")
	r.DeliverAll()
	api.addRequest("later", "node", "default")
	r.DeliverAll()
	if err := r.sync(t.Context(), "later"); err != nil {
		t.Fatal(err)
	}
	if c := conditionOf(t, api.requests()["later"]); c.Type != v2.BlockRequestComplete {
		t.Errorf("after the node gave one back: %+v", c)
	}
}
