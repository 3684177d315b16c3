package storetest

import (
	"net/netip"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
)

func testLifecycle(t *testing.T, n *node) {
	n.setBlocks(blockA)
	a, err := n.Reserve(n.ctx(), request("p", blockA))
	if err != nil {
		t.Fatal(err)
	}
	n.clock.Advance(time.Second - time.Microsecond)
	n.attach("p")
	n.clock.Advance(time.Microsecond) // times are rounded up to milliseconds
	a.State, a.Since, a.Wiring = store.Attached, n.clock.Now(), wiring("p")
	got, err := n.Get(n.ctx(), id("p"))
	if err != nil {
		t.Fatal(err)
	}
	if d := diffAllocation(a, got); d != "" {
		t.Errorf("attached (-want +got):\n%s", d)
	}
	n.clock.Advance(time.Second)
	a.State, a.Since = store.Releasing, n.clock.Now()
	for range 2 {
		if got, err = n.Release(n.ctx(), id("p")); err != nil {
			t.Fatal(err)
		}
		if d := diffAllocation(a, got); d != "" {
			t.Errorf("Release (-want +got):\n%s", d)
		}
		n.clock.Advance(time.Second) // the second Release changes nothing
	}
	if got, err = n.Get(n.ctx(), id("p")); err != nil {
		t.Fatal(err)
	}
	if d := diffAllocation(a, got); d != "" {
		t.Errorf("releasing (-want +got):\n%s", d)
	}
	n.wantUsage("default-0 1/0/4")
	n.free("p")
	n.wantUsage("default-0 0/1/4")
	_, err = n.Get(n.ctx(), id("p"))
	wantErr(t, "Get while cooling", err, store.ErrNotFound)
	_, err = n.Release(n.ctx(), id("p"))
	wantErr(t, "Release while cooling", err, store.ErrNotFound)
	if as := n.list(); len(as) != 0 {
		t.Errorf("List while cooling: %v", as)
	}
	n.clock.Advance(coolDown)
	n.wantUsage("default-0 0/0/4")
}

func testWrongSteps(t *testing.T, n *node) {
	n.setBlocks(blockA)
	_, err := n.Get(n.ctx(), id("p"))
	wantErr(t, "Get of nothing", err, store.ErrNotFound)
	_, err = n.Release(n.ctx(), id("p"))
	wantErr(t, "Release of nothing", err, store.ErrNotFound)
	wantErr(t, "Attach of nothing", n.Attach(n.ctx(), id("p"), wiring("p")), store.ErrNotFound)
	n.reserve("p", blockA)
	n.attach("p")
	wantErr(t, "Attach twice", n.Attach(n.ctx(), id("p"), wiring("other")), store.ErrState)
	if a, err := n.Get(n.ctx(), id("p")); err != nil || a.HostIfName != "vethp" {
		t.Errorf("after the second Attach: %+v, %v", a, err)
	}
	_, err = n.Get(n.ctx(), attachment.ID{ContainerID: id("p").ContainerID, IfName: "eth1"})
	wantErr(t, "Get of another interface", err, store.ErrNotFound)
}

func testDelDuringPending(t *testing.T, n *node) {
	n.setBlocks(blockA)
	n.reserve("p", blockA)
	if a, err := n.Release(n.ctx(), id("p")); err != nil || a.State != store.Releasing || a.Address != blockA.At(0) {
		t.Fatalf("Release of a pending one: %+v, %v", a, err)
	}
	wantErr(t, "Attach after Release", n.Attach(n.ctx(), id("p"), wiring("p")), store.ErrState)
	n.free("p")
	wantErr(t, "Attach after Cool", n.Attach(n.ctx(), id("p"), wiring("p")), store.ErrNotFound)
	n.wantUsage("default-0 0/1/4")
	if as := n.list(); len(as) != 0 {
		t.Errorf("records are left: %v", as)
	}
}

