package storetest

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/store"
)

func testList(t *testing.T, n *node) {
	n.setBlocks(blockA)
	if as := n.list(); len(as) != 0 {
		t.Fatalf("a new record has %v", as)
	}
	for _, p := range []string{"c", "a", "b"} {
		n.reserve(p, blockA)
		n.clock.Advance(time.Second)
	}
	n.attach("c") // later than the others
	n.clock.Advance(time.Second)
	n.reserve("d", blockA)
	n.free("d")
	var got []string
	for _, a := range n.list() {
		got = append(got, fmt.Sprintf("%s %s %s", a.ContainerID, a.State, a.Address))
		one, err := n.Get(n.ctx(), a.ID)
		if err != nil {
			t.Fatal(err)
		}
		if d := diffAllocation(one, a); d != "" {
			t.Errorf("Get and List differ (-Get +List):\n%s", d)
		}
	}
	want := []string{
		"container-a pending " + at(blockA, 1),
		"container-b pending " + at(blockA, 2),
		"container-c attached " + at(blockA, 0),
	}
	if d := diffAllocation(want, got); d != "" {
		t.Errorf("List (-want +got):\n%s", d)
	}
}

func testUsage(t *testing.T, n *node) {
	n.setBlocks(blockB, blockA)
	for i := range 4 {
		n.reserve(string(rune('a'+i)), blockB)
	}
	n.wantUsage("default-0 0/0/4", "default-1 4/0/4")
	n.attach("a")
	n.release("b")
	n.free("c")
	n.wantUsage("default-0 0/0/4", "default-1 3/1/4")
	n.clock.Advance(coolDown / 2)
	n.free("b")
	n.wantUsage("default-0 0/0/4", "default-1 2/2/4")
	n.clock.Advance(coolDown / 2)
	n.wantUsage("default-0 0/0/4", "default-1 2/1/4")
	n.reserve("e", blockB)
	n.wantUsage("default-0 0/0/4", "default-1 3/1/4")
	n.clock.Advance(coolDown / 2)
	n.wantUsage("default-0 0/0/4", "default-1 3/0/4")
}

func testSurvivesRestart(t *testing.T, n *node) {
	n.setBlocks(blockA)
	for _, p := range []string{"pending", "attached", "releasing", "cooling"} {
		n.reserve(p, blockA)
		n.clock.Advance(time.Second)
	}
	n.attach("attached")
	n.release("releasing")
	n.free("cooling")
	before, usage := n.list(), n.usage()
	n.restart()
	if d := diffAllocation(before, n.list()); d != "" {
		t.Errorf("after the restart (-before +after):\n%s", d)
	}
	if got := n.usage(); got != usage {
		t.Errorf("usage after the restart is\n%swas\n%s", got, usage)
	}
	n.attach("pending")
	n.noAddress(blockA)
}

// After a reboot the caller releases and cools what the kernel doesn't have.
func testRowsOfAnotherBoot(t *testing.T, n *node) {
	n.setBlocks(blockA)
	for _, p := range []string{"pending", "attached", "releasing"} {
		n.reserve(p, blockA)
	}
	n.attach("attached")
	n.release("releasing")
	n.reboot(10 * coolDown)
	// One that is found alive all the same belongs to this boot.
	alive := found("attached", blockA.At(1))
	if err := n.Adopt(n.ctx(), alive); err != nil {
		t.Fatal(err)
	}
	if a, err := n.Get(n.ctx(), alive.ID); err != nil || a.BootID != n.cfg.BootID || !a.Since.Equal(n.clock.Now()) {
		t.Errorf("adopted in another boot: %+v, %v", a, err)
	}
	n.reboot(10 * coolDown)
	var ids []attachment.ID
	for _, a := range n.list() {
		if a.BootID == n.cfg.BootID {
			t.Errorf("%s has boot ID %s", a.ContainerID, a.BootID)
		}
		if _, err := n.Release(n.ctx(), a.ID); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, a.ID)
	}
	for _, a := range n.list() {
		if want := a.ID != id("releasing"); (a.BootID == n.cfg.BootID) != want {
			t.Errorf("after Release, %s has boot ID %s", a.ContainerID, a.BootID)
		}
	}
	if err := n.Cool(n.ctx(), ids...); err != nil {
		t.Fatal(err)
	}
	n.wantUsage("default-0 0/3/4")
	n.reserve("a", blockA)
	n.noAddress(blockA)
	n.clock.Advance(coolDown)
	n.wantUsage("default-0 1/0/4")
}

func testManyBlocksOfOneAddress(t *testing.T, n *node) {
	var blocks []store.Block
	for i := range 200 {
		blocks = append(blocks, mustBlock(fmt.Sprintf("tiny-%d", i), fmt.Sprintf("10.8.0.%d/32", i), fmt.Sprintf("fd08::%x/128", i)))
	}
	n.setBlocks(blocks...)
	for i := range blocks {
		wantAddr(t, "in order of the request", n.reserve(fmt.Sprint(i), blocks...), at(blocks[i], 0))
	}
	n.noAddress(blocks...)
	n.free("150")
	n.free("50")
	n.noAddress(blocks...)
	wantAddr(t, "oldest of all", n.yield("x", blocks...), at(blocks[150], 0))
	wantUnique(t, n.list())
}

func testBigBlock(t *testing.T, n *node) {
	big := mustBlock("big-0", "10.16.0.0/16", "fd16::/112")
	n.setBlocks(big)
	const count = 1000
	for i := range count {
		wantAddr(t, "never used", n.reserve(fmt.Sprint(i), big), at(big, i))
	}
	n.wantUsage(fmt.Sprintf("big-0 %d/0/65536", count))
	n.restart()
	wantAddr(t, "never used, after a restart", n.reserve("x", big), at(big, count))
	if err := n.Adopt(n.ctx(), found("last", big.At(65535))); err != nil {
		t.Fatal(err)
	}
	wantAddr(t, "never used", n.reserve("y", big), at(big, count+1))
	n.free("y")
	n.wantUsage(fmt.Sprintf("big-0 %d/1/65536", count+2))
	if err := n.AdoptBlocks(n.ctx(), []store.Block{big}); err != nil {
		t.Fatal(err)
	}
	n.wantUsage(fmt.Sprintf("big-0 %d/%d/65536", count+2, 65536-count-2))
	for _, p := range []string{"x", "last"} {
		n.free(p)
	}
	for i := range count {
		n.release(fmt.Sprint(i))
	}
	var ids []attachment.ID
	for i := range count {
		ids = append(ids, id(fmt.Sprint(i)))
	}
	if err := n.Cool(n.ctx(), ids...); err != nil {
		t.Fatal(err)
	}
	wantErr(t, "forget while 65,536 addresses cool", n.ForgetBlock(n.ctx(), big.Name), store.ErrInUse)
	n.clock.Advance(coolDown)
	if err := n.ForgetBlock(n.ctx(), big.Name); err != nil {
		t.Fatal(err)
	}
	n.wantUsage()
	if _, err := n.Get(n.ctx(), id("0")); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("a record of the forgotten block: %v", err)
	}
}
