package blocks

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
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

func TestReleaseOfEmptyBlock(t *testing.T) {
	b := runWith(t, map[string]int{"default-0": 1}, newBlock("default", 0), newBlock("default", 1))
	testkit.Eventually(t, 10*time.Second, "the empty block is released", func() error {
		b.Changed("default")
		if got := b.exporter.exported(); got != "default-0" {
			return fmt.Errorf("exported: %s", got)
		}
		_, err := b.client.CoilV2().AddressBlocks().Get(t.Context(), "default-1", metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("block default-1: %v", err)
		}
		return nil
	})
	if _, err := b.client.CoilV2().AddressBlocks().Get(t.Context(), "default-0", metav1.GetOptions{}); err != nil {
		t.Errorf("the block in use: %v", err)
	}
	if got := b.Usable("default"); !slices.Equal(got, []string{"default-0"}) {
		t.Errorf("usable: %v", got)
	}
}

// Somebody removed the finalizer of a block: another node may get it.
func TestLostBlockIsForgotten(t *testing.T) {
	b := runAged(t, time.Minute, map[string]int{"default-0": 1, "default-1": 1}, newBlock("default", 0), newBlock("default", 1))
	exported := func(want string) {
		t.Helper()
		testkit.Eventually(t, 10*time.Second, "exported: "+want, func() error {
			b.Changed("default")
			if got := b.exporter.exported(); got != want {
				return fmt.Errorf("exported: %s", got)
			}
			return nil
		})
	}
	exported("default-0 default-1")
	lose := func(name string) {
		t.Helper()
		if err := b.client.Tracker().Delete(v2.Resource("addressblocks").WithVersion("v2"), "", name); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, 10*time.Second, "the cache knows", func() error {
			if b.blocks.Find(name) != nil {
				return errors.New("not yet")
			}
			return nil
		})
	}
	lose("default-1")
	if err := b.syncPool(t.Context(), "default"); err != nil {
		t.Fatal(err)
	}
	exported("default-0 default-1") // a pod has an address of it
	b.record.allocate("default-1", 0)
	exported("default-0")
	b.record.allocate("default-0", 0)
	lose("default-0")
	exported("")
}

// The API server did what it was asked for, but its answer was lost, and the cache is of
// an earlier time.
func TestReleaseWithoutAnAnswer(t *testing.T) {
	old, live := newBlock("default", 0), newBlock("default", 0)
	now := metav1.Now()
	live.DeletionTimestamp = &now
	client := fake.NewSimpleClientset(live)
	tracker, addressBlocks := client.Tracker(), v2.Resource("addressblocks").WithVersion("v2")
	lost := true
	client.PrependReactor("update", "addressblocks", func(clienttesting.Action) (bool, runtime.Object, error) {
		if !lost {
			return true, nil, apierrors.NewServerTimeout(addressBlocks.GroupResource(), "update", 1)
		}
		return true, nil, errors.Join(tracker.Delete(addressBlocks, "", old.Name), apierrors.NewServerTimeout(addressBlocks.GroupResource(), "update", 1))
	})
	blockCache := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	if err := blockCache.Add(old); err != nil {
		t.Fatal(err)
	}
	m := idle(client, blockCache)
	if err := m.syncPool(t.Context(), "default"); err != nil && !isLater(err) {
		t.Fatal(err)
	}
	check := func(happened bool) {
		t.Helper()
		usage, err := m.record.Usage(t.Context())
		if got := m.Usable("default"); len(got) > 0 || len(usage) > 0 || err != nil {
			t.Errorf("usable: %v, recorded: %v, %v; want none: any node may get the block", got, usage, err)
		}
		if _, err := tracker.Get(addressBlocks, "", old.Name); apierrors.IsNotFound(err) != happened {
			t.Errorf("the block on the server: %v, want it gone: %t", err, happened)
		}
	}
	lost = false // the request, rather than the answer: it may still happen
	if err := m.release(t.Context(), old.Name); err == nil {
		t.Error("the release succeeded")
	}
	check(false)
	if err := m.syncPool(t.Context(), "default"); !apierrors.IsServerTimeout(err) {
		t.Errorf("the release that goes on: %v", err)
	}
	check(false)
	lost = true
	if err := m.syncPool(t.Context(), "default"); !apierrors.IsServerTimeout(err) {
		t.Errorf("the release that goes on: %v", err)
	}
	check(true)
	if err := m.syncPool(t.Context(), "default"); err != nil && !isLater(err) {
		t.Fatal(err)
	}
	check(true)
	if unsure := m.unsure.Copy(); len(unsure) > 0 {
		t.Errorf("still unsure of %v", unsure)
	}
}

// isLater says whether the loop is only to come back.
func isLater(err error) bool {
	_, failed := errors.AsType[*apierrors.StatusError](err)
	return !failed && strings.Contains(err.Error(), "again after")
}