func testNewSandboxOfSamePod(t *testing.T, n *node) {
	n.setBlocks(blockA)
	old, next := request("old", blockA), request("new", blockA)
	next.Pod = old.Pod
	first, err := n.Reserve(n.ctx(), old)
	if err != nil {
		t.Fatal(err)
	}
	second, err := n.Reserve(n.ctx(), next)
	if err != nil {
		t.Fatal(err)
	}
	if first.Address == second.Address {
		t.Fatalf("both sandboxes have %s", first.Address)
	}
	n.attach("new")
	n.free("old")
	if a, err := n.Get(n.ctx(), next.ID); err != nil || a.State != store.Attached || a.Address != second.Address {
		t.Errorf("DEL of the old sandbox changed the new one: %+v, %v", a, err)
	}
}

func testCool(t *testing.T, n *node) {
	n.setBlocks(blockA)
	n.reserve("pending", blockA)
	n.reserve("attached", blockA)
	n.attach("attached")
	n.reserve("releasing", blockA)
	n.release("releasing")
	if err := n.Cool(n.ctx()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := n.Cool(n.ctx(), id("pending"), id("attached"), id("unknown"), id("releasing")); err != nil {
			t.Fatal(err)
		}
	}
	n.wantUsage("default-0 2/1/4")
	for name, want := range map[string]store.State{"pending": store.Pending, "attached": store.Attached} {
		if a, err := n.Get(n.ctx(), id(name)); err != nil || a.State != want {
			t.Errorf("%s became %s, %v", name, a.State, err)
		}
	}
	// Cool is "from now on", and only once.
	n.clock.Advance(coolDown / 2)
	if err := n.Cool(n.ctx(), id("releasing")); err != nil {
		t.Fatal(err)
	}
	n.clock.Advance(coolDown / 2)
	n.wantUsage("default-0 2/0/4")
}

// found is an attachment as the kernel shows it.
func found(name string, a ipam.Address) store.Allocation {
	r := request(name)
	return store.Allocation{ID: r.ID, Pod: r.Pod, Netns: r.Netns, Wiring: wiring(name), Pool: "default", Address: a}
}

func testAdopt(t *testing.T, n *node) {
	n.setBlocks(blockA)
	n.clock.Advance(time.Second)
	a := found("p", blockA.At(1))
	a.State, a.BootID = store.Cooling, "some other boot" // isn't looked at
	for range 2 {
		if err := n.Adopt(n.ctx(), a); err != nil {
			t.Fatal(err)
		}
	}
	want := a
	want.State, want.BootID, want.Since, want.Block = store.Attached, "boot-1", n.clock.Now(), blockA.Name
	got, err := n.Get(n.ctx(), a.ID)
	if err != nil {
		t.Fatal(err)
	}
	if d := diffAllocation(want, got); d != "" {
		t.Errorf("adopted (-want +got):\n%s", d)
	}
	n.wantUsage("default-0 1/0/4")

	// Adopting again leaves the time, and adds only what is known.
	n.clock.Advance(time.Second)
	if err := n.Adopt(n.ctx(), store.Allocation{ID: a.ID, Address: a.Address, Wiring: store.Wiring{HostIfIndex: 99}}); err != nil {
		t.Fatal(err)
	}
	want.HostIfIndex = 99
	if got, err = n.Get(n.ctx(), a.ID); err != nil {
		t.Fatal(err)
	}
	if d := diffAllocation(want, got); d != "" {
		t.Errorf("adopted again (-want +got):\n%s", d)
	}

	// The others are given, this one isn't.
	for i, want := range []int{0, 2, 3} {
		wantAddr(t, "beside the adopted one", n.reserve(string(rune('a'+i)), blockA), at(blockA, want))
	}
	n.noAddress(blockA)

	// A pending record becomes attached.
	if err := n.Adopt(n.ctx(), found("a", blockA.At(0))); err != nil {
		t.Fatal(err)
	}
	if got, err = n.Get(n.ctx(), id("a")); err != nil || got.State != store.Attached || !got.Since.Equal(n.clock.Now()) || got.HostIfName != "vetha" {
		t.Errorf("adopted while pending: %+v, %v", got, err)
	}
	// A releasing one is being deleted.
	n.release("b")
	wantErr(t, "Adopt while releasing", n.Adopt(n.ctx(), found("b", blockA.At(2))), store.ErrState)
}

