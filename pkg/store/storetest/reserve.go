package storetest

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
)

// diffAllocation compares allocations, netip by value.
func diffAllocation(want, got any) string {
	return cmp.Diff(want, got, cmp.Comparer(func(a, b ipam.Address) bool { return a == b }))
}

func testReserve(t *testing.T, n *node) {
	n.setBlocks(blockA)
	n.clock.Advance(123 * time.Millisecond)
	r := request("p", blockA)
	got, err := n.Reserve(n.ctx(), r)
	if err != nil {
		t.Fatal(err)
	}
	want := store.Allocation{
		ID: r.ID, Pod: r.Pod, Netns: r.Netns, State: store.Pending, Pool: "default", Block: blockA.Name,
		Address: blockA.At(0), BootID: "boot-1", Since: n.clock.Now(),
	}
	if d := diffAllocation(want, got); d != "" {
		t.Errorf("Reserve (-want +got):\n%s", d)
	}
	if got, err = n.Get(n.ctx(), r.ID); err != nil {
		t.Fatal(err)
	}
	if d := diffAllocation(want, got); d != "" {
		t.Errorf("Get (-want +got):\n%s", d)
	}
	n.wantUsage("default-0 1/0/4")
	second := r
	second.IfName = "net1"
	if a, err := n.Reserve(n.ctx(), second); err != nil || a.Address != blockA.At(1) {
		t.Errorf("another interface of the same container: %s, %v", a.Address, err)
	}
	for _, bad := range []attachment.ID{{}, {ContainerID: "c"}, {IfName: "eth0"}} {
		r.ID = bad
		if a, err := n.Reserve(n.ctx(), r); err == nil {
			t.Errorf("%+v got %s", bad, a.Address)
		}
	}
}

