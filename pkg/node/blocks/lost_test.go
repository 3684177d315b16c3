package blocks

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// Etcd was restored from a backup: the block, of which a pod has an address, doesn't exist. The node
// claims it before it asks for another one, also when coild was away at that time.
func TestLostBlockIsClaimed(t *testing.T) {
	for _, c := range []struct {
		name    string
		objects []runtime.Object
	}{
		{"lost while coild was away", nil},
		{"lost while coild runs", []runtime.Object{newBlock("default", 0)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := runAged(t, time.Minute, map[string]int{"default-0": 1}, c.objects...)
			if c.objects != nil {
				if err := b.client.Tracker().Delete(v2.Resource("addressblocks").WithVersion("v2"), "", "default-0"); err != nil {
					t.Fatal(err)
				}
			}
			testkit.Eventually(t, 5*time.Second, "the block is claimed", func() error {
				if rs := b.requests(t); len(rs) != 1 || rs[0].Spec.Claim != "default-0" || rs[0].Spec.PoolName != "default" {
					return fmt.Errorf("requests: %+v", rs)
				}
				return nil
			})
			told := make(chan error, 1)
			generation := b.Generation("default")
			go func() { told <- b.Ask(t.Context(), "default", generation) }()
			testkit.Eventually(t, 5*time.Second, "a pod waits", func() error {
				if waiting, _ := b.news.state("default"); waiting == 0 || b.Missing() != 1 {
					return fmt.Errorf("%d wait, %d blocks are missing", waiting, b.Missing())
				}
				return nil
			})
			if err := b.Export(t.Context()); err != nil || b.exporter.exported() != "default-0" {
				t.Errorf("exported %q, %v", b.exporter.exported(), err)
			}
			if b.answer(t, 0, "") != 1 {
				t.Error("the claim isn't open")
			}
			if err := <-told; err != nil {
				t.Errorf("Ask: %v", err)
			}
			testkit.Eventually(t, 5*time.Second, "the claim is settled", func() error {
				if rs := b.requests(t); len(rs) > 0 || b.Missing() > 0 {
					return fmt.Errorf("%d requests, %d blocks are missing", len(rs), b.Missing())
				}
				return nil
			})
			if n := b.creates(); n != 1 {
				t.Errorf("%d BlockRequests were made, want the claim alone", n)
			}
			if w := b.warned(); len(w) != 1 || !strings.HasPrefix(w[0], "BlockClaimed: ") || !strings.Contains(w[0], "default-0") {
				t.Errorf("warnings: %q", w)
			}
		})
	}
}

// A claim that is refused is made again: after a pause that grows, at once when another block has the name, or
// not before the pool has changed, since each claim suspends it.
func TestRefusedClaim(t *testing.T) {
	other := newBlock("default", 0)
	other.Labels[v2.LabelNode] = "other"
	for _, c := range []struct {
		reason string
		holder *v2.AddressBlock
		again  bool
	}{
		{v2.ReasonPoolNotFound, nil, true},
		{v2.ReasonNodeNotFound, nil, true},
		{v2.ReasonPoolInvalid, nil, false},
		{v2.ReasonBlockTaken, nil, true},
		{v2.ReasonBlockTaken, other, true},
	} {
		t.Run(fmt.Sprintf("%s, held: %t", c.reason, c.holder != nil), func(t *testing.T) {
			client := fake.NewSimpleClientset()
			if c.holder != nil {
				client = fake.NewSimpleClientset(c.holder.DeepCopy())
			}
			m := idle(client, cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil))
			m.record.(*record).allocate("default-0", 1)
			synctest.Test(t, func(t *testing.T) {
				claims := func() int {
					t.Helper()
					usage, _ := m.record.Usage(t.Context())
					claimed, _, err := m.syncLost(t.Context(), "default", usage)
					rs, listErr := client.CoilV2().BlockRequests().List(t.Context(), metav1.ListOptions{})
					if err := errors.Join(err, listErr); err != nil || claimed != (len(rs.Items) > 0) {
						t.Fatalf("claimed: %t, %d requests, %v", claimed, len(rs.Items), err)
					}
					return len(rs.Items)
				}
				refuse := func() {
					t.Helper()
					r := m.newRequest(claimName("node", nodeUID, "default-0"), "default")
					r.Spec.Claim = "default-0"
					m.claimAnswered(t.Context(), r, &v2.BlockRequestCondition{Reason: c.reason})
					if err := client.CoilV2().BlockRequests().Delete(t.Context(), r.Name, metav1.DeleteOptions{}); err != nil {
						t.Fatal(err)
					}
				}
				if claims() != 1 {
					t.Fatal("the block isn't claimed")
				}
				for _, pause := range []time.Duration{minClaimPause, 2 * minClaimPause} {
					refuse()
					time.Sleep(pause - 1)
					if claims() != 0 {
						t.Fatalf("claimed before %s have passed", pause)
					}
					time.Sleep(time.Nanosecond)
					if again := claims() == 1; again != c.again {
						t.Fatalf("claimed again after %s: %t", pause, again)
					}
					if !c.again {
						break
					}
				}
				if c.holder == nil {
					return
				}
				refuse()
				if err := client.Tracker().Delete(v2.Resource("addressblocks").WithVersion("v2"), "", c.holder.Name); err != nil {
					t.Fatal(err)
				}
				if claims() != 1 {
					t.Error("the block isn't claimed after the other node's has gone")
				}
			})
		})
	}
}