func testAdoptUnrecordedBlock(t *testing.T, n *node) {
	n.setBlocks(blockA)
	a := found("p", blockB.At(1))
	a.Block = "told"
	if err := n.Adopt(n.ctx(), a); err != nil {
		t.Fatal(err)
	}
	if got, err := n.Get(n.ctx(), a.ID); err != nil || got.Block != "told" || got.State != store.Attached {
		t.Errorf("record without block: %+v, %v", got, err)
	}
	if err := n.Adopt(n.ctx(), found("q", blockB.At(2))); err != nil {
		t.Fatal(err)
	}
	n.free("q")
	n.wantUsage("default-0 0/0/4")
	n.restart()
	n.setBlocks(blockB)
	n.wantUsage("default-0 0/0/4", "default-1 1/1/4")
	if got, err := n.Get(n.ctx(), a.ID); err != nil || got.Block != blockB.Name {
		t.Errorf("record of a block that came later: %+v, %v", got, err)
	}
	wantAddr(t, "beside the adopted ones", n.reserve("a", blockB), at(blockB, 0))
	wantAddr(t, "beside the adopted ones", n.reserve("b", blockB), at(blockB, 3))
	n.noAddress(blockB)
	n.clock.Advance(coolDown)
	wantAddr(t, "cooled down", n.reserve("c", blockB), at(blockB, 2))
	wantUnique(t, n.list())

	// Nor is an address whose block never comes kept for ever.
	if err := n.Adopt(n.ctx(), found("r", blockC.At(0))); err != nil {
		t.Fatal(err)
	}
	n.free("r")
	if err := n.Adopt(n.ctx(), found("s", mustBlock("x-0", "10.0.0.12/30", "fd00::c/126").At(0))); err != nil {
		t.Fatal(err)
	}
	n.free("s")
	n.setBlocks(blockA)
	blockD := mustBlock("default-3", "10.0.0.12/30", "fd00::c/126")
	n.setBlocks(blockD)
	n.wantUsage("default-0 0/0/4", "default-1 4/0/4", "default-3 0/1/4") // still cooling
	n.clock.Advance(coolDown)
	n.setBlocks(blockA)
	n.setBlocks(blockC)
	wantAddr(t, "of the block that came late", n.reserve("d", blockC), at(blockC, 0))
}

func testAdoptOneFamily(t *testing.T, n *node) {
	n.setBlocks(blockA)
	v4 := found("p", ipam.Address{IPv4: blockA.At(0).IPv4})
	if err := n.Adopt(n.ctx(), v4); err != nil {
		t.Fatal(err)
	}
	if got, err := n.Get(n.ctx(), v4.ID); err != nil || got.Address != v4.Address || got.Block != blockA.Name {
		t.Errorf("adopted with one family: %+v, %v", got, err)
	}
	// The other half of the offset may be of another attachment.
	v6 := found("q", ipam.Address{IPv6: blockA.At(0).IPv6})
	if err := n.Adopt(n.ctx(), v6); err != nil {
		t.Fatal(err)
	}
	wantErr(t, "half of an address that is taken", n.Adopt(n.ctx(), found("r", ipam.Address{
		IPv4: netip.MustParseAddr("10.99.0.1"), IPv6: blockA.At(0).IPv6})), store.ErrConflict)
	for i := 1; i < 4; i++ {
		wantAddr(t, "beside the halves", n.reserve(string(rune('a'+i)), blockA), at(blockA, i))
	}
	n.noAddress(blockA)
	wantUnique(t, n.list())
	n.free("p")
	n.clock.Advance(coolDown)
	n.noAddress(blockA) // its IPv6 address is in use
	n.free("q")
	n.clock.Advance(coolDown)
	n.setBlocks(blockA)
	wantAddr(t, "the whole offset", n.reserve("x", blockA), at(blockA, 0))
	wantUnique(t, n.list())
}

