package blocks

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// Etcd was restored from a backup: the node has a block again that it had given back, and of which pods of
// another node have addresses. It gives none of them and announces nothing at any time.
func TestReturnedBlockIsGivenBack(t *testing.T) {
	for _, c := range []struct {
		name  string
		setUp func(*bench, *v2.AddressBlock)
		kept  bool
	}{
		{"of a request that the node doesn't know", func(*bench, *v2.AddressBlock) {}, false},
		{"of no request, as one that an admin made", func(_ *bench, b *v2.AddressBlock) { delete(b.Labels, v2.LabelRequest) }, true},
		{"in use here", func(b *bench, block *v2.AddressBlock) { b.used = map[string]bool{block.Name: true} }, true},
		{"in the record", func(b *bench, block *v2.AddressBlock) {
			rec, _ := Recorded(block)
			// Without an address that cools down, the node may forget a block that isn't in the API yet.
			b.record.set(store.Usage{Block: rec, Cooling: 1})
		}, true},
		{"reserved", func(_ *bench, b *v2.AddressBlock) { b.Labels[v2.LabelReserved] = v2.ReservedValue }, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := runAged(t, time.Minute, nil)
			block := newBlock("default", 5)
			block.Labels[v2.LabelRequest] = "of an earlier time"
			c.setUp(b, block)
			exported := make(chan string, 1)
			b.exporter.before(func() {
				if got := b.exporter.exported(); got != "" {
					select {
					case exported <- got:
					default:
					}
				}
			})
			if _, err := b.client.CoilV2().AddressBlocks().Create(t.Context(), block, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			if c.kept {
				testkit.Eventually(t, 5*time.Second, "the block is announced", func() error {
					if got := b.exporter.exported(); got != block.Name {
						return fmt.Errorf("exported %q", got)
					}
					return nil
				})
				if b.count("delete", "addressblocks") > 0 {
					t.Error("the block was given back")
				}
				return
			}
			testkit.Eventually(t, 5*time.Second, "the block is given back", func() error {
				_, err := b.client.CoilV2().AddressBlocks().Get(t.Context(), block.Name, metav1.GetOptions{})
				if apierrors.IsNotFound(err) {
					return nil
				}
				return errors.Join(err, errors.New("it is there"))
			})
			select {
			case got := <-exported:
				t.Errorf("exported %q, want nothing at any time", got)
			default:
			}
			if usage, _ := b.record.Usage(t.Context()); len(usage) > 0 {
				t.Errorf("recorded: %v", usage)
			}
		})
	}
}

