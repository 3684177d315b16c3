package blockrequest

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/ledger"
	"github.com/coil-net/coil/pkg/plan/plantest"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// conditionOf returns the only condition of a request.
func conditionOf(t *testing.T, r *v2.BlockRequest) v2.BlockRequestCondition {
	t.Helper()
	if len(r.Status.Conditions) != 1 {
		t.Fatalf("request %s has the conditions %+v, want one", r.Name, r.Status.Conditions)
	}
	return r.Status.Conditions[0]
}

func TestAnswers(t *testing.T) {
	now := metav1.Now()
	tests := []struct {
		name string
		// api changes what the API server has, stale what the caches show beyond that.
		api    func(fakeAPI, *v2.BlockRequest)
		stale  func(*testing.T, *replica)
		block  string // of the answer
		reason string // of the refusal
		words  string
	}{
		{name: "free pool", block: "default-0"},
		{name: "the pool goes on after its last index", block: "default-2", api: func(a fakeAPI, _ *v2.BlockRequest) {
			a.changePool(func(p *v2.AddressPool) { p.Status.LastIndex = new(int32(1)) })
		}},
		{name: "at its end it goes round", block: "default-0", api: func(a fakeAPI, _ *v2.BlockRequest) {
			a.changePool(func(p *v2.AddressPool) { p.Status.LastIndex = new(int32(3)) })
		}},
		{name: "a pool of 2.x goes on after its highest block", block: "default-3", api: func(a fakeAPI, _ *v2.BlockRequest) {
			a.addBlock(plantest.Block("default", 2, "10.0.0.4/31", "other"))
		}},
		{name: "no such pool", reason: v2.ReasonPoolNotFound, words: "no AddressPool default", api: func(a fakeAPI, _ *v2.BlockRequest) {
			a.Drop(poolResource, "default")
		}},
		{name: "a pool that the cache doesn't know yet", block: "default-0", stale: func(t *testing.T, r *replica) {
			if err := r.pools.Delete(r.api.pools()["default"]); err != nil {
				t.Fatal(err)
			}
		}},
		{name: "a pool that only the cache knows", reason: v2.ReasonPoolNotFound, stale: func(_ *testing.T, r *replica) {
			r.api.Drop(poolResource, "default")
		}},
		{name: "terminating", reason: v2.ReasonPoolTerminating, words: "is being deleted", api: func(a fakeAPI, _ *v2.BlockRequest) {
			a.changePool(func(p *v2.AddressPool) { p.DeletionTimestamp = &now })
		}},
		{name: "terminating, not in the cache yet", reason: v2.ReasonPoolTerminating, stale: func(_ *testing.T, r *replica) {
			r.api.changePool(func(p *v2.AddressPool) { p.DeletionTimestamp = &now })
		}},
		{name: "draining", reason: v2.ReasonPoolDraining, words: `AddressPool default drains and gives nothing new (spec.drain): choose another one by the annotation coil.cybozu.com/pool of the namespace, or end that by "coilctl pools drain default --undo"`, api: func(a fakeAPI, _ *v2.BlockRequest) {
			a.changePool(func(p *v2.AddressPool) { p.Spec.Drain = true })
		}},
		{name: "draining, not in the cache yet", reason: v2.ReasonPoolDraining, stale: func(_ *testing.T, r *replica) {
			r.api.changePool(func(p *v2.AddressPool) { p.Spec.Drain = true })
		}},
		{name: "the first blocks are excluded", block: "default-2", api: func(a fakeAPI, _ *v2.BlockRequest) {
			a.changePool(func(p *v2.AddressPool) { p.Spec.Exclude = []string{"10.0.0.1-10.0.0.2"} })
		}},
		{name: "all is excluded", reason: v2.ReasonPoolExhausted, words: "all of its 0 blocks that spec.exclude leaves, without 4, are taken; append a subnet", api: func(a fakeAPI, _ *v2.BlockRequest) {
			a.changePool(func(p *v2.AddressPool) { p.Spec.Exclude = []string{"10.0.0.0/29"} })
		}},
		{name: "exhausted", reason: v2.ReasonPoolExhausted, words: "all of its 4 blocks are taken; append a subnet", api: func(a fakeAPI, _ *v2.BlockRequest) {
			for i := range int32(4) {
				a.addBlock(plantest.Block("default", i, fmt.Sprintf("10.0.0.%d/31", 2*i), "other"))
			}
		}},
		{name: "exhausted, not in the cache yet", reason: v2.ReasonPoolExhausted, stale: func(_ *testing.T, r *replica) {
			for i := range int32(4) {
				r.api.addBlock(plantest.Block("default", i, fmt.Sprintf("10.0.0.%d/31", 2*i), "other"))
			}
		}},
		{name: "the rest overlaps another pool's block", reason: v2.ReasonPoolExhausted, words: "shares addresses", api: func(a fakeAPI, _ *v2.BlockRequest) {
			a.addBlock(plantest.Block("wide", 0, "10.0.0.0/29", "other"))
		}},
		{name: "a deleting block keeps its name", block: "default-1", api: func(a fakeAPI, _ *v2.BlockRequest) {
			b := plantest.Block("default", 0, "10.0.0.0/31", "other")
			b.DeletionTimestamp = &now
			a.addBlock(b)
			a.changePool(func(p *v2.AddressPool) { p.Status.LastIndex = new(int32(3)) })
		}},
		{name: "invalid pool", reason: v2.ReasonPoolInvalid, words: "can't be used", api: func(a fakeAPI, _ *v2.BlockRequest) {
			a.changePool(func(p *v2.AddressPool) {
				p.Spec.Subnets = append(p.Spec.Subnets, v2.SubnetSet{IPv4: new("10.0.0.1x/30")})
			})
		}},
		{name: "no such node", reason: v2.ReasonNodeNotFound, words: "no Node nowhere", api: func(_ fakeAPI, r *v2.BlockRequest) {
			r.Spec.NodeName = "nowhere"
		}},
		{name: "node made again", reason: v2.ReasonNodeNotFound, words: "made again", api: func(_ fakeAPI, r *v2.BlockRequest) {
			r.OwnerReferences = []metav1.OwnerReference{{Kind: "Node", Name: "node", UID: "before"}}
		}},
		{name: "a block was made for it", block: "default-3", api: func(a fakeAPI, r *v2.BlockRequest) {
			a.addBlock(forRequest(plantest.Block("default", 3, "10.0.0.6/31", "node"), r))
		}},
		{name: "a block was made for it, but is on its way out", block: "default-0", api: func(a fakeAPI, r *v2.BlockRequest) {
			b := forRequest(plantest.Block("default", 3, "10.0.0.6/31", "node"), r)
			b.DeletionTimestamp = &now
			a.addBlock(b)
			a.changePool(func(p *v2.AddressPool) { p.Status.LastIndex = new(int32(3)) })
		}},
		{name: "a block was made for it, and the pool is terminating now", block: "default-3", api: func(a fakeAPI, r *v2.BlockRequest) {
			a.addBlock(forRequest(plantest.Block("default", 3, "10.0.0.6/31", "node"), r))
			a.changePool(func(p *v2.AddressPool) { p.DeletionTimestamp = &now })
		}},
		{name: "the next name is taken by a block made for it that the cache doesn't show", block: "default-0", stale: func(_ *testing.T, r *replica) {
			r.api.addBlock(forRequest(plantest.Block("default", 0, "10.0.0.0/31", "node"), r.api.requests()["r"]))
		}},
		{name: "strange blocks are around", block: "default-0", api: func(a fakeAPI, _ *v2.BlockRequest) {
			a.changePool(func(p *v2.AddressPool) { p.Status.LastIndex = new(int32(3)) })
			for _, name := range []string{"default-x", "default", "default-01", "other--1", "default-99999999999", "-5"} {
				b := plantest.Block("default", 0, "not a range", "node")
				b.Name, b.Labels = name, nil
				a.addBlock(b)
			}
		}},
		{name: "claims a block that is lost", block: "default-2", api: func(_ fakeAPI, r *v2.BlockRequest) {
			r.Spec.Claim = "default-2"
		}},
		{name: "claims another node's block", reason: v2.ReasonBlockTaken, words: `held by node "other"`, api: func(a fakeAPI, r *v2.BlockRequest) {
			r.Spec.Claim = "default-2"
			a.addBlock(plantest.Block("default", 2, "10.0.0.4/31", "other"))
		}},
		{name: "claims addresses of another block", reason: v2.ReasonBlockTaken, words: "in another block", api: func(a fakeAPI, r *v2.BlockRequest) {
			r.Spec.Claim = "default-2"
			a.addBlock(plantest.Block("wide", 0, "10.0.0.0/29", "other"))
		}},
		{name: "claims what isn't in the pool", reason: v2.ReasonPoolInvalid, words: "has no block default-4", api: func(_ fakeAPI, r *v2.BlockRequest) {
			r.Spec.Claim = "default-4"
		}},
		{name: "claims a block of another pool", reason: v2.ReasonPoolInvalid, words: "has no block other-0", api: func(_ fakeAPI, r *v2.BlockRequest) {
			r.Spec.Claim = "other-0"
		}},
		{name: "suspended by an earlier leader", reason: v2.ReasonPoolSuspended, words: "is suspended", api: func(a fakeAPI, _ *v2.BlockRequest) {
			a.changePool(func(p *v2.AddressPool) {
				p.Status.Conditions = []metav1.Condition{{
					Type: v2.PoolSuspended, Status: metav1.ConditionTrue, Reason: pools.ReasonBlocksClaimed, LastTransitionTime: now,
				}}
			})
		}},
		{name: "suspended by an admin", reason: v2.ReasonPoolSuspended, words: "is suspended", api: func(a fakeAPI, _ *v2.BlockRequest) {
			a.changePool(func(p *v2.AddressPool) { p.Annotations = map[string]string{v2.AnnotationSuspend: "true"} })
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			api := newFakeAPI(t)
			api.addPool(plantest.Pool("default", 1, "10.0.0.0/29"))
			req := api.addRequest("r", "node", "default")
			if tt.api != nil {
				tt.api(api, req)
				api.putRequest(req)
			}
			r := newReplica(t, api, 0, testNode("node"))
			r.DeliverAll()
			if tt.stale != nil {
				tt.stale(t, r)
			}
			if err := r.sync(t.Context(), "r"); err != nil {
				t.Fatal(err)
			}
			got := api.requests()["r"]
			c := conditionOf(t, got)
			if tt.reason != "" {
				if c.Type != v2.BlockRequestFailed || c.Reason != tt.reason || !strings.Contains(c.Message, tt.words) || got.Status.AddressBlockName != "" {
					t.Fatalf("answer is %+v, want Failed, %s with %q", got.Status, tt.reason, tt.words)
				}
				return
			}
			if c.Type != v2.BlockRequestComplete || got.Status.AddressBlockName != tt.block {
				t.Fatalf("answer is %+v, want %s", got.Status, tt.block)
			}
			b := api.blocks()[tt.block]
			if b == nil || b.Labels[v2.LabelRequest] != string(got.UID) || b.Labels[v2.LabelNode] != "node" {
				t.Errorf("block is %+v", b)
			}
			if err := r.sync(t.Context(), "r"); err != nil { // with the old request in the cache
				if calls := api.Calls()["create addressblocks"]; calls > 2 {
					t.Errorf("%d creates after a repeated sync", calls)
				}
			}
			if n := ofRequest(api, got.UID); n != 1 {
				t.Errorf("%d blocks for the request", n)
			}
		})
	}
}

