package blocks

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// setClosed labels a block as coil-ipam-controller does; "" removes the label.
func (b *bench) setClosed(t *testing.T, name, value string) {
	t.Helper()
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, v2.LabelClosed, value)
	if value == "" {
		patch = fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, v2.LabelClosed)
	}
	testkit.Must(b.client.CoilV2().AddressBlocks().Patch(t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}))(t)
}

// A pool drains: its blocks give nothing, a pod that wants an address is told why, and blocks go back when they are empty. What has addresses goes on.
func TestClosedBlocks(t *testing.T) {
	b := runAged(t, time.Hour, map[string]int{"default-0": 3, "default-1": 1}, newBlock("default", 0), newBlock("default", 1))
	usable := func(want ...string) {
		t.Helper()
		testkit.Eventually(t, 5*time.Second, fmt.Sprintf("%q give addresses", want), func() error {
			if got := b.Usable("default"); !slices.Equal(got, want) {
				return fmt.Errorf("usable: %q", got)
			}
			return nil
		})
	}
	usable("default-0", "default-1")
	b.setClosed(t, "default-0", v2.ClosedExcluded)
	usable("default-1")
	b.setClosed(t, "default-0", v2.ClosedDrain)
	b.setClosed(t, "default-1", v2.ClosedDrain)
	usable()
	told := make(chan error, 1)
	go func() { told <- b.Ask(t.Context(), "default", b.Generation("default")) }()
	testkit.Eventually(t, 5*time.Second, "the node asks, and is refused", func() error {
		if b.answer(t, 9, v2.ReasonPoolDraining) == 0 {
			return errors.New("no open request")
		}
		return nil
	})
	if err := <-told; err == nil {
		t.Error("the pod isn't refused")
	}
	if got := b.exporter.exported(); got != "default-0 default-1" {
		t.Errorf("exported %q: pods have addresses of both", got)
	}

	// The last pod with an address of default-1 ends.
	b.record.allocate("default-1", 0)
	b.Changed("default")
	testkit.Eventually(t, 5*time.Second, "the empty block goes back, however young", func() error {
		_, err := b.client.CoilV2().AddressBlocks().Get(t.Context(), "default-1", metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("block default-1: %v", err)
		}
		return nil
	})

	// Somebody waits when the pool drains no longer: the block that the node has is news.
	generation := b.Generation("default")
	b.setClosed(t, "default-0", "")
	usable("default-0")
	testkit.Eventually(t, 5*time.Second, "who waits is told", func() error {
		if b.Generation("default") == generation {
			return errors.New("no news")
		}
		return nil
	})
}
