package assign

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// readOnly is a record that can't be written for a while.
type readOnly struct {
	store.Store
	on atomic.Bool
}

func (r *readOnly) refuse() error {
	if r.on.Load() {
		return fmt.Errorf("the test says so: %w", store.ErrReadOnly)
	}
	return nil
}

func (r *readOnly) Reserve(ctx context.Context, q store.Request) (store.Allocation, error) {
	if err := r.refuse(); err != nil {
		return store.Allocation{}, err
	}
	return r.Store.Reserve(ctx, q)
}

func (r *readOnly) Attach(ctx context.Context, id attachment.ID, w store.Wiring) error {
	return orElse(r.refuse(), func() error { return r.Store.Attach(ctx, id, w) })
}

func (r *readOnly) Release(ctx context.Context, id attachment.ID) (store.Allocation, error) {
	if err := r.refuse(); err != nil {
		return store.Allocation{}, err
	}
	return r.Store.Release(ctx, id)
}

func (r *readOnly) Cool(ctx context.Context, ids ...attachment.ID) error {
	return orElse(r.refuse(), func() error { return r.Store.Cool(ctx, ids...) })
}

func orElse(err error, do func() error) error {
	if err != nil {
		return err
	}
	return do()
}

func newReadOnlyBench(t *testing.T) (*bench, *readOnly) {
	t.Helper()
	b := newBench(t)
	r := &readOnly{Store: b.store}
	b.Assigner.store = r
	return b, r
}

// DEL takes the pod's network down while the record can't be written. The address
// isn't given to another pod before the record knows of it.
func TestDelWithoutWriting(t *testing.T) {
	b, disk := newReadOnlyBench(t)
	for _, c := range []string{"c1", "c2"} {
		if _, err := b.Add(t.Context(), request(c)); err != nil {
			t.Fatal(err)
		}
	}
	var mu sync.Mutex
	var steps []string
	b.net.enter = func(_ context.Context, method string) {
		mu.Lock()
		defer mu.Unlock()
		steps = append(steps, method)
	}
	disk.on.Store(true)
	if err := b.Del(t.Context(), request("c1").ID); err != nil {
		t.Fatalf("Del: %v", err)
	}
	b.net.mu.Lock()
	left := len(b.net.pods)
	b.net.mu.Unlock()
	// A coild that starts anew takes what has a link for a running pod.
	mu.Lock()
	if left != 1 || len(steps) < 2 || !slices.Equal(steps[:2], []string{"Withdraw", "RemoveAll"}) {
		t.Errorf("%d links are left, and the steps were %q; want one, routes and link withdrawn before the answer", left, steps)
	}
	mu.Unlock()
	b.mustState(t, "c1", store.Attached)
	for i := range 2 {
		if err := b.Del(t.Context(), request("c1").ID); err != nil {
			t.Errorf("Del number %d: %v", i+2, err)
		}
	}
	if err := b.Del(t.Context(), request("unknown").ID); err != nil {
		t.Errorf("Del of what isn't recorded: %v", err)
	}
	if err := b.Sweep(t.Context()); err != nil {
		t.Errorf("Sweep: %v", err)
	}
	if _, err := b.Add(t.Context(), request("c3")); !errors.Is(err, store.ErrReadOnly) {
		t.Errorf("Add: %v, want ErrReadOnly", err)
	}
	disk.on.Store(false)
	b.mustAgree(t, "c2")
	us, err := b.store.Usage(t.Context())
	if err != nil || us[0].Cooling != 1 {
		t.Errorf("%+v, %v; want the address of c1 to cool down", us, err)
	}
}

// DEL reports an object that it couldn't take down: the runtime must try again.
func TestDelWithoutWritingThatFails(t *testing.T) {
	for _, method := range []string{"Withdraw", "RemoveAll"} {
		t.Run(method, func(t *testing.T) {
			b, disk := newReadOnlyBench(t)
			if _, err := b.Add(t.Context(), request("c1")); err != nil {
				t.Fatal(err)
			}
			disk.on.Store(true)
			b.net.setFail(method, errors.New("netlink: busy"))
			if err := b.Del(t.Context(), request("c1").ID); err == nil {
				t.Fatal("Del succeeded though neither the kernel nor the record knows of it")
			}
			b.net.setFail(method, nil)
			if err := b.Del(t.Context(), request("c1").ID); err != nil {
				t.Error(err)
			}
			disk.on.Store(false)
			b.mustAgree(t)
		})
	}
}

// ADD of an attachment whose DEL isn't recorded yet waits for that.
func TestAddAfterDelWithoutWriting(t *testing.T) {
	b, disk := newReadOnlyBench(t)
	first, err := b.Add(t.Context(), request("c1"))
	if err != nil {
		t.Fatal(err)
	}
	disk.on.Store(true)
	if err := b.Del(t.Context(), request("c1").ID); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := b.Add(ctx, request("c1")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ADD before the DEL is recorded: %v", err)
	}
	disk.on.Store(false)
	second, err := b.Add(t.Context(), request("c1"))
	if err != nil || second.Address == first.Address {
		t.Errorf("ADD after the DEL is recorded: %s, %v; %s is cooling", second.Address, err, first.Address)
	}
	b.mustAgree(t, "c1")
}

// An ADD that fails because the disk filled up leaves nothing in the kernel at once, and
// nothing in the record later.
func TestAddWhoseRecordCannotBeWritten(t *testing.T) {
	b, disk := newReadOnlyBench(t)
	b.net.enter = func(_ context.Context, method string) {
		if method == "Attach" {
			disk.on.Store(true)
		}
	}
	if _, err := b.Add(t.Context(), request("c1")); !errors.Is(err, store.ErrReadOnly) {
		t.Errorf("Add: %v, want ErrReadOnly", err)
	}
	testkit.Eventually(t, 5*time.Second, "the link is removed", func() error {
		b.net.mu.Lock()
		defer b.net.mu.Unlock()
		if n := len(b.net.pods); n != 0 {
			return fmt.Errorf("%d links", n)
		}
		return nil
	})
	b.mustState(t, "c1", store.Pending)
	disk.on.Store(false)
	b.mustAgree(t)
}