// An attachment may have addresses that no block has at one offset.
func testAdoptAcrossOffsets(t *testing.T, n *node) {
	n.setBlocks(blockA)
	odd := found("p", ipam.Address{IPv4: blockA.At(0).IPv4, IPv6: blockA.At(2).IPv6})
	if err := n.Adopt(n.ctx(), odd); err != nil {
		t.Fatal(err)
	}
	wantAddr(t, "beside the odd one", n.reserve("a", blockA), at(blockA, 1))
	wantAddr(t, "beside the odd one", n.reserve("b", blockA), at(blockA, 3))
	n.noAddress(blockA)
	wantUnique(t, n.list())
	n.free("p")
	n.clock.Advance(coolDown)
	n.setBlocks(blockA)
	wantAddr(t, "when the odd one has cooled down", n.reserve("c", blockA), at(blockA, 0))
	wantAddr(t, "when the odd one has cooled down", n.reserve("d", blockA), at(blockA, 2))
	n.noAddress(blockA)
}

func testAdoptConflict(t *testing.T, n *node) {
	n.setBlocks(blockA)
	n.reserve("p", blockA)
	wantErr(t, "address of a pending one", n.Adopt(n.ctx(), found("q", blockA.At(0))), store.ErrConflict)
	wantErr(t, "attachment with another address", n.Adopt(n.ctx(), found("p", blockA.At(1))), store.ErrConflict)
	n.attach("p")
	wantErr(t, "address of an attached one", n.Adopt(n.ctx(), found("q", blockA.At(0))), store.ErrConflict)
	n.release("p")
	wantErr(t, "address of a releasing one", n.Adopt(n.ctx(), found("q", blockA.At(0))), store.ErrConflict)
	as := n.list()
	if len(as) != 1 || as[0].ID != id("p") || as[0].Address != blockA.At(0) {
		t.Errorf("a conflict changed the record: %+v", as)
	}
}

func testAdoptRefusesNonsense(t *testing.T, n *node) {
	v4, v6 := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	for name, a := range map[string]ipam.Address{
		"no address":   {},
		"IPv6 as IPv4": {IPv4: v6},
		"IPv4 as IPv6": {IPv6: v4},
		"mapped IPv4":  {IPv6: netip.MustParseAddr("::ffff:10.0.0.1")},
		"zone":         {IPv6: netip.MustParseAddr("fe80::1%eth0")},
	} {
		if err := n.Adopt(n.ctx(), found("p", a)); err == nil {
			t.Errorf("%s is adopted", name)
		}
	}
	if err := n.Adopt(n.ctx(), store.Allocation{Address: ipam.Address{IPv4: v4}}); err == nil {
		t.Error("no attachment is adopted")
	}
	if as := n.list(); len(as) != 0 {
		t.Errorf("recorded: %+v", as)
	}
}

func testAdoptTakesCoolingAddress(t *testing.T, n *node) {
	n.setBlocks(blockA)
	n.reserve("p", blockA)
	n.free("p")
	if err := n.Adopt(n.ctx(), found("q", blockA.At(0))); err != nil {
		t.Fatal(err)
	}
	n.wantUsage("default-0 1/0/4")
	n.clock.Advance(coolDown)
	for i := 1; i < 4; i++ {
		wantAddr(t, "beside the adopted one", n.reserve(string(rune('a'+i)), blockA), at(blockA, i))
	}
	n.noAddress(blockA)
	// A cooling address whose other half is adopted mustn't be lost.
	n.free("b")
	if err := n.Adopt(n.ctx(), found("r", ipam.Address{IPv4: blockA.At(1).IPv4})); err != nil {
		t.Fatal(err)
	}
	n.clock.Advance(coolDown)
	n.noAddress(blockA)
	n.free("r")
	n.clock.Advance(coolDown)
	wantAddr(t, "the whole offset again", n.reserve("z", blockA), at(blockA, 1))
	wantUnique(t, n.list())
}
