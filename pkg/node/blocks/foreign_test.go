package blocks

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// A block of an earlier Node of the name comes by the watch, because the first list was of an
// earlier time. Another machine may use it, unless this one does. The API server refuses the first attempts.
func TestForeignBlockThatComesLate(t *testing.T) {
	for _, c := range []struct {
		name     string
		mark     func(*v2.AddressBlock)
		used     bool
		ours     bool
		reserved bool
	}{
		{name: "another machine's", mark: func(b *v2.AddressBlock) { b.Annotations[v2.AnnotationNodeUID] = "earlier" }},
		{name: "this machine's", mark: func(b *v2.AddressBlock) { b.Annotations[v2.AnnotationNodeUID] = "earlier" }, used: true, ours: true},
		{name: "without a UID, older than the Node", mark: func(b *v2.AddressBlock) {
			b.CreationTimestamp = metav1.NewTime(nodeCreated.Add(-time.Second))
		}},
		{name: "reserved for the Node's name", mark: func(b *v2.AddressBlock) {
			b.Annotations[v2.AnnotationNodeUID], b.Labels[v2.LabelReserved] = "earlier", v2.ReservedValue
		}, ours: true, reserved: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := v2.AnnotationDisowned // the annotation that gets the Node's UID
			if c.ours {
				want = v2.AnnotationNodeUID
			}
			b := runAged(t, time.Minute, nil)
			b.used = map[string]bool{"default-5": c.used}
			var attempts atomic.Int32
			b.client.PrependReactor("patch", "addressblocks", func(clienttesting.Action) (bool, runtime.Object, error) {
				return attempts.Add(1) <= 2, nil, errors.New("the API server is starting")
			})
			block := newBlock("default", 5)
			block.Annotations = map[string]string{}
			c.mark(block)
			if _, err := b.client.CoilV2().AddressBlocks().Create(t.Context(), block, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			testkit.Eventually(t, 10*time.Second, want+" is written", func() error {
				if !c.ours && (len(b.Usable("default")) > 0 || b.exporter.exported() != "") {
					t.Fatalf("usable: %v, exported: %q, want nothing at any time", b.Usable("default"), b.exporter.exported())
				}
				now, err := b.client.CoilV2().AddressBlocks().Get(t.Context(), block.Name, metav1.GetOptions{})
				if err == nil && now.Annotations[want] != string(nodeUID) {
					err = fmt.Errorf("annotations %v", now.Annotations)
				}
				return err
			})
			testkit.Eventually(t, 5*time.Second, "the block is used as it should be", func() error {
				if got := b.Usable("default"); slices.Equal(got, []string{block.Name}) != (c.ours && !c.reserved) {
					return fmt.Errorf("usable: %v", got)
				}
				if got := b.exporter.exported(); (got == block.Name) != c.ours {
					return fmt.Errorf("exported: %q", got)
				}
				return nil
			})
		})
	}
}

// A block of Coil 2.x names no Node. One that was made since the Node was is its own.
func TestForeign(t *testing.T) {
	second := func(n int) metav1.Time { return metav1.NewTime(nodeCreated.Add(time.Duration(n) * time.Second)) }
	for _, c := range []struct {
		uid     string
		created metav1.Time
		want    bool
	}{
		{"", second(-1), true}, {"", second(0), false}, {"", second(1), false},
		{string(nodeUID), second(-1), false}, {string(nodeUID), second(1), false},
		{"other", second(1), true},
	} {
		b := newBlock("default", 0)
		b.CreationTimestamp = c.created
		if c.uid != "" {
			b.Annotations = map[string]string{v2.AnnotationNodeUID: c.uid}
		}
		m := idle(fake.NewSimpleClientset(b), cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil))
		if got := m.foreign(b); got != c.want {
			t.Errorf("UID %q, created %s: foreign is %t", c.uid, c.created, got)
		}
		// A claimed block is the Node's at once, though the cache shows it as it was.
		if err := m.claim(t.Context(), b); err != nil || m.foreign(b) {
			t.Errorf("UID %q, created %s: foreign after it was claimed, %v", c.uid, c.created, err)
		}
	}
}

// A block that the API server has for another node isn't announced here for addresses that only
// cool down, and is as long as pods have some.
func TestBlockOfAnotherNodeIsNotAnnounced(t *testing.T) {
	for allocated, want := range []string{"default-0", "default-0 default-1"} {
		other := newBlock("default", 1)
		other.Labels[v2.LabelNode] = "other"
		b := runAged(t, time.Minute, nil, newBlock("default", 0), other)
		b.record.set(store.Usage{Block: store.Block{Name: "default-1", Pool: "default"}, Allocated: allocated, Cooling: 3})
		testkit.Eventually(t, 5*time.Second, "the node's own block is exported", func() error {
			if b.exporter.exported() == "" {
				return errors.New("not yet")
			}
			return nil
		})
		if err := b.Export(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := b.exporter.exported(); got != want {
			t.Errorf("exported %q with %d addresses in use, want %q", got, allocated, want)
		}
	}
}

// It isn't announced any more as soon as the last of these pods has gone, while their addresses cool down.
func TestBlockOfAnotherNodeIsWithdrawnWithTheLastPod(t *testing.T) {
	other := newBlock("default", 1)
	other.Labels[v2.LabelNode] = "other"
	b := runAged(t, time.Minute, map[string]int{"default-1": 1}, newBlock("default", 0), other)
	exported := func(want string) {
		t.Helper()
		testkit.Eventually(t, 5*time.Second, "exactly "+want+" is exported", func() error {
			if got := b.exporter.exported(); got != want {
				return fmt.Errorf("exported: %q", got)
			}
			return nil
		})
	}
	if err := b.Export(t.Context()); err != nil {
		t.Fatal(err)
	}
	exported("default-0 default-1")
	b.record.set(store.Usage{Block: testkit.Must(Recorded(other))(t), Cooling: 1})
	b.Changed("default")
	exported("default-0")
}

// The manager forgets blocks that came and went once the cache knows.
func TestBlocksThatWentAreForgotten(t *testing.T) {
	client := fake.NewSimpleClientset()
	blockCache := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	m := idle(client, blockCache)
	sync := func() {
		t.Helper()
		if err := m.syncPool(t.Context(), "default"); err != nil && !isLater(err) {
			t.Fatal(err)
		}
	}
	b := newBlock("default", 0)
	if err := errors.Join(client.Tracker().Add(b), blockCache.Add(b), m.claim(t.Context(), b)); err != nil {
		t.Fatal(err)
	}
	sync()
	if err := m.release(t.Context(), b.Name); err != nil {
		t.Fatal(err)
	}
	sync()
	if !m.gone.Get(b.UID) {
		t.Error("the block was forgotten while the cache still shows it")
	}
	if err := blockCache.Delete(b); err != nil {
		t.Fatal(err)
	}
	sync()
	if n := len(m.gone.Copy()) + len(m.claimed.Copy()) + len(m.since.Copy()) + len(m.offered.Copy()) + len(m.disputed.Copy()) + len(m.reported.Copy()); n > 0 {
		t.Errorf("%d things are remembered of a block that went", n)
	}
}
