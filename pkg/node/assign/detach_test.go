package assign

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestDelStopsAnAddThatWaits(t *testing.T) {
	b := newBench(t)
	b.supply.usable = nil
	asked := make(chan struct{})
	b.supply.ask = func(ctx context.Context) error { close(asked); <-ctx.Done(); return ctx.Err() }
	b.cfg.BlockTimeout = time.Minute
	added := make(chan error, 1)
	go func() {
		_, err := b.Add(t.Context(), request("c1"))
		added <- err
	}()
	<-asked
	if err := b.Del(t.Context(), request("c1").ID); err != nil {
		t.Errorf("Del: %v", err)
	}
	if err := <-added; !errors.Is(err, node.ErrDeleted) {
		t.Errorf("Add: %v, want ErrDeleted", err)
	}
	b.mustAgree(t)
}

func TestDelStopsAnAddThatWires(t *testing.T) {
	t.Run("new sandbox", func(t *testing.T) { delWhileWiring(t, newBench(t), request("c1")) })
	t.Run("sandbox made again", func(t *testing.T) {
		b := newBench(t)
		if _, err := b.Add(t.Context(), request("c1")); err != nil {
			t.Fatal(err)
		}
		again := request("c1")
		again.Netns.Inode = 8
		delWhileWiring(t, b, again)
	})
}

func delWhileWiring(t *testing.T, b *bench, r node.AddRequest) {
	t.Helper()
	entered := make(chan struct{})
	var once sync.Once
	b.net.enter = func(ctx context.Context, method string) {
		if method == "Attach" {
			once.Do(func() { close(entered) })
			<-ctx.Done() // until the DEL has come
		}
	}
	added := make(chan error, 1)
	go func() {
		_, err := b.Add(t.Context(), r)
		added <- err
	}()
	<-entered
	if err := b.Del(t.Context(), r.ID); err != nil {
		t.Errorf("Del: %v", err)
	}
	if err := <-added; !errors.Is(err, node.ErrDeleted) {
		t.Errorf("Add: %v, want ErrDeleted", err)
	}
	b.mustAgree(t)
}

func TestDelIsIdempotent(t *testing.T) {
	b := newBench(t)
	id := request("c1").ID
	if err := b.Del(t.Context(), id); err != nil {
		t.Errorf("unknown container: %v", err)
	}
	if _, err := b.Add(t.Context(), request("c1")); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		if err := b.Del(t.Context(), id); err != nil {
			t.Errorf("Del number %d: %v", i+1, err)
		}
	}
	b.mustAgree(t)
}

// holdLinks makes the removal of links wait until release is called; held gets a value
// when one waits.
func (b *bench) holdLinks(t *testing.T) (held chan struct{}, release func()) {
	t.Helper()
	held = make(chan struct{}, 16)
	gate := make(chan struct{})
	release = sync.OnceFunc(func() { close(gate) })
	t.Cleanup(release)
	b.net.enter = func(_ context.Context, method string) {
		if method == "RemoveAll" {
			held <- struct{}{}
			<-gate
		}
	}
	return held, release
}

// DEL answers while the link is still there: nothing reaches the pod, and its address
// isn't given to another one.
func TestDelDoesNotWaitForTheLink(t *testing.T) {
	b := newBench(t)
	first, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	held, release := b.holdLinks(t)
	withdrawn := false
	enter := b.net.enter
	b.net.enter = func(ctx context.Context, method string) {
		if method == "Withdraw" {
			withdrawn = true
		}
		enter(ctx, method)
	}
	for i := range 2 {
		if err := b.Del(t.Context(), request("c1").ID); err != nil {
			t.Fatalf("Del number %d: %v", i+1, err)
		}
		if !withdrawn {
			t.Error("DEL answers before the routes are withdrawn")
		}
	}
	<-held
	b.mustState(t, "c1", store.Releasing)
	second, err := b.Add(t.Context(), request("c2"))
	if err != nil || second.Address == first.Address {
		t.Errorf("c2 got %s, %v; the link of c1 with %s is still there", second.Address, err, first.Address)
	}
	if err := b.Check(t.Context(), request("c1").ID, "", nil); !errors.Is(err, store.ErrState) {
		t.Errorf("Check: %v, want ErrState", err)
	}
	if err := b.GC(t.Context(), nil, time.Now()); err != nil {
		t.Errorf("GC: %v", err)
	}
	if err := b.Sweep(t.Context()); err != nil {
		t.Errorf("Sweep: %v", err)
	}
	release()
	b.mustAgree(t, "c2")
}

