package blockrequest

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/plantest"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// The node has answered before, or the block came back by other means.
func TestClaimOfABlockThatExists(t *testing.T) {
	api := newFakeAPI(t)
	api.addPool(plantest.Pool("default", 1, "10.0.0.0/29"))
	req := api.addRequest("r", "node", "default")
	req.Spec.Claim = "default-2"
	api.putRequest(req)
	api.addBlock(plantest.Block("default", 2, "10.0.0.4/31", "node"))
	r := newReplica(t, api, 0, testNode("node"))
	r.DeliverAll()
	if err := r.sync(t.Context(), "r"); err != nil {
		t.Fatal(err)
	}
	if got := api.requests()["r"].Status.AddressBlockName; got != "default-2" || len(api.blocks()) != 1 {
		t.Errorf("answer %q, %d blocks", got, len(api.blocks()))
	}
}

// A claim of a block that the pool doesn't have is an error of the node, or a lie: others go on being carved. The
// pool's controller is told of each claim that suspends the pool.
func TestClaimOfABlockThatThePoolLacks(t *testing.T) {
	for claimed, suspends := range map[string]bool{"default-9": false, "other-1": false, "default-1": true} {
		api := newFakeAPI(t)
		api.addPool(plantest.Pool("default", 1, "10.0.0.0/29"))
		claim := api.addRequest("claim", "node", "default")
		claim.Spec.Claim = claimed
		api.putRequest(claim)
		r := newReplica(t, api, 0, testNode("node"))
		r.DeliverAll()
		var told []string
		r.OnClaim(func(pool string) { told = append(told, pool) })
		r.noteClaim(claim)
		if got := len(told) > 0; got != suspends {
			t.Errorf("%s: told of %v", claimed, told)
		}
		if c := r.Claims("default"); c.Last.IsZero() == suspends || suspends && c.Node != "node" {
			t.Errorf("%s: %+v", claimed, c)
		}
	}
}

// A block with the address of another Node can't be claimed, as by a stolen token of coild, unless an admin allows it.
func TestClaimOfANodesAddress(t *testing.T) {
	withAddress := func(name string, addrs ...string) *corev1.Node {
		n := testNode(name)
		for _, a := range addrs {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
		}
		return n
	}
	for _, tt := range []struct {
		name, claim, allow, reason string
		exists                     bool
	}{
		{name: "another Node's", claim: "default-1", reason: v2.ReasonNodeAddress},
		{name: "another Node's and its own", claim: "default-2", reason: v2.ReasonNodeAddress},
		{name: "its own", claim: "default-0"},
		{name: "nobody's", claim: "default-3"},
		{name: "of a block that exists", claim: "default-1", exists: true},
		{name: "allowed", claim: "default-1", allow: "default-2/other, default-1/node"},
		{name: "allowed for another node", claim: "default-1", allow: "default-1/other", reason: v2.ReasonNodeAddress},
		{name: "allowed for another block", claim: "default-1", allow: "default-11/node,default-2/node", reason: v2.ReasonNodeAddress},
		{name: "no word of an admin", claim: "default-1", allow: "true", reason: v2.ReasonNodeAddress},
	} {
		t.Run(tt.name, func(t *testing.T) {
			api := newFakeAPI(t)
			pool := plantest.Pool("default", 2, "10.0.0.0/28")
			pool.Annotations = map[string]string{v2.AnnotationAllowClaims: tt.allow}
			api.addPool(pool)
			if tt.exists {
				api.addBlock(plantest.Block("default", 1, "10.0.0.4/30", "node"))
			}
			nodes := []*corev1.Node{withAddress("node", "10.0.0.1", "10.0.0.9"), withAddress("apiserver", "192.0.2.1", "10.0.0.6", "10.0.0.10")}
			r := newReplica(t, api, 0, nodes...)
			for _, n := range nodes {
				r.nodeChanged(nil, n)
			}
			claim := api.addRequest("r", "node", "default")
			claim.Spec.Claim = tt.claim
			api.putRequest(claim)
			r.DeliverAll()
			if err := r.sync(t.Context(), "r"); err != nil {
				t.Fatal(err)
			}
			if tt.reason == "" {
				if got := api.requests()["r"].Status.AddressBlockName; got != tt.claim || api.blocks()[tt.claim] == nil {
					t.Errorf("answered with %q: %+v", got, api.requests()["r"].Status)
				}
				return
			}
			if c := conditionOf(t, api.requests()["r"]); c.Reason != tt.reason || !strings.Contains(c.Message, "Node apiserver") {
				t.Errorf("refused with %+v, want %s and the Node", c, tt.reason)
			}
			if len(api.blocks()) > 0 {
				t.Errorf("%d blocks were made", len(api.blocks()))
			}
			// It is repeated, which suspends nothing. Pods may use the block, so nobody else gets it when the Node goes.
			if !r.wasRefused(tt.claim, "node") {
				t.Error("the claim suspends the pool each time")
			}
			if !r.ledger.Contested(tt.claim) {
				t.Error("another node may get the block")
			}
		})
	}
}