func testReserveIsIdempotent(t *testing.T, n *node) {
	n.setBlocks(blockA, blockB)
	first, err := n.Reserve(n.ctx(), request("p", blockA))
	if err != nil {
		t.Fatal(err)
	}
	n.clock.Advance(time.Second)
	again := request("p", blockB)
	again.Pod = store.Pod{Namespace: "x", Name: "y", UID: "z"}
	again.Netns = store.Netns{Path: "/other", Inode: 1}
	got, err := n.Reserve(n.ctx(), again)
	if err != nil {
		t.Fatal(err)
	}
	if d := diffAllocation(first, got); d != "" {
		t.Errorf("second Reserve while pending (-first +second):\n%s", d)
	}
	n.attach("p")
	attached, err := n.Get(n.ctx(), id("p"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err = n.Reserve(n.ctx(), again); err != nil {
		t.Fatal(err)
	}
	if d := diffAllocation(attached, got); d != "" {
		t.Errorf("second Reserve while attached (-recorded +got):\n%s", d)
	}
	n.release("p")
	_, err = n.Reserve(n.ctx(), again)
	wantErr(t, "Reserve while releasing", err, store.ErrState)
	n.free("p")
	wantAddr(t, "Reserve after the address was freed", n.reserve("p", blockA), at(blockA, 1))
}

func testReserveFromBlocksOfTheRequest(t *testing.T, n *node) {
	other := mustBlock("other-0", "10.1.0.0/30", "fd01::/126")
	n.setBlocks(blockA, blockB, other)
	n.noAddress()
	r := request("p", blockA)
	r.Blocks = []string{"unknown", other.Name, blockB.Name}
	a, err := n.Reserve(n.ctx(), r)
	if err != nil {
		t.Fatal(err)
	}
	wantAddr(t, "the only block that is recorded and of the pool", a.Address.String(), at(blockB, 0))
	if a.Pool != "default" || a.Block != blockB.Name {
		t.Errorf("pool %s, block %s", a.Pool, a.Block)
	}
	r = request("q", other)
	r.Pool = "default"
	_, err = n.Reserve(n.ctx(), r)
	wantErr(t, "block of another pool", err, store.ErrNoAddress)
}

func testReserveFamilies(t *testing.T, n *node) {
	v4, v6 := mustBlock("four-0", "10.4.0.0/31", ""), mustBlock("six-0", "", "fd06::/127")
	n.setBlocks(v4, v6, blockA)
	for _, tc := range []struct {
		block store.Block
		want  []string
	}{
		{v4, []string{"10.4.0.0", "10.4.0.1"}},
		{v6, []string{"fd06::", "fd06::1"}},
		{blockA, []string{"10.0.0.0,fd00::", "10.0.0.1,fd00::1"}},
	} {
		for i, want := range tc.want {
			name := tc.block.Name + string(rune('a'+i))
			wantAddr(t, tc.block.Name, n.reserve(name, tc.block), want)
			a, err := n.Get(n.ctx(), id(name))
			if err != nil || a.Address.String() != want {
				t.Errorf("Get(%s) = %s, %v", name, a.Address, err)
			}
		}
	}
	n.noAddress(v4)
	n.noAddress(v6)
	n.free("six-0b")
	n.clock.Advance(coolDown)
	wantAddr(t, "reused IPv6", n.reserve("x", v6), "fd06::1")
}

func testNeverUsedFirst(t *testing.T, n *node) {
	n.setBlocks(blockA)
	n.reserve("p", blockA)
	n.free("p")
	n.clock.Advance(100 * coolDown)
	n.restart()
	for i := 1; i < 4; i++ {
		wantAddr(t, "never used", n.reserve(string(rune('a'+i)), blockA), at(blockA, i))
	}
	wantAddr(t, "cooled down, when no other is left", n.reserve("q", blockA), at(blockA, 0))
}

func testLeastRecentlyFreedFirst(t *testing.T, n *node) {
	n.setBlocks(blockA)
	for _, p := range []string{"0", "1", "2", "3"} {
		n.reserve(p, blockA)
	}
	for _, p := range []string{"2", "0", "3", "1"} {
		n.free(p)
		n.clock.Advance(time.Second)
	}
	n.noAddress(blockA)
	n.clock.Advance(coolDown)
	for i, want := range []int{2, 0, 3, 1} {
		wantAddr(t, "least recently freed", n.reserve(string(rune('a'+i)), blockA), at(blockA, want))
	}
	// Freed in one moment: the order of freeing still counts.
	for _, p := range []string{"c", "b", "a", "d"} {
		n.release(p)
	}
	if err := n.Cool(n.ctx(), id("d"), id("a"), id("c"), id("b")); err != nil {
		t.Fatal(err)
	}
	n.clock.Advance(coolDown)
	for i, want := range []int{1, 2, 3, 0} {
		wantAddr(t, "freed at once", n.reserve(string(rune('p'+i)), blockA), at(blockA, want))
	}
}

func testEarlierBlockFirst(t *testing.T, n *node) {
	n.setBlocks(blockA, blockB)
	for i := range 4 {
		wantAddr(t, "first block", n.reserve(string(rune('a'+i)), blockA, blockB), at(blockA, i))
	}
	n.free("b")
	wantAddr(t, "second block while the first cools", n.reserve("e", blockA, blockB), at(blockB, 0))
	n.clock.Advance(coolDown)
	wantAddr(t, "first block after its cool-down", n.reserve("f", blockA, blockB), at(blockA, 1))
	wantAddr(t, "order of the request", n.reserve("g", blockB, blockA), at(blockB, 1))
}

func testYieldTakesOldest(t *testing.T, n *node) {
	n.setBlocks(blockA, blockB)
	for i := range 4 {
		n.reserve("a"+string(rune('0'+i)), blockA)
		n.reserve("b"+string(rune('0'+i)), blockB)
	}
	for _, p := range []string{"b3", "a2", "b0", "a1"} {
		n.free(p)
		n.clock.Advance(time.Second)
	}
	n.noAddress(blockA, blockB)
	wantAddr(t, "oldest of all", n.yield("1", blockA, blockB), at(blockB, 3))
	wantAddr(t, "oldest of one block", n.yield("2", blockB), at(blockB, 0))
	wantAddr(t, "oldest that is left", n.yield("3", blockB, blockA), at(blockA, 2))
	n.clock.Advance(coolDown)
	n.free("a0")
	wantAddr(t, "a cooled one before a cooling one", n.yield("4", blockA), at(blockA, 1))
	wantAddr(t, "the last one", n.yield("5", blockA), at(blockA, 0))
	r := request("6", blockA, blockB)
	r.Yield = true
	_, err := n.Reserve(n.ctx(), r)
	wantErr(t, "yield when all are allocated", err, store.ErrNoAddress)
}

func testCoolDownIgnoresWallClock(t *testing.T, n *node) {
	one := mustBlock("default-9", "10.0.9.0/32", "")
	n.setBlocks(one)
	n.reserve("p", one)
	n.free("p")
	n.clock.Step(365 * 24 * time.Hour)
	n.noAddress(one)
	n.clock.Step(-10 * 365 * 24 * time.Hour)
	n.clock.Advance(coolDown - time.Millisecond)
	n.noAddress(one)
	n.wantUsage("default-9 0/1/1")
	n.clock.Advance(time.Millisecond)
	n.wantUsage("default-9 0/0/1")
	n.reserve("q", one)

	// However finely the time is recorded, it's never too short.
	n.clock.Advance(time.Microsecond)
	n.free("q")
	n.clock.Advance(coolDown - time.Nanosecond)
	n.noAddress(one)
	n.clock.Advance(time.Millisecond)
	n.reserve("r", one)
}

func testCoolDownOverRestart(t *testing.T, n *node) {
	n.setBlocks(blockA)
	for _, p := range []string{"0", "1", "2", "3"} {
		n.reserve(p, blockA)
	}
	n.free("3")
	n.clock.Advance(coolDown / 2)
	n.restart()
	n.free("1")
	n.restart()
	n.noAddress(blockA)
	n.wantUsage("default-0 2/2/4")
	n.clock.Advance(coolDown / 2)
	wantAddr(t, "freed before the restart", n.reserve("a", blockA), at(blockA, 3))
	n.noAddress(blockA)
	n.clock.Advance(coolDown / 2)
	wantAddr(t, "freed after the restart", n.reserve("b", blockA), at(blockA, 1))
}

func testCoolDownOverReboot(t *testing.T, n *node) {
	one := mustBlock("default-9", "10.0.9.0/32", "")
	n.setBlocks(one)
	n.reserve("p", one)
	n.clock.Advance(time.Hour)
	n.free("p") // two hours after boot: more than the next boot will have seen
	n.reboot(coolDown - time.Millisecond)
	n.noAddress(one)
	n.wantUsage("default-9 0/1/1")
	n.clock.Advance(time.Millisecond)
	n.wantUsage("default-9 0/0/1")
	n.reserve("q", one)
}

func testOrderOverReboots(t *testing.T, n *node) {
	n.setBlocks(blockA)
	for _, p := range []string{"0", "1", "2", "3"} {
		n.reserve(p, blockA)
	}
	n.free("2")
	n.reboot(time.Second)
	n.free("0")
	n.clock.Step(-time.Hour)
	n.reboot(time.Millisecond)
	n.free("3")
	n.free("1")
	wantAddr(t, "oldest of the first boot", n.yield("a", blockA), at(blockA, 2))
	n.clock.Advance(2 * coolDown)
	for i, want := range []int{0, 3, 1} {
		wantAddr(t, "order of freeing", n.reserve(string(rune('b'+i)), blockA), at(blockA, want))
	}
}