// ADD with the ID of an attachment whose link is being removed waits for that.
func TestAddWaitsForTheLinkOfItsID(t *testing.T) {
	b := newBench(t)
	first, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	held, release := b.holdLinks(t)
	if err := b.Del(t.Context(), request("c1").ID); err != nil {
		t.Fatal(err)
	}
	<-held
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := b.Add(ctx, request("c1")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ADD while the link is there: %v", err)
	}
	b.mustState(t, "c1", store.Releasing)
	release()
	second, err := b.Add(t.Context(), request("c1"))
	if err != nil || second.Address == first.Address {
		t.Errorf("ADD after the link is gone: %s, %v; %s is cooling", second.Address, err, first.Address)
	}
	b.mustAgree(t, "c1")
}

// Links whose DELs come while others are removed are removed together.
func TestLinksAreRemovedInGroups(t *testing.T) {
	b := newBench(t)
	for _, c := range []string{"c1", "c2", "c3", "c4"} {
		if _, err := b.Add(t.Context(), request(c)); err != nil {
			t.Fatal(err)
		}
	}
	held, release := b.holdLinks(t)
	if err := b.Del(t.Context(), request("c1").ID); err != nil {
		t.Fatal(err)
	}
	<-held
	for _, c := range []string{"c2", "c3", "c4"} {
		if err := b.Del(t.Context(), request(c).ID); err != nil {
			t.Fatal(err)
		}
	}
	release()
	b.mustAgree(t)
	if d := cmp.Diff([]int{1, 3}, b.net.groups); d != "" {
		t.Errorf("links removed at once (-want +got):\n%s", d)
	}
}

// A removal that fails is tried again without being asked, and the address isn't
// given meanwhile.
func TestRemovalThatFails(t *testing.T) {
	for _, method := range []string{"RemoveAll", "Forget"} {
		t.Run(method, func(t *testing.T) {
			b := newBench(t)
			first, err := b.Add(t.Context(), request("c1"))
			if err != nil {
				t.Fatal(err)
			}
			b.net.setFail(method, errors.New("netlink: busy"))
			if err := b.Del(t.Context(), request("c1").ID); err != nil {
				t.Fatal(err)
			}
			second, err := b.Add(t.Context(), request("c2"))
			if err != nil {
				t.Fatal(err)
			}
			if second.Address == first.Address {
				t.Errorf("%s was given again while its link or its flows are still there", first.Address)
			}
			b.mustState(t, "c1", store.Releasing)
			b.net.setFail(method, nil)
			b.mustAgree(t, "c2")
			b.net.mu.Lock()
			defer b.net.mu.Unlock()
			if !slices.Equal(b.net.forgotten, []ipam.Address{first.Address}) {
				t.Errorf("the flows of %v are forgotten, want those of %s", b.net.forgotten, first.Address)
			}
		})
	}
}

// A DEL that fails before that says so, and is finished by the next one or by Sweep.
func TestDelThatFails(t *testing.T) {
	for _, finish := range []struct {
		name string
		do   func(b *bench, ctx context.Context) error
	}{
		{"Del", func(b *bench, ctx context.Context) error { return b.Del(ctx, request("c1").ID) }},
		{"Sweep", func(b *bench, ctx context.Context) error { return b.Sweep(ctx) }},
	} {
		t.Run(finish.name, func(t *testing.T) {
			b := newBench(t)
			if _, err := b.Add(t.Context(), request("c1")); err != nil {
				t.Fatal(err)
			}
			b.net.setFail("Withdraw", errors.New("netlink: busy"))
			if err := b.Del(t.Context(), request("c1").ID); err == nil {
				t.Fatal("Del succeeded though packets still reach the pod")
			}
			b.mustState(t, "c1", store.Releasing)
			b.net.setFail("Withdraw", nil)
			// Sweep leaves alone what happened in the same millisecond.
			testkit.Eventually(t, 5*time.Second, finish.name+" finishes it", func() error {
				if err := finish.do(b, t.Context()); err != nil {
					return err
				}
				if a, err := b.store.Get(t.Context(), request("c1").ID); !errors.Is(err, store.ErrNotFound) {
					return fmt.Errorf("the record is %s, %v", a.State, err)
				}
				return nil
			})
			b.mustAgree(t)
		})
	}
}

// At the end, the links that are left are removed; a DEL that comes later has its
// link removed after the next start.
func TestRunEnds(t *testing.T) {
	b := newBench(t)
	for _, c := range []string{"c1", "c2", "c3"} {
		if _, err := b.Add(t.Context(), request(c)); err != nil {
			t.Fatal(err)
		}
	}
	held, release := b.holdLinks(t)
	for _, c := range []string{"c1", "c2"} {
		if err := b.Del(t.Context(), request(c).ID); err != nil {
			t.Fatal(err)
		}
	}
	<-held
	ended := make(chan struct{})
	go func() { b.end(); close(ended) }()
	release()
	<-ended
	b.mustAgree(t, "c3")
	if err := b.Del(t.Context(), request("c3").ID); err != nil {
		t.Error(err)
	}
	b.mustState(t, "c3", store.Releasing)
}