// Etcd was restored to a time when another node had the block. The node that has pods with its addresses claims it
// again and again, which suspends the pool once. When the other node has given it back, nobody else gets it.
func TestContestedBlock(t *testing.T) {
	api := newFakeAPI(t)
	api.addPool(plantest.Pool("default", 1, "10.0.0.0/31")) // of one block
	api.addBlock(plantest.Block("default", 0, "10.0.0.0/31", "other"))
	r := newReplica(t, api, 0, testNode("node"), testNode("third"))
	start := time.Now()
	after := func(d time.Duration) {
		r.now = func() time.Time { return start.Add(d) }
	}
	ask := func(name, node, claim, reason string) {
		t.Helper()
		req := api.addRequest(name, node, "default")
		req.Spec.Claim = claim
		api.putRequest(req)
		r.DeliverAll()
		r.noteClaim(req)
		if err := r.sync(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		if reason != "" && conditionOf(t, api.requests()[name]).Reason != reason || reason == "" && api.requests()[name].Status.AddressBlockName == "" {
			t.Errorf("%s is answered with %+v, want %q", name, api.requests()[name].Status, reason)
		}
	}
	after(0)
	ask("claim", "node", "default-0", v2.ReasonBlockTaken)
	first := r.Claims("default").Last
	after(pools.SuspendFor)
	ask("again", "node", "default-0", v2.ReasonBlockTaken)
	if last := r.Claims("default").Last; !last.Equal(first) || first.IsZero() {
		t.Errorf("the claim suspends the pool once more: at %s and %s", first, last)
	}
	api.dropBlock("default-0")
	r.DeliverAll()
	ask("third", "third", "", v2.ReasonPoolExhausted)
	ask("at last", "node", "default-0", "")
	api.dropBlock("default-0")
	r.DeliverAll()
	after(2 * pools.SuspendFor)
	ask("third later", "third", "", "")
}

// After a claim others may be lost, too: nothing is carved for a while, and then behind it.
func TestClaimSuspendsThePool(t *testing.T) {
	api := newFakeAPI(t)
	api.addPool(plantest.Pool("default", 1, "10.0.0.0/29"))
	claim := api.addRequest("claim", "node", "default")
	claim.Spec.Claim = "default-1"
	api.putRequest(claim)
	r := newReplica(t, api, 0, testNode("node"))
	r.DeliverAll()
	start := time.Now()
	r.now = func() time.Time { return start }
	r.noteClaim(claim)
	ask := func(name string) *v2.BlockRequest {
		api.addRequest(name, "node", "default")
		r.DeliverAll()
		if err := r.sync(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		return api.requests()[name]
	}
	if c := conditionOf(t, ask("early")); c.Reason != v2.ReasonPoolSuspended {
		t.Errorf("a request before the claim is answered: %+v", c)
	}
	if err := r.sync(t.Context(), "claim"); err != nil {
		t.Fatal(err)
	}
	if got := api.requests()["claim"].Status.AddressBlockName; got != "default-1" {
		t.Errorf("the claim is answered with %q", got)
	}
	r.now = func() time.Time { return start.Add(pools.SuspendFor) }
	if got := ask("late").Status.AddressBlockName; got != "default-2" {
		t.Errorf("a request after the suspension is answered with %q, want the block behind the claimed one", got)
	}
}