// made returns a block that somebody else made.
func forRequest(b *v2.AddressBlock, r *v2.BlockRequest) *v2.AddressBlock {
	b.Labels[v2.LabelRequest] = string(r.UID)
	return b
}

// ofRequest counts the blocks made for a request that aren't being deleted.
func ofRequest(a fakeAPI, uid types.UID) int {
	n := 0
	for _, b := range a.blocks() {
		if b.Labels[v2.LabelRequest] == string(uid) && b.DeletionTimestamp == nil {
			n++
		}
	}
	return n
}

func TestLostAnswersMakeNoSecondBlock(t *testing.T) {
	for _, lost := range []string{"create addressblocks", "update blockrequests"} {
		t.Run(lost, func(t *testing.T) {
			api := newFakeAPI(t)
			api.addPool(plantest.Pool("default", 1, "10.0.0.0/29"))
			api.addRequest("r", "node", "default")
			times := 3
			api.Fault = func(verb, resource string) (before, after error) {
				if verb+" "+resource == lost && times > 0 {
					times--
					if times == 1 {
						return fakeapi.ErrLost, nil // this one isn't even done
					}
					return nil, fakeapi.ErrLost
				}
				return nil, nil
			}
			r := newReplica(t, api, api.Events(), testNode("node"))
			for range 10 {
				if err := r.sync(t.Context(), "r"); err == nil {
					break
				}
				if lost == "update blockrequests" {
					r.DeliverAll() // the conflict ends when the cache has caught up
				}
			}
			got := api.requests()["r"]
			if got.Status.AddressBlockName != "default-0" || len(api.blocks()) != 1 {
				t.Errorf("answer is %+v with %d blocks", got.Status, len(api.blocks()))
			}
		})
	}
}

