package assign

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/store"
)

// A pod's addresses are announced when all of its ADD is done, and withdrawn when the record has given them up and nobody can have
// got them yet.
func TestAnnounced(t *testing.T) {
	b := newBench(t)
	r := request("c1")
	r.Finish = func(context.Context, node.Sandbox) error {
		b.links.note("finished")
		return nil
	}
	for range 2 { // the second one is intact
		if _, err := b.Add(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{"finished", "changed default-0", "finished"}; !slices.Equal(b.links.told, want) {
		t.Errorf("told are %q, want %q", b.links.told, want)
	}
	b.links.told = nil
	b.links.check = func() { b.mustState(t, "c1", store.Releasing) }
	b.net.enter = func(_ context.Context, method string) {
		if method == "Withdraw" || method == "RemoveAll" {
			b.links.note(method)
		}
	}
	if err := b.Del(t.Context(), r.ID); err != nil {
		t.Fatal(err)
	}
	b.mustAgree(t)
	if want := []string{"withdraw [10.1.0.0 fd00::]", "Withdraw", "RemoveAll"}; !slices.Equal(b.links.told, want) {
		t.Errorf("told are %q, want %q", b.links.told, want)
	}
}

// An ADD that fails announces nothing that stays.
func TestFailedAddIsWithdrawn(t *testing.T) {
	b := newBench(t)
	r := request("c1")
	r.Finish = func(context.Context, node.Sandbox) error { return errors.New("no tunnel") }
	if _, err := b.Add(t.Context(), r); err == nil {
		t.Fatal("it succeeded")
	}
	if len(b.links.told) != 1 || !strings.HasPrefix(b.links.told[0], "withdraw ") {
		t.Errorf("told are %q", b.links.told)
	}
}

// An address that is announced still isn't freed: the runtime repeats the DEL.
func TestDelWaitsForWithdrawal(t *testing.T) {
	b := newBench(t)
	if _, err := b.Add(t.Context(), request("c1")); err != nil {
		t.Fatal(err)
	}
	b.links.fail = errors.New("no buffer space")
	if err := b.Del(t.Context(), request("c1").ID); !errors.Is(err, b.links.fail) {
		t.Errorf("Del: %v", err)
	}
	b.mustState(t, "c1", store.Releasing)
	b.net.mu.Lock()
	if len(b.net.pods) != 1 {
		t.Error("the link is gone")
	}
	b.net.mu.Unlock()
	b.links.fail = nil
	if err := b.Del(t.Context(), request("c1").ID); err != nil {
		t.Error(err)
	}
	b.mustAgree(t)
}
