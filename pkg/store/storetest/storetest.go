// Package storetest is the suite that every store.Store must pass: each sentence
// of the contract, tried. It must not know how a Store keeps its record.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
)

// Config is what a Store under test is opened with.
type Config struct {
	// Dir is an empty folder at first. A Store that is opened with the Dir of an
	// earlier one has the record of that.
	Dir string
	// BootID is the boot that the Store runs in.
	BootID string
	// CoolDown is how long a freed address rests.
	CoolDown time.Duration
	// Clock is the time.
	Clock *Clock
}

// Opener opens the Store under test, and returns a function that closes it.
type Opener func(t testing.TB, c Config) (store.Store, func())

// Clock is a clock that tests set. The zero Clock isn't useful; NewClock is.
type Clock struct {
	mu   sync.Mutex
	wall time.Time     // guarded by mu
	boot time.Duration // guarded by mu
}

// NewClock returns a clock on a machine that has been up for an hour.
func NewClock() *Clock {
	return &Clock{wall: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), boot: time.Hour}
}

// Now is the wall clock.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.wall
}

// Boottime is the time since boot.
func (c *Clock) Boottime() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.boot
}

// Advance lets d pass.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wall, c.boot = c.wall.Add(d), c.boot+d
}

// Step sets the wall clock by d, as an administrator or NTP does; no time passes.
func (c *Clock) Step(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wall = c.wall.Add(d)
}

// Reboot lets the machine be off for a minute and then up for d.
func (c *Clock) Reboot(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wall, c.boot = c.wall.Add(time.Minute+d), d
}

const coolDown = time.Minute

// Run runs the suite.
func Run(t *testing.T, open Opener) {
	for _, tc := range []struct {
		name string
		test func(*testing.T, *node)
	}{
		{"Blocks", testBlocks},
		{"BlockChangesRange", testBlockChangesRange},
		{"ForgetBlock", testForgetBlock},
		{"ForgetAdoptedBlock", testForgetAdoptedBlock},
		{"AdoptBlocks", testAdoptBlocks},
		{"AdoptedBlockYields", testAdoptedBlockYields},
		{"Reserve", testReserve},
		{"ReserveIsIdempotent", testReserveIsIdempotent},
		{"ReserveFromBlocksOfTheRequest", testReserveFromBlocksOfTheRequest},
		{"ReserveDualStackAndSingle", testReserveFamilies},
		{"NeverUsedFirst", testNeverUsedFirst},
		{"LeastRecentlyFreedFirst", testLeastRecentlyFreedFirst},
		{"EarlierBlockFirst", testEarlierBlockFirst},
		{"YieldTakesOldest", testYieldTakesOldest},
		{"CoolDownIgnoresWallClock", testCoolDownIgnoresWallClock},
		{"CoolDownOverRestart", testCoolDownOverRestart},
		{"CoolDownOverReboot", testCoolDownOverReboot},
		{"OrderOverReboots", testOrderOverReboots},
		{"Lifecycle", testLifecycle},
		{"WrongSteps", testWrongSteps},
		{"DelDuringPending", testDelDuringPending},
		{"NewSandboxOfSamePod", testNewSandboxOfSamePod},
		{"Cool", testCool},
		{"Adopt", testAdopt},
		{"AdoptUnrecordedBlock", testAdoptUnrecordedBlock},
		{"AdoptOneFamily", testAdoptOneFamily},
		{"AdoptAcrossOffsets", testAdoptAcrossOffsets},
		{"AdoptConflict", testAdoptConflict},
		{"AdoptRefusesNonsense", testAdoptRefusesNonsense},
		{"AdoptTakesCoolingAddress", testAdoptTakesCoolingAddress},
		{"List", testList},
		{"Usage", testUsage},
		{"SurvivesRestart", testSurvivesRestart},
		{"RowsOfAnotherBoot", testRowsOfAnotherBoot},
		{"OverlappingBlocks", testOverlappingBlocks},
		{"ConcurrentReserve", testConcurrentReserve},
		{"ConcurrentSameAttachment", testConcurrentSameAttachment},
		{"ConcurrentLifecycles", testConcurrentLifecycles},
		{"CancelledContext", testCancelledContext},
		{"Histories", testHistories},
		{"BlockOfOneAddress", testBlockOfOneAddress},
		{"ManyBlocksOfOneAddress", testManyBlocksOfOneAddress},
		{"BlockOf65536Addresses", testBigBlock},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := &node{t: t, open: open, clock: NewClock()}
			n.cfg = Config{Dir: t.TempDir(), BootID: "boot-1", CoolDown: coolDown, Clock: n.clock}
			n.start()
			defer func() { n.stop() }()
			tc.test(t, n)
		})
	}
}

// node is a Store under test, and how to restart it.
type node struct {
	store.Store
	t     *testing.T
	open  Opener
	cfg   Config
	clock *Clock
	close func()
}

func (n *node) start() { n.Store, n.close = n.open(n.t, n.cfg) }

func (n *node) stop() {
	if n.close != nil {
		n.close()
	}
	n.close = nil
}

// restart ends the process and starts it again.
func (n *node) restart() {
	n.stop()
	n.start()
}

// reboot restarts in another boot, up for d.
func (n *node) reboot(d time.Duration) {
	n.stop()
	n.cfg.BootID += "+"
	n.clock.Reboot(d)
	n.start()
}

func (n *node) ctx() context.Context { return n.t.Context() }

