package floating

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/testkit"
)

// standby lets connections of the address be copied all the time, or not, as the controller of an Egress does.
func (f *fixture) standby(on bool) {
	f.t.Helper()
	patch := testkit.Must(json.Marshal(map[string]any{"floating": map[string]any{"standby": on}}))(f.t)
	testkit.Must(f.Coil.CoilV2().AddressBlocks().Patch(f.t.Context(), f.Block, types.MergePatchType, patch, metav1.PatchOptions{}))(f.t)
}

// condition waits until the block says whether connections are copied; empty is that it says nothing.
func (f *fixture) condition(want string) {
	f.t.Helper()
	testkit.Eventually(f.t, 30*time.Second, "the condition "+v2.BlockStandbyInStep, func() error {
		b, err := f.Coil.CoilV2().AddressBlocks().Get(f.t.Context(), f.Block, metav1.GetOptions{})
		if err != nil {
			return err
		}
		got := ""
		if c := meta.FindStatusCondition(b.Status.Conditions, v2.BlockStandbyInStep); c != nil {
			got = fmt.Sprint(c.Status, " ", c.Reason)
		}
		if got != want {
			return fmt.Errorf("%q, want %q: %+v", got, want, b.Status.Conditions)
		}
		return nil
	})
}

// keeps waits until a router knows connections.
func (f *fixture) keeps(table *conntrack.Table, want []string, what string) {
	f.t.Helper()
	testkit.Eventually(f.t, 20*time.Second, what, func() error {
		got, err := f.known(table)
		if err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("%d connections, want %d", len(got), len(want))
		}
		return err
	})
}

// The router of the node that takes the address knows its connections when the node of the holder loses power.
func TestStandbyOutlivesPowerCut(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "standby", 3)
	f.held(0)
	before, after, third := f.flows(0), f.flows(1), f.flows(2)
	want := f.connections(before, 50)
	f.standby(true)
	f.keeps(after, want, "the first successor's router knows the connections")
	f.condition("True InStep")
	if got := testkit.Must(f.known(third))(t); len(got) > 0 {
		t.Errorf("another router has %d connections", len(got))
	}
	// They follow the order of successors, and are left nowhere.
	testkit.Check(t, f.Place(t.Context(), "", 0, 2, 1))
	f.keeps(third, want, "the next first successor's router knows the connections")
	f.keeps(after, nil, "the router of the one before has forgotten them")
	testkit.Check(t, f.Place(t.Context(), "", 0, 1, 2))
	f.keeps(after, want, "the first successor's router knows the connections again")
	f.condition("True InStep")

	testkit.Check(t, f.Candidates[0].PowerCut(t.Context()))
	f.held(1)
	if got := testkit.Must(f.known(after))(t); !slices.Equal(got, want) {
		t.Errorf("the router of the next holder knows %d connections, want %d", len(got), len(want))
	}
	if !testkit.FloatingForm.Long() {
		testkit.Check(t, f.Candidates[0].PowerOn(t.Context()), f.Candidates[0].Start(t.Context()))
		return
	}
	f.condition("False Behind") // the node without power is the first of the others
	testkit.Check(t, f.Place(t.Context(), "", 1, 2))
	f.keeps(third, want, "they are copied on")
	f.condition("True InStep")
	testkit.Check(t, f.Place(t.Context(), "", 1))
	f.condition("False NoFollower")
	f.keeps(third, nil, "the router of the one before has forgotten them")
	f.standby(false)
	f.condition("")
	testkit.Check(t, f.Candidates[0].PowerOn(t.Context()), f.Candidates[0].Start(t.Context()))
}