// A block that the node asked for, used and gave back comes back with its request: both are of a backup.
func TestBlockAndRequestComeBack(t *testing.T) {
	b := run(t)
	told := make(chan error, 1)
	generation := b.Generation("default")
	go func() { told <- b.Ask(t.Context(), "default", generation) }()
	testkit.Eventually(t, 5*time.Second, "the request is answered", func() error {
		if b.answer(t, 0, "") == 0 {
			return errors.New("no open request")
		}
		return nil
	})
	if err := <-told; err != nil {
		t.Fatal(err)
	}
	gone := func() {
		t.Helper()
		testkit.Eventually(t, 10*time.Second, "the block is given back", func() error {
			_, err := b.client.CoilV2().AddressBlocks().Get(t.Context(), "default-0", metav1.GetOptions{})
			usage, _ := b.record.Usage(t.Context())
			if !apierrors.IsNotFound(err) || len(b.requests(t))+len(usage) > 0 {
				return fmt.Errorf("%v, %d requests, recorded: %v", err, len(b.requests(t)), usage)
			}
			return nil
		})
	}
	gone()
	block := newBlock("default", 0)
	block.UID, block.Labels[v2.LabelRequest] = "block-of-request-1", "request-1"
	if m := b.Manager; m.requested(block) {
		t.Error("the block counts as asked for")
	}
	b.exporter.before(func() {
		if got := b.exporter.exported(); got != "" {
			t.Errorf("exported %q", got)
		}
	})
	if _, err := b.client.CoilV2().AddressBlocks().Create(t.Context(), block, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	gone()
}

// A BlockRequest was created without a clear answer, and the block that answers it is seen before it: the node has asked
// for the block. One that a backup brought back by the name of that request isn't.
func TestBlockSeenBeforeItsRequest(t *testing.T) {
	for _, tt := range []struct {
		name      string
		attempted bool
	}{{"of the attempt", true}, {"of a backup", false}} {
		t.Run(tt.name, func(t *testing.T) {
			client := fake.NewSimpleClientset()
			cached := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
			m := idle(client, cached)
			client.PrependReactor("create", "blockrequests", func(a clienttesting.Action) (bool, runtime.Object, error) {
				r := a.(clienttesting.CreateAction).GetObject().(*v2.BlockRequest).DeepCopy()
				r.UID = "unclear"
				if !tt.attempted {
					r.Annotations[v2.AnnotationAttempt] = "of an earlier time"
				}
				if err := client.Tracker().Add(r); err != nil {
					t.Error(err)
				}
				return true, nil, apierrors.NewServerTimeout(v2.Resource("blockrequests"), "create", 1)
			})
			if err := m.request(t.Context(), "default"); !apierrors.IsServerTimeout(err) {
				t.Fatalf("request: %v", err)
			}
			b := newBlock("default", 0)
			b.Labels[v2.LabelRequest] = "unclear"
			if err := errors.Join(client.Tracker().Add(b), cached.Add(b)); err != nil {
				t.Fatal(err)
			}
			if returned, err := m.returned(t.Context(), b); err != nil || returned == tt.attempted {
				t.Errorf("returned: %t, %v", returned, err)
			}
		})
	}
}

// While the Node is another machine's, its blocks and requests are that machine's: nothing is recorded,
// asked for or dealt with.
func TestWithdrawnNodeTakesNothing(t *testing.T) {
	b := newBlock("default", 0)
	client := fake.NewSimpleClientset(b)
	cached := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	if err := cached.Add(b); err != nil {
		t.Fatal(err)
	}
	m := idle(client, cached)
	m.record.(*record).allocate("default-7", 32) // full, and lost: the node wants more, and this one again
	for _, withdrawn := range []bool{true, false} {
		if err := m.Withdraw(t.Context(), withdrawn); err != nil {
			t.Fatal(err)
		}
		if err := m.syncPool(t.Context(), "default"); err != nil && !isLater(err) {
			t.Fatal(err)
		}
		usage, _ := m.record.Usage(t.Context())
		recorded := slices.ContainsFunc(usage, func(u store.Usage) bool { return u.Name == b.Name })
		rs, err := client.CoilV2().BlockRequests().List(t.Context(), metav1.ListOptions{})
		if err != nil || recorded == withdrawn || (len(rs.Items) == 0) != withdrawn {
			t.Errorf("withdrawn: %t, recorded: %t, %d requests, %v", withdrawn, recorded, len(rs.Items), err)
		}
	}
}

// A controller that doesn't know claims answers with another block: the lost one isn't the node's by that.
func TestClaimAnsweredWithAnotherBlock(t *testing.T) {
	b := runAged(t, time.Minute, map[string]int{"default-0": 1})
	testkit.Eventually(t, 5*time.Second, "the block is claimed", func() error {
		if len(b.requests(t)) == 0 {
			return errors.New("no claim")
		}
		return nil
	})
	if b.answer(t, 9, "") != 1 {
		t.Fatal("the claim isn't open")
	}
	testkit.Eventually(t, 5*time.Second, "the claim is made again, later", func() error {
		if l := b.lost.Get("default-0"); l.pause <= minClaimPause {
			return fmt.Errorf("%+v", l)
		}
		return nil
	})
}

// A recorded block that wasn't there for a moment is used again, since the cache shows no event of it.
func TestBlockThatCameBack(t *testing.T) {
	block := newBlock("default", 0)
	client := fake.NewSimpleClientset()
	cached := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	if err := cached.Add(block); err != nil {
		t.Fatal(err)
	}
	m := idle(client, cached)
	m.record.(*record).allocate("default-0", 1)
	if err := m.vanished(t.Context(), block); err != nil || len(m.Usable("default")) > 0 {
		t.Fatalf("usable: %v, %v", m.Usable("default"), err)
	}
	if err := client.Tracker().Add(block); err != nil {
		t.Fatal(err)
	}
	if err := m.syncPool(context.WithoutCancel(t.Context()), "default"); err != nil && !isLater(err) {
		t.Fatal(err)
	}
	if got := m.Usable("default"); !slices.Equal(got, []string{"default-0"}) {
		t.Errorf("usable: %v", got)
	}
}

// The API server has just come back and refuses the first attempts: the block is given back all the same.
func TestReturnedBlockThatCannotBeGivenBackAtOnce(t *testing.T) {
	b := runAged(t, time.Minute, nil)
	var refused atomic.Int32
	b.client.PrependReactor("delete", "addressblocks", func(clienttesting.Action) (bool, runtime.Object, error) {
		return refused.Add(1) <= 2, nil, errors.New("the API server is starting")
	})
	block := newBlock("default", 5)
	block.Labels[v2.LabelRequest] = "of an earlier time"
	if _, err := b.client.CoilV2().AddressBlocks().Create(t.Context(), block, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 10*time.Second, "the block is given back", func() error {
		_, err := b.client.CoilV2().AddressBlocks().Get(t.Context(), block.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(err, fmt.Errorf("it is there after %d attempts", refused.Load()))
	})
}

// A block that the node has released is back before the cache knew that it was gone, as when etcd is restored while the watch is away. It is given
// back again; one that the machine has disowned stays as it is.
func TestBlockComesBackUnseen(t *testing.T) {
	released := newBlock("default", 0)
	disowned := newBlock("default", 1)
	disowned.Annotations = map[string]string{v2.AnnotationDisowned: "node-uid"}
	leaving := newBlock("default", 2)
	leaving.DeletionTimestamp = &nodeCreated
	cached := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	m := idle(fake.NewSimpleClientset(released, disowned, leaving), cached)
	m.cfg.NodeUID = "node-uid"
	for _, b := range []*v2.AddressBlock{released, disowned, leaving} {
		testkit.Check(t, cached.Add(b))
		m.gone.Set(b.UID, true)
	}
	testkit.Check(t, m.forgetGone(t.Context(), "another"))
	if got := m.list(); len(got) > 0 {
		t.Errorf("the sync of another pool brings back %v", got)
	}
	testkit.Check(t, m.forgetGone(t.Context(), "default"))
	if got := m.list(); len(got) != 1 || got[0].Name != released.Name {
		t.Errorf("the node has again %v", got)
	}
}
