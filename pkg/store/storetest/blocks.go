package storetest

import (
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/store"
)

func testBlocks(t *testing.T, n *node) {
	n.wantUsage()
	n.noAddress(blockA)
	n.setBlocks(blockB, blockA)
	n.wantUsage("default-0 0/0/4", "default-1 0/0/4")
	n.setBlocks(blockC)
	n.setBlocks()
	n.wantUsage("default-0 0/0/4", "default-1 0/0/4", "default-2 0/0/4")
	us, err := n.Usage(n.ctx())
	if err != nil {
		t.Fatal(err)
	}
	if us[1].Block != blockB {
		t.Errorf("block %+v became %+v", blockB, us[1].Block)
	}
	n.restart()
	n.wantUsage("default-0 0/0/4", "default-1 0/0/4", "default-2 0/0/4")

	bad := blockA
	bad.Name = "bad"
	bad.IPv4 = blockB.IPv4
	bad.IPv6 = mustBlock("x-0", "10.9.0.0/31", "fd09::/127").IPv6
	if err := n.SetBlocks(n.ctx(), []store.Block{bad}); err == nil {
		t.Error("a block of unequal prefixes is recorded")
	}
	bad = blockA
	bad.Name = ""
	if err := n.SetBlocks(n.ctx(), []store.Block{bad}); err == nil {
		t.Error("a block without name is recorded")
	}
	n.wantUsage("default-0 0/0/4", "default-1 0/0/4", "default-2 0/0/4")
}

func testBlockChangesRange(t *testing.T, n *node) {
	moved := blockA
	moved.Block = mustBlock("x-0", "10.7.0.0/31", "fd07::/127").Block
	n.setBlocks(blockA)
	n.reserve("p", blockA)
	wantErr(t, "range changes while an address is pending", n.SetBlocks(n.ctx(), []store.Block{moved, blockB}), store.ErrInUse)
	n.wantUsage("default-0 1/0/4", "default-1 0/0/4")
	n.noAddress(blockA) // one of both ranges is wrong
	n.setBlocks(blockA)
	n.reserve("o", blockA)
	n.free("o")
	n.free("p")
	wantErr(t, "range changes while an address is cooling", n.SetBlocks(n.ctx(), []store.Block{moved}), store.ErrInUse)
	otherPool := blockA
	otherPool.Pool = "other"
	wantErr(t, "pool changes while an address is cooling", n.SetBlocks(n.ctx(), []store.Block{otherPool}), store.ErrInUse)
	n.clock.Advance(coolDown)
	n.setBlocks(moved)
	n.wantUsage("default-0 0/0/2", "default-1 0/0/4")
	wantAddr(t, "from the new range", n.reserve("q", moved), at(moved, 0))
	wantAddr(t, "from the new range", n.reserve("r", moved), at(moved, 1))
	n.noAddress(moved)
}

func testForgetBlock(t *testing.T, n *node) {
	if err := n.ForgetBlock(n.ctx(), "unknown"); err != nil {
		t.Fatalf("forget a block that isn't known: %v", err)
	}
	n.setBlocks(blockA, blockB)
	n.reserve("p", blockA)
	wantErr(t, "forget with a pending address", n.ForgetBlock(n.ctx(), blockA.Name), store.ErrInUse)
	n.attach("p")
	wantErr(t, "forget with an attached address", n.ForgetBlock(n.ctx(), blockA.Name), store.ErrInUse)
	n.release("p")
	wantErr(t, "forget with a releasing address", n.ForgetBlock(n.ctx(), blockA.Name), store.ErrInUse)
	n.free("p")
	wantErr(t, "forget with a cooling address", n.ForgetBlock(n.ctx(), blockA.Name), store.ErrInUse)
	n.clock.Advance(coolDown - time.Millisecond)
	wantErr(t, "forget just before the cool-down ends", n.ForgetBlock(n.ctx(), blockA.Name), store.ErrInUse)
	n.wantUsage("default-0 0/1/4", "default-1 0/0/4")
	n.clock.Advance(time.Millisecond)
	for range 2 {
		if err := n.ForgetBlock(n.ctx(), blockA.Name); err != nil {
			t.Fatal(err)
		}
	}
	n.wantUsage("default-1 0/0/4")
	n.noAddress(blockA)
	n.restart()
	n.wantUsage("default-1 0/0/4")
	n.setBlocks(blockA)
	wantAddr(t, "from a block that came back", n.reserve("q", blockA), at(blockA, 0))
}

func testForgetAdoptedBlock(t *testing.T, n *node) {
	if err := n.AdoptBlocks(n.ctx(), []store.Block{blockA}); err != nil {
		t.Fatal(err)
	}
	wantErr(t, "forget while addresses of unknown use cool", n.ForgetBlock(n.ctx(), blockA.Name), store.ErrInUse)
	n.clock.Advance(coolDown)
	if err := n.ForgetBlock(n.ctx(), blockA.Name); err != nil {
		t.Fatal(err)
	}

	// When the use of all its addresses is known, theirs is what counts.
	n.setBlocks(blockB)
	for _, p := range []string{"0", "1", "2", "3"} {
		n.reserve(p, blockB)
	}
	for _, p := range []string{"0", "1", "2", "3"} {
		n.free(p)
	}
	n.clock.Advance(coolDown / 2)
	if err := n.AdoptBlocks(n.ctx(), []store.Block{blockB}); err != nil {
		t.Fatal(err)
	}
	n.clock.Advance(coolDown / 2)
	n.wantUsage("default-1 0/0/4")
	if err := n.ForgetBlock(n.ctx(), blockB.Name); err != nil {
		t.Fatal(err)
	}
}

