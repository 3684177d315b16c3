package storetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
)

const parallel = 32

func testConcurrentReserve(t *testing.T, n *node) {
	block := mustBlock("par-0", "10.32.0.0/26", "fd32::/122") // 64 addresses
	n.setBlocks(block)
	var wg sync.WaitGroup
	got := make([]map[ipam.Address]bool, parallel)
	for g := range parallel {
		got[g] = map[ipam.Address]bool{}
		wg.Go(func() {
			for i := 0; ; i++ {
				a, err := n.Reserve(n.ctx(), request(fmt.Sprintf("%d-%d", g, i), block))
				if errors.Is(err, store.ErrNoAddress) {
					return
				}
				if err != nil {
					t.Errorf("Reserve: %v", err)
					return
				}
				got[g][a.Address] = true
			}
		})
	}
	wg.Wait()
	all := map[ipam.Address]bool{}
	sum := 0
	for _, m := range got {
		for a := range m {
			all[a] = true
			sum++
		}
	}
	if sum != block.Size() || len(all) != block.Size() {
		t.Errorf("%d different addresses in %d answers, want %d", len(all), sum, block.Size())
	}
	wantUnique(t, n.list())
	n.wantUsage("par-0 64/0/64")
}

func testConcurrentSameAttachment(t *testing.T, n *node) {
	n.setBlocks(blockA, blockB)
	var wg sync.WaitGroup
	answers := make([]store.Allocation, parallel)
	for g := range parallel {
		wg.Go(func() {
			var err error
			if answers[g], err = n.Reserve(n.ctx(), request("p", blockA, blockB)); err != nil {
				t.Errorf("Reserve: %v", err)
			}
		})
	}
	wg.Wait()
	for _, a := range answers {
		if d := diffAllocation(answers[0], a); d != "" {
			t.Errorf("two answers for one attachment (-first +other):\n%s", d)
		}
	}
	n.wantUsage("default-0 1/0/4", "default-1 0/0/4")
}

// testConcurrentLifecycles runs whole lives side by side, with Yield, while
// others read and set blocks. Each address has one holder at a time.
func testConcurrentLifecycles(t *testing.T, n *node) {
	blocks := []store.Block{blockA, blockB, blockC} // fewer addresses than goroutines
	n.setBlocks(blocks...)
	var mu sync.Mutex
	holder := map[ipam.Address]string{}
	var wg sync.WaitGroup
	for g := range parallel {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			for i := range 12 {
				name := fmt.Sprintf("%d-%d", g, i)
				q := request(name, blocks...)
				q.Yield = true
				a, err := n.Reserve(n.ctx(), q)
				if errors.Is(err, store.ErrNoAddress) {
					if _, err := n.Usage(n.ctx()); err != nil {
						t.Error(err)
					}
					if err := n.SetBlocks(n.ctx(), blocks); err != nil {
						t.Error(err)
					}
					continue
				}
				if err != nil {
					t.Errorf("Reserve: %v", err)
					return
				}
				mu.Lock()
				if other, is := holder[a.Address]; is {
					t.Errorf("%s is given to %s and to %s", a.Address, other, name)
				}
				holder[a.Address] = name
				mu.Unlock()
				if r.IntN(2) == 0 {
					if err := n.Attach(n.ctx(), q.ID, wiring(name)); err != nil {
						t.Errorf("Attach: %v", err)
					}
				}
				as, err := n.List(n.ctx())
				if err != nil {
					t.Error(err)
				}
				wantUnique(t, as)
				mu.Lock()
				delete(holder, a.Address)
				mu.Unlock()
				if _, err := n.Release(n.ctx(), q.ID); err != nil {
					t.Errorf("Release: %v", err)
				}
				if err := n.Cool(n.ctx(), q.ID); err != nil {
					t.Errorf("Cool: %v", err)
				}
			}
		})
	}
	wg.Wait()
	if as := n.list(); len(as) != 0 {
		t.Errorf("left over: %v", as)
	}
}

// testCancelledContext ends contexts at random. The record is whole all the same:
// what was answered is there, and Release settles what wasn't.
func testCancelledContext(t *testing.T, n *node) {
	block := mustBlock("par-0", "10.32.0.0/22", "fd32::/118")
	n.setBlocks(block)
	ended, cancel := context.WithCancel(n.ctx())
	cancel()
	if _, err := n.Reserve(ended, request("ended", block)); !errors.Is(err, context.Canceled) {
		t.Errorf("Reserve with a context that has ended: %v", err)
	}
	if _, err := n.Get(n.ctx(), id("ended")); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("which was recorded: %v", err)
	}
	var mu sync.Mutex
	want := map[attachment.ID]ipam.Address{} // pending
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 2))
			for i := range 40 {
				name := fmt.Sprintf("%d-%d", g, i)
				ctx, cancel := context.WithCancel(n.ctx())
				started := make(chan struct{})
				go func() {
					<-started
					for range r.IntN(60000) {
						_ = ctx.Err() // a while that no timer can measure
					}
					cancel()
				}()
				close(started)
				a, err := n.Reserve(ctx, request(name, block))
				<-ctx.Done()
				if err == nil {
					mu.Lock()
					want[id(name)] = a.Address
					mu.Unlock()
					continue
				}
				if !errors.Is(err, context.Canceled) {
					t.Errorf("Reserve: %v", err)
				}
				if _, err = n.Release(n.ctx(), id(name)); err == nil {
					err = n.Cool(n.ctx(), id(name))
				}
				if err != nil && !errors.Is(err, store.ErrNotFound) {
					t.Errorf("undo: %v", err)
				}
			}
		})
	}
	wg.Wait()
	n.restart()
	as := n.list()
	wantUnique(t, as)
	got := map[attachment.ID]ipam.Address{}
	for _, a := range as {
		got[a.ID] = a.Address
	}
	if d := diffAllocation(want, got); d != "" {
		t.Errorf("answered and recorded addresses differ (-answered +recorded):\n%s", d)
	}
	t.Logf("%d of 320 were answered", len(want))
}