// The machine of a Node that was deleted claims nothing: its blocks are free after the quarantine.
func TestNodeThatIsGoneClaimsNothing(t *testing.T) {
	client := fake.NewSimpleClientset()
	m := idle(client, cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil))
	m.record.(*record).allocate("default-0", 1)
	for _, gone := range []bool{true, false} {
		if err := m.Withdraw(t.Context(), gone); err != nil {
			t.Fatal(err)
		}
		if err := m.syncPool(t.Context(), "default"); err != nil && !isLater(err) {
			t.Fatal(err)
		}
		if claimed := m.Missing() > 0; claimed == gone {
			t.Errorf("gone: %t, claimed: %t", gone, claimed)
		}
	}
}

// The machine whose Node is another machine's gives no block back: the other one uses the same.
func TestWithdrawnNodeGivesNothingBack(t *testing.T) {
	b := newBlock("default", 0)
	now := metav1.Now()
	b.DeletionTimestamp = &now
	client := fake.NewSimpleClientset(b)
	cached := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	if err := cached.Add(b); err != nil {
		t.Fatal(err)
	}
	m := idle(client, cached)
	for _, withdrawn := range []bool{true, false} {
		if err := m.Withdraw(t.Context(), withdrawn); err != nil {
			t.Fatal(err)
		}
		if err := m.syncPool(t.Context(), "default"); err != nil && !isLater(err) {
			t.Fatal(err)
		}
		after, err := client.CoilV2().AddressBlocks().Get(t.Context(), b.Name, metav1.GetOptions{})
		if err != nil || (len(after.Finalizers) > 0) != withdrawn {
			t.Errorf("withdrawn: %t, finalizers %v, %v", withdrawn, after.Finalizers, err)
		}
	}
}

// The watch goes on without an event for a block that was lost. The node finds out when it
// reports the usage, and claims the block.
func TestBlockThatOnlyTheCacheHas(t *testing.T) {
	again := newBlock("default", 0)
	again.UID, again.Labels = "other-uid", map[string]string{v2.LabelNode: "other", v2.LabelPool: "default"}
	for name, objects := range map[string][]runtime.Object{"gone": nil, "another has its name": {again}} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewSimpleClientset(objects...)
			client.PrependReactor("patch", "addressblocks", func(clienttesting.Action) (bool, runtime.Object, error) {
				if objects == nil {
					return false, nil, nil
				}
				return true, nil, apierrors.NewConflict(v2.Resource("addressblocks"), "default-0", errors.New("another UID"))
			})
			ghosts := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
			if err := ghosts.Add(newBlock("default", 0)); err != nil {
				t.Fatal(err)
			}
			m := idle(client, ghosts)
			m.record.(*record).allocate("default-0", 1)
			for range 2 { // once is enough
				if err := m.syncStatus(t.Context(), struct{}{}); err != nil && !isLater(err) {
					t.Fatal(err)
				}
			}
			if got := m.Usable("default"); len(got) > 0 {
				t.Errorf("%v give addresses", got)
			}
			if err := m.syncPool(t.Context(), "default"); err != nil && !isLater(err) {
				t.Fatal(err)
			}
			rs, err := client.CoilV2().BlockRequests().List(t.Context(), metav1.ListOptions{})
			if err != nil || len(rs.Items) != 1 || rs.Items[0].Spec.Claim != "default-0" {
				t.Errorf("requests %+v, %v", rs.Items, err)
			}
			patches := 0
			for _, a := range client.Actions() {
				if a.GetVerb() == "patch" {
					patches++
				}
			}
			if patches != 1 {
				t.Errorf("the usage was reported %d times", patches)
			}
		})
	}
}

// A pool that lacks a block after a restore gets its subnet back: the block is claimed again then.
func TestClaimAfterThePoolChanged(t *testing.T) {
	pool := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: "default", UID: "pool", Generation: 1}}
	client := fake.NewSimpleClientset(pool)
	m := idle(client, cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil))
	m.record.(*record).allocate("default-0", 1)
	synctest.Test(t, func(t *testing.T) {
		claims := func() bool {
			t.Helper()
			time.Sleep(time.Hour)
			usage, _ := m.record.Usage(t.Context())
			claimed, _, err := m.syncLost(t.Context(), "default", usage)
			if err != nil {
				t.Fatal(err)
			}
			return claimed
		}
		if !claims() {
			t.Fatal("the block isn't claimed")
		}
		r := m.newRequest(claimName("node", nodeUID, "default-0"), "default")
		r.Spec.Claim = "default-0"
		m.claimAnswered(t.Context(), r, &v2.BlockRequestCondition{Reason: v2.ReasonPoolInvalid})
		if claims() {
			t.Error("claimed again, though the pool is the same")
		}
		pool.Generation++
		if _, err := client.CoilV2().AddressPools().Update(t.Context(), pool, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		if !claims() {
			t.Error("not claimed again, though the pool has changed")
		}
	})
}
