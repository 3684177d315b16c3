package blocks

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// While two controllers believe to lead, each makes a block for a request. Only the one
// that becomes the answer gives addresses, whichever comes first, so that the node never
// holds more than it needs; the other one goes back.
func TestSurplusBlock(t *testing.T) {
	b := run(t)
	ctx := t.Context()
	asked := make(chan error, 1)
	generation := b.Generation("default")
	go func() { asked <- b.Ask(ctx, "default", generation) }()
	var uid types.UID
	testkit.Eventually(t, 5*time.Second, "a request", func() error {
		rs := b.requests(t)
		if len(rs) == 0 {
			return errors.New("none")
		}
		uid = rs[0].UID
		return nil
	})
	extra := newBlock("default", 9)
	extra.Labels[v2.LabelRequest] = string(uid)
	if _, err := b.client.CoilV2().AddressBlocks().Create(ctx, extra, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 5*time.Second, "the block without an answer is recorded", func() error {
		if us, _ := b.record.Usage(ctx); len(us) != 1 {
			return fmt.Errorf("%d blocks", len(us))
		}
		return nil
	})
	select {
	case err := <-asked:
		t.Errorf("Ask ended before there was an answer: %v", err)
	default:
	}
	if got := b.Usable("default"); len(got) > 0 {
		t.Errorf("%v give addresses before there is an answer", got)
	}
	b.record.allocate("default-0", 32) // by then, or the node may give back the answer, too: nobody waits
	if n := b.answer(t, 0, ""); n != 1 {
		t.Fatalf("%d requests were open", n)
	}
	if err := <-asked; err != nil {
		t.Fatal(err)
	}
	if got := b.Usable("default"); !slices.Equal(got, []string{"default-0"}) {
		t.Errorf("%v give addresses, want the answer only", got)
	}
	b.Changed("default")
	testkit.Eventually(t, 10*time.Second, "the surplus block is given back", func() error {
		left, err := b.client.CoilV2().AddressBlocks().List(context.WithoutCancel(ctx), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, x := range left.Items {
			if x.Name == extra.Name && len(x.Finalizers) > 0 {
				return errors.New("the node keeps it")
			}
		}
		return nil
	})
}

// A block that was made for a request of which the node knows nothing any more, as after
// a restart, is the node's.
func TestBlockOfForgottenRequest(t *testing.T) {
	block := newBlock("default", 3)
	block.Labels[v2.LabelRequest] = "long-ago"
	b := runWith(t, map[string]int{block.Name: 1}, block)
	if got := b.Usable("default"); !slices.Equal(got, []string{block.Name}) {
		t.Errorf("%v give addresses, want %s", got, block.Name)
	}
}