// A block whose creation failed is tried again only as long as nobody else may have got its
// addresses.
func TestRetriesChooseAnew(t *testing.T) {
	setup := func(t *testing.T) (fakeAPI, *replica) {
		api := newFakeAPI(t)
		api.addPool(plantest.Pool("default", 1, "10.0.0.0/29"))
		api.addPool(plantest.Pool("wide", 1, "10.0.0.0/29"))
		api.addRequest("r", "node", "default")
		api.addRequest("same", "node", "default")
		api.addRequest("wide", "node", "wide")
		r := newReplica(t, api, api.Events(), testNode("node"))
		api.Fault = func(verb, _ string) (before, after error) {
			if verb == "create" {
				return fakeapi.ErrLost, nil
			}
			return nil, nil
		}
		if err := r.sync(t.Context(), "r"); err == nil {
			t.Fatal("a lost create is a success")
		}
		api.Fault = nil
		return api, r
	}
	requireAnswer := func(t *testing.T, api fakeAPI, r *replica, request, block, cidr string) {
		t.Helper()
		if err := r.sync(t.Context(), request); err != nil {
			t.Fatal(err)
		}
		b := api.blocks()[api.requests()[request].Status.AddressBlockName]
		if b == nil || b.Name != block || *b.IPv4 != cidr {
			t.Fatalf("request %s has the blocks %+v, want %s with %s", request, b, block, cidr)
		}
	}
	t.Run("the same while its mark lasts", func(t *testing.T) {
		api, r := setup(t)
		requireAnswer(t, api, r, "wide", "wide-1", "10.0.0.2/31")
		requireAnswer(t, api, r, "r", "default-0", "10.0.0.0/31")
	})
	t.Run("a retry makes its mark last longer", func(t *testing.T) {
		api, r := setup(t)
		r.now = func() time.Time { return time.Now().Add(ledger.MarkLife * 2 / 3) }
		requireAnswer(t, api, r, "r", "default-0", "10.0.0.0/31")
		r.now = func() time.Time { return time.Now().Add(ledger.MarkLife * 4 / 3) }
		requireAnswer(t, api, r, "same", "default-1", "10.0.0.2/31")
		requireAnswer(t, api, r, "wide", "wide-2", "10.0.0.4/31")
	})
	t.Run("its mark ended and another pool got the addresses", func(t *testing.T) {
		api, r := setup(t)
		r.now = func() time.Time { return time.Now().Add(2 * ledger.MarkLife) }
		requireAnswer(t, api, r, "same", "default-1", "10.0.0.2/31")
		requireAnswer(t, api, r, "wide", "wide-0", "10.0.0.0/31")
		requireAnswer(t, api, r, "r", "default-2", "10.0.0.4/31")
	})
	t.Run("its mark ended and became that of another request", func(t *testing.T) {
		api, r := setup(t)
		r.ledger.Release("default", 0)
		r.now = func() time.Time { return time.Now().Add(time.Second) }
		if c, err := r.ledger.Pick("default", mustParse(t, "10.0.0.0/31"), "node"); err != nil || c.Index != 0 {
			t.Fatalf("the other one picks %+v, %v", c, err)
		}
		requireAnswer(t, api, r, "r", "default-1", "10.0.0.2/31")
	})
	t.Run("the pool was made again with other subnets", func(t *testing.T) {
		api, r := setup(t)
		again := api.addPool(plantest.Pool("default", 1, "10.1.0.0/29"))
		r.add(t, r.pools, again.DeepCopy())
		r.reader.forget("default")
		requireAnswer(t, api, r, "r", "default-1", "10.1.0.2/31")
	})
}

func TestBurstReadsThePoolOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newFakeAPI(t)
		api.addPool(plantest.Pool("default", 0, "10.0.0.0/22"))
		for i := range 300 {
			api.addRequest(fmt.Sprintf("r-%d", i), "node", "default")
		}
		r := newReplica(t, api, api.Events(), testNode("node"))
		for i := range 300 {
			r.enqueue(api.requests()[fmt.Sprintf("r-%d", i)])
		}
		for i := range 300 {
			if err := r.sync(t.Context(), fmt.Sprintf("r-%d", i)); err != nil {
				t.Fatal(err)
			}
		}
		if n := api.Calls()["get addresspools"]; n != 1 {
			t.Errorf("the pool was read %d times for requests that were all known before", n)
		}
		if n := api.Calls()["create addressblocks"] + api.Calls()["update blockrequests"]; n != 600 || api.Calls()["list addressblocks"] != 0 {
			t.Errorf("calls are %v, want two writes each and no list", api.Calls())
		}
		before := fmt.Sprint(api.Calls())
		for i := range 300 { // as the events of the blocks bring about
			if err := r.sync(t.Context(), fmt.Sprintf("r-%d", i)); err != nil {
				t.Fatal(err)
			}
		}
		if after := fmt.Sprint(api.Calls()); after != before {
			t.Errorf("with a cache that doesn't show the answers yet, calls go from %s to %s", before, after)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := r.loop.Run(ended, 1); err != nil { // ends the queue's goroutines
			t.Error(err)
		}
	})
}