// Three blocks of four addresses.
var (
	blockA = mustBlock("default-0", "10.0.0.0/30", "fd00::/126")
	blockB = mustBlock("default-1", "10.0.0.4/30", "fd00::4/126")
	blockC = mustBlock("default-2", "10.0.0.8/30", "fd00::8/126")
)

// mustBlock returns a block of a pool that its name begins with; a family may be "".
func mustBlock(name, ipv4, ipv6 string) store.Block {
	var b ipam.Block
	if ipv4 != "" {
		b.IPv4 = netip.MustParsePrefix(ipv4)
	}
	if ipv6 != "" {
		b.IPv6 = netip.MustParsePrefix(ipv6)
	}
	pool := name
	for i, r := range name {
		if r == '-' {
			pool = name[:i]
		}
	}
	return store.Block{Name: name, Pool: pool, Block: b}
}

// at is the address of an offset of a block, as text.
func at(b store.Block, offset int) string { return b.At(offset).String() }

func id(name string) attachment.ID {
	return attachment.ID{ContainerID: "container-" + name, IfName: "eth0"}
}

// request asks for an address of blocks, which are all of one pool.
func request(name string, blocks ...store.Block) store.Request {
	r := store.Request{
		ID:    id(name),
		Pod:   store.Pod{Namespace: "ns", Name: "pod-" + name, UID: "uid-" + name},
		Netns: store.Netns{Path: "/run/netns/" + name, Inode: 4026531840},
		Pool:  "default",
	}
	for _, b := range blocks {
		r.Pool = b.Pool
		r.Blocks = append(r.Blocks, b.Name)
	}
	return r
}

func (n *node) setBlocks(blocks ...store.Block) {
	n.t.Helper()
	if err := n.SetBlocks(n.ctx(), blocks); err != nil {
		n.t.Fatal(err)
	}
}

// reserve must succeed; it returns the address as text.
func (n *node) reserve(name string, blocks ...store.Block) string {
	n.t.Helper()
	a, err := n.Reserve(n.ctx(), request(name, blocks...))
	if err != nil {
		n.t.Fatal(err)
	}
	return a.Address.String()
}

// yield is reserve with Yield.
func (n *node) yield(name string, blocks ...store.Block) string {
	n.t.Helper()
	r := request(name, blocks...)
	r.Yield = true
	a, err := n.Reserve(n.ctx(), r)
	if err != nil {
		n.t.Fatal(err)
	}
	return a.Address.String()
}

func (n *node) attach(name string) {
	n.t.Helper()
	if err := n.Attach(n.ctx(), id(name), wiring(name)); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) release(name string) {
	n.t.Helper()
	if _, err := n.Release(n.ctx(), id(name)); err != nil {
		n.t.Fatal(err)
	}
}

// free releases an attachment and lets its address cool from now.
func (n *node) free(name string) {
	n.t.Helper()
	n.release(name)
	if err := n.Cool(n.ctx(), id(name)); err != nil {
		n.t.Fatal(err)
	}
}

func wiring(name string) store.Wiring {
	return store.Wiring{HostIfName: "veth" + name, HostIfIndex: 7, Result: []byte(`{"cniVersion":"1.1.0"}`)}
}

// wantErr fails the test unless err is want.
func wantErr(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("%s: %v, want %v", what, err, want)
	}
}

// wantAddr fails the test unless an address is want.
func wantAddr(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Fatalf("%s: got address %s, want %s", what, got, want)
	}
}

// usage is the use of blocks as text: "name allocated/cooling/size", by name.
func (n *node) usage() string {
	n.t.Helper()
	us, err := n.Usage(n.ctx())
	if err != nil {
		n.t.Fatal(err)
	}
	s := ""
	for _, u := range us {
		s += fmt.Sprintf("%s %d/%d/%d\n", u.Name, u.Allocated, u.Cooling, u.Size())
	}
	return s
}

func (n *node) wantUsage(lines ...string) {
	n.t.Helper()
	want := ""
	for _, l := range lines {
		want += l + "\n"
	}
	if got := n.usage(); got != want {
		n.t.Fatalf("usage (allocated/cooling/size) is\n%swant\n%s", got, want)
	}
}

// noAddress wants that no address of blocks can be reserved.
func (n *node) noAddress(blocks ...store.Block) {
	n.t.Helper()
	a, err := n.Reserve(n.ctx(), request("nobody", blocks...))
	if !errors.Is(err, store.ErrNoAddress) {
		n.t.Fatalf("got %s, %v; want %v", a.Address, err, store.ErrNoAddress)
	}
}

// wantUnique fails the test if two allocations share an address, or an attachment
// has two.
func wantUnique(t testing.TB, as []store.Allocation) {
	t.Helper()
	addrs := map[netip.Addr]attachment.ID{}
	ids := map[attachment.ID]bool{}
	for _, a := range as {
		if ids[a.ID] {
			t.Fatalf("%v has two records", a.ID)
		}
		ids[a.ID] = true
		for _, x := range a.Address.Addrs() {
			if other, is := addrs[x]; is {
				t.Fatalf("%s is given to %v and to %v", x, other, a.ID)
			}
			addrs[x] = a.ID
		}
	}
}

func (n *node) list() []store.Allocation {
	n.t.Helper()
	as, err := n.List(n.ctx())
	if err != nil {
		n.t.Fatal(err)
	}
	return as
}