func testAdoptBlocks(t *testing.T, n *node) {
	n.setBlocks(blockB)
	n.reserve("b", blockB)
	if err := n.AdoptBlocks(n.ctx(), []store.Block{blockA, blockB}); err != nil {
		t.Fatal(err)
	}
	n.wantUsage("default-0 0/4/4", "default-1 1/3/4")
	n.noAddress(blockA, blockB)

	// SetBlocks knows nothing of the history, so it must not shorten it.
	n.setBlocks(blockA, blockB)
	n.noAddress(blockA, blockB)
	n.clock.Advance(coolDown - time.Millisecond)
	n.noAddress(blockA, blockB)
	n.restart()
	n.noAddress(blockA, blockB)
	n.wantUsage("default-0 0/4/4", "default-1 1/3/4")
	n.clock.Advance(time.Millisecond)
	n.wantUsage("default-0 0/0/4", "default-1 1/0/4")
	wantAddr(t, "after the cool-down of the block", n.reserve("p", blockA), at(blockA, 0))

	if err := n.AdoptBlocks(n.ctx(), []store.Block{blockA}); err != nil {
		t.Fatal(err)
	}
	n.wantUsage("default-0 1/3/4", "default-1 1/0/4")
	n.noAddress(blockA)

	// In another boot, it rests as long as the machine is up.
	n.reboot(coolDown - time.Millisecond)
	n.noAddress(blockA)
	n.clock.Advance(time.Millisecond)
	wantAddr(t, "after the cool-down in another boot", n.reserve("q", blockA), at(blockA, 1))
}

func testAdoptedBlockYields(t *testing.T, n *node) {
	n.setBlocks(blockA)
	n.reserve("a0", blockA)
	n.reserve("a1", blockA)
	n.reserve("a2", blockA)
	n.reserve("a3", blockA)
	n.free("a2") // before the adoption
	n.clock.Advance(time.Second)
	if err := n.AdoptBlocks(n.ctx(), []store.Block{blockB}); err != nil {
		t.Fatal(err)
	}
	n.clock.Advance(time.Second)
	n.free("a1") // after it
	n.noAddress(blockA, blockB)
	wantAddr(t, "freed before the adoption", n.yield("1", blockB, blockA), at(blockA, 2))
	for i := range 4 {
		wantAddr(t, "of unknown use", n.yield(string(rune('a'+i)), blockA, blockB), at(blockB, i))
	}
	wantAddr(t, "freed after the adoption", n.yield("6", blockB, blockA), at(blockA, 1))
	r := request("7", blockA, blockB)
	r.Yield = true
	_, err := n.Reserve(n.ctx(), r)
	wantErr(t, "yield when all are allocated", err, store.ErrNoAddress)
}

// Blocks of two pools may overlap by mistake: an address is given once all the same.
func testOverlappingBlocks(t *testing.T, n *node) {
	other := blockA
	other.Name, other.Pool = "other-0", "other"
	n.setBlocks(blockA, other)
	seen := map[string]bool{}
	for i := range 4 {
		b := []store.Block{blockA, other}[i%2]
		a := n.reserve(string(rune('a'+i)), b)
		if seen[a] {
			t.Fatalf("%s is given twice", a)
		}
		seen[a] = true
	}
	n.noAddress(blockA)
	n.noAddress(other)
	r := request("y", other)
	r.Yield = true
	_, err := n.Reserve(n.ctx(), r)
	wantErr(t, "yield when all are allocated", err, store.ErrNoAddress)
	wantUnique(t, n.list())

	// The addresses of one of the blocks return to it, also when the other is forgotten.
	for i := range 4 {
		n.free(string(rune('a' + i)))
	}
	n.clock.Advance(coolDown)
	if err := n.ForgetBlock(n.ctx(), other.Name); err != nil {
		t.Fatal(err)
	}
	n.restart()
	for i := range 4 {
		n.reserve(string(rune('k'+i)), blockA)
	}
	wantUnique(t, n.list())
}

func testBlockOfOneAddress(t *testing.T, n *node) {
	one := mustBlock("default-9", "10.0.9.0/32", "fd00::9:0/128")
	n.setBlocks(one)
	wantAddr(t, "the only address", n.reserve("p", one), at(one, 0))
	n.attach("p")
	n.noAddress(one)
	n.free("p")
	n.noAddress(one)
	n.wantUsage("default-9 0/1/1")
	n.clock.Advance(coolDown)
	wantAddr(t, "the only address again", n.reserve("q", one), at(one, 0))
	q := request("q", one)
	want := store.Allocation{
		ID: q.ID, Pod: q.Pod, Netns: q.Netns, State: store.Pending, Pool: one.Pool, Block: one.Name,
		Address: one.At(0), BootID: "boot-1", Since: n.clock.Now(),
	}
	if got, err := n.Get(n.ctx(), q.ID); err != nil || diffAllocation(want, got) != "" {
		t.Errorf("a reused address has something of its last life: %v\n%s", err, diffAllocation(want, got))
	}
	n.free("q")
	wantAddr(t, "the only address at once", n.yield("r", one), at(one, 0))
	n.wantUsage("default-9 1/0/1")
}