func TestOtherControllerWasFaster(t *testing.T) {
	setup := func(t *testing.T) (fakeAPI, *replica) {
		api := newFakeAPI(t)
		api.addPool(plantest.Pool("default", 1, "10.0.0.0/27"))
		req := api.addRequest("r", "node", "default")
		r := newReplica(t, api, api.Events(), testNode("node"))
		// Ours is default-0; the other one's block is older, and it is the answer.
		api.addBlock(forRequest(plantest.Block("default", 9, "10.0.0.18/31", "node"), req))
		return api, r
	}
	t.Run("it answered", func(t *testing.T) {
		api, r := setup(t)
		answered := api.requests()["r"].DeepCopy()
		answered.Status.AddressBlockName = "default-9"
		answered.Status.Conditions = []v2.BlockRequestCondition{{Type: v2.BlockRequestComplete, Status: corev1.ConditionTrue}}
		api.putRequest(answered)
		if err := r.sync(t.Context(), "r"); err == nil {
			t.Fatal("a sync with an old request succeeds")
		}
		r.DeliverAll()
		if err := r.sync(t.Context(), "r"); err != nil {
			t.Fatal(err)
		}
		requireDeleted(t, api, "default-0", true)
		requireDeleted(t, api, "default-9", false)
	})
	t.Run("it answered and the node has deleted the request", func(t *testing.T) {
		api, r := setup(t)
		api.dropRequest("r")
		if err := r.sync(t.Context(), "r"); err != nil {
			t.Fatal(err)
		}
		requireDeleted(t, api, "default-0", true)
		requireDeleted(t, api, "default-9", false)
	})
	t.Run("the node has deleted the request and has only ours", func(t *testing.T) {
		api, r := setup(t)
		api.dropRequest("r")
		api.dropBlock("default-9")
		if err := r.sync(t.Context(), "r"); err != nil {
			t.Fatal(err)
		}
		requireDeleted(t, api, "default-0", false)
	})
}

func requireDeleted(t *testing.T, api fakeAPI, block string, want bool) {
	t.Helper()
	b := api.blocks()[block]
	if b == nil {
		t.Fatalf("there is no block %s", block)
	}
	if got := b.DeletionTimestamp != nil; got != want {
		t.Errorf("block %s is deleted: %t, want %t", block, got, want)
	}
}

func TestRefusalTellsTheNodeAndIsFinal(t *testing.T) {
	api := newFakeAPI(t)
	api.addPool(plantest.Pool("default", 3, "10.0.0.0/29"))
	api.addRequest("r-0", "node", "default")
	api.addRequest("r-1", "node", "default")
	r := newReplica(t, api, api.Events(), testNode("node"))
	for _, name := range []string{"r-0", "r-1"} {
		if err := r.sync(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	if got := <-r.events.Events; !strings.Contains(got, v2.ReasonPoolExhausted) {
		t.Errorf("the Event is %q", got)
	}
	r.DeliverAll()
	api.dropBlock("default-0")
	r.DeliverAll()
	writes := api.Calls()["update blockrequests"]
	if err := r.sync(t.Context(), "r-1"); err != nil {
		t.Fatal(err)
	}
	if api.Calls()["update blockrequests"] != writes || len(api.blocks()) != 0 {
		t.Error("a request that has failed is answered again: the node asks with a new one")
	}
	if len(r.work) != 1 { // r-0, whose answer wasn't looked at
		t.Errorf("%d requests are remembered", len(r.work))
	}
}

// mustParse returns a pool of blocks of two addresses.
func mustParse(t *testing.T, ipv4 string) ipam.Pool {
	t.Helper()
	p, err := pools.Parse(plantest.Pool("", 1, ipv4).Spec)
	if err != nil {
		t.Fatal(err)
	}
	return p
}
