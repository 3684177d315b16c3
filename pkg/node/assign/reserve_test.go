package assign

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// calls counts the calls of a method of the network.
func (b *bench) calls(method string) *atomic.Int32 {
	n := new(atomic.Int32)
	b.net.enter = func(_ context.Context, m string) {
		if m == method {
			n.Add(1)
		}
	}
	return n
}

// The link is made while the address is taken: neither waits for the other.
func TestLinkIsPreparedMeanwhile(t *testing.T) {
	b := newBench(t)
	asked := make(chan struct{})
	b.supply.usable = nil
	b.supply.ask = func(ctx context.Context) error {
		<-asked
		b.supply.usable = []string{"default-0"}
		return nil
	}
	b.net.enter = func(_ context.Context, method string) {
		if method == "Prepare" {
			close(asked)
		}
	}
	if _, err := b.Add(t.Context(), request("c1")); err != nil {
		t.Fatal(err)
	}
	b.mustAgree(t, "c1")
}

func TestPreparedLinkIsDiscarded(t *testing.T) {
	t.Run("no address", func(t *testing.T) {
		b := newBench(t)
		b.supply.usable = nil
		if _, err := b.Add(t.Context(), request("c1")); !errors.Is(err, errPoolEmpty) {
			t.Errorf("error %v", err)
		}
		b.mustAgree(t)
	})
	t.Run("attached already", func(t *testing.T) {
		b := newBench(t)
		for range 2 {
			if _, err := b.Add(t.Context(), request("c1")); err != nil {
				t.Fatal(err)
			}
		}
		b.mustAgree(t, "c1")
	})
	t.Run("another namespace", func(t *testing.T) {
		b := newBench(t)
		r := request("c1")
		for inode := range uint64(2) {
			r.Netns.Inode = 7 + inode
			if _, err := b.Add(t.Context(), r); err != nil {
				t.Fatal(err)
			}
		}
		b.mustAgree(t, "c1")
	})
	t.Run("the caller has gone", func(t *testing.T) {
		b := newBench(t)
		ctx, cancel := context.WithCancel(t.Context())
		b.supply.usable = nil
		b.supply.ask = func(ctx context.Context) error {
			testkit.Eventually(t, 5*time.Second, "the link is there", func() error {
				b.net.mu.Lock()
				defer b.net.mu.Unlock()
				if len(b.net.prepared) == 0 {
					return errors.New("not yet")
				}
				return nil
			})
			cancel()
			return context.Cause(ctx)
		}
		if _, err := b.Add(ctx, request("c1")); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
		b.mustAgree(t)
	})
}

// A link that can't be prepared is made when the address is known.
func TestAddWithoutPreparedLink(t *testing.T) {
	b := newBench(t)
	b.net.setFail("Prepare", errors.New("there is a link already"))
	if _, err := b.Add(t.Context(), request("c1")); err != nil {
		t.Fatal(err)
	}
	b.mustAgree(t, "c1")
}

// An ADD that is repeated again and again while its pool has no address costs no link.
func TestShortPoolCostsNoLinks(t *testing.T) {
	b := newBench(t)
	prepared := b.calls("Prepare")
	for i := range 4 {
		if _, err := b.Add(t.Context(), request(fmt.Sprint("c", i))); err != nil {
			t.Fatal(err)
		}
	}
	for range 5 {
		if _, err := b.Add(t.Context(), request("late")); err == nil {
			t.Fatal("there is no address left")
		}
	}
	if got, want := prepared.Load(), int32(5); got != want {
		t.Errorf("%d links were prepared for 4 pods and 5 attempts of another, want %d", got, want)
	}
	// With addresses again, links are prepared again.
	more := store.Block{Name: "default-1", Pool: "default", Block: ipam.Block{
		IPv4: netip.MustParsePrefix("10.1.1.0/30"), IPv6: netip.MustParsePrefix("fd00::1:0/126"),
	}}
	if err := b.store.SetBlocks(t.Context(), []store.Block{more}); err != nil {
		t.Fatal(err)
	}
	b.supply.usable = append(b.supply.usable, more.Name)
	for _, c := range []string{"late", "later"} {
		if _, err := b.Add(t.Context(), request(c)); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := prepared.Load(), int32(6); got != want {
		t.Errorf("%d links were prepared after the first ADD that found an address, want %d", got, want)
	}
	b.mustAgree(t, "c0", "c1", "c2", "c3", "late", "later")
}
