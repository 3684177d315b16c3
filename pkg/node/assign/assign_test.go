package assign

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
	"github.com/coil-net/coil/pkg/testkit"
)

// network is a Network in memory that can be told to fail or to wait.
type network struct {
	mu    sync.Mutex
	pods  map[attachment.ID]ipam.Address
	made  map[attachment.ID]podnet.Attachment
	fail  map[string]error // by method
	enter func(ctx context.Context, method string)
	wired int // number of Attach calls that succeeded
	// prepared are the links that are neither attached nor discarded.
	prepared map[*podnet.Link]attachment.ID
	// groups are how many links were removed at once.
	groups []int
	// forgotten are the addresses whose flows were.
	forgotten []ipam.Address
}

func (n *network) step(ctx context.Context, method string) error {
	if n.enter != nil {
		n.enter(ctx, method)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.fail[method]
}

func (n *network) Prepare(ctx context.Context, p podnet.Pod) (*podnet.Link, error) {
	if err := n.step(ctx, "Prepare"); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	l := new(podnet.Link)
	n.prepared[l] = p.ID
	return l, nil
}

func (n *network) Discard(ctx context.Context, l *podnet.Link) error {
	if err := n.step(ctx, "Discard"); err != nil {
		return err
	}
	return n.use(l, n.prepared[l])
}

// use takes a prepared link of an attachment; none is success.
func (n *network) use(l *podnet.Link, id attachment.ID) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if l == nil {
		return nil
	}
	if got, ok := n.prepared[l]; !ok || got != id {
		return fmt.Errorf("link of %s is not of %s", got, id)
	}
	delete(n.prepared, l)
	return nil
}

func (n *network) Attach(ctx context.Context, p podnet.Pod, prepared *podnet.Link) (podnet.Attachment, error) {
	if err := n.use(prepared, p.ID); err != nil {
		return podnet.Attachment{}, err
	}
	if err := n.step(ctx, "Attach"); err != nil {
		return podnet.Attachment{}, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods[p.ID] = p.Address
	n.wired++
	a := podnet.Attachment{
		HostIfName: "veth" + p.ContainerID, HostIfIndex: 10 + n.wired, NetnsInode: 7,
		HostMAC: fmt.Sprintf("02:00:00:00:00:%02x", n.wired), PodMAC: fmt.Sprintf("02:00:00:00:01:%02x", n.wired),
	}
	n.made[p.ID] = a
	return a, nil
}

func (n *network) Check(ctx context.Context, p podnet.Pod, a podnet.Attachment) error {
	if err := n.step(ctx, "Check"); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if got := n.pods[p.ID]; got != p.Address {
		return fmt.Errorf("kernel has %s", got)
	}
	if want := n.made[p.ID]; a != want {
		return fmt.Errorf("attachment is %+v, asked for is %+v", want, a)
	}
	return nil
}

func (n *network) CheckGuard(ctx context.Context, _ podnet.Pod, _ podnet.Attachment) error {
	return n.step(ctx, "CheckGuard")
}

func (n *network) Withdraw(ctx context.Context, _ ...ipam.Address) error {
	return n.step(ctx, "Withdraw")
}

func (n *network) RemoveAll(ctx context.Context, targets ...podnet.Target) []error {
	results := make([]error, len(targets))
	if err := n.step(ctx, "RemoveAll"); err != nil {
		for i := range results {
			results[i] = err
		}
		return results
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.groups = append(n.groups, len(targets))
	for _, t := range targets {
		delete(n.pods, t.ID)
	}
	return results
}

func (n *network) Forget(ctx context.Context, addrs ...ipam.Address) error {
	if err := n.step(ctx, "Forget"); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.forgotten = append(n.forgotten, addrs...)
	return nil
}

func (n *network) Attached(ctx context.Context) ([]attachment.ID, error) {
	if err := n.step(ctx, "Attached"); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	var ids []attachment.ID
	for id := range n.pods {
		ids = append(ids, id)
	}
	return ids, nil
}

func (n *network) setFail(method string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.fail[method] = err
}

// supply is a Blocks with fixed blocks.
type supply struct {
	usable []string
	ask    func(ctx context.Context) error
}

func (s *supply) Usable(string) []string   { return s.usable }
func (s *supply) Generation(string) uint64 { return 0 }
func (s *supply) Changed(string)           {}
func (s *supply) Ask(ctx context.Context, _ string, _ uint64) error {
	return s.ask(ctx)
}

// links notes which blocks have announced addresses, and which addresses were withdrawn.
type links struct {
	mu    sync.Mutex
	told  []string
	fail  error
	check func() // called by Withdraw
}

func (l *links) Changed(block string) { l.note("changed " + block) }

func (l *links) Withdraw(_ context.Context, addrs ...netip.Addr) error {
	if l.check != nil {
		l.check()
	}
	l.note(fmt.Sprint("withdraw ", addrs))
	return l.fail
}

func (l *links) note(s string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.told = append(l.told, s)
}

// bench is an Assigner over a real record, with one dual-stack block of four addresses.
type bench struct {
	*Assigner
	store  *sqlite.Store
	net    *network
	supply *supply
	links  *links
	end    func() // of Run
	// lives are the attachments whose network namespaces are there.
	lives    map[attachment.ID]bool
	warnings []string
}

const suspicion = 30 * time.Second

var errPoolEmpty = errors.New("AddressPool default is exhausted")

func newBench(t *testing.T) *bench {
	t.Helper()
	s, _, err := sqlite.Open(t.Context(), sqlite.Options{
		Path: filepath.Join(t.TempDir(), "coild.db"), Identity: store.Identity{NodeName: "node"}, BootID: "boot", CoolDown: time.Hour,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	block := store.Block{Name: "default-0", Pool: "default", Block: ipam.Block{
		IPv4: netip.MustParsePrefix("10.1.0.0/30"), IPv6: netip.MustParsePrefix("fd00::/126"),
	}}
	if err := s.SetBlocks(t.Context(), []store.Block{block}); err != nil {
		t.Fatal(err)
	}
	b := &bench{
		store: s,
		net: &network{pods: map[attachment.ID]ipam.Address{}, made: map[attachment.ID]podnet.Attachment{}, fail: map[string]error{},
			prepared: map[*podnet.Link]attachment.ID{}},
		supply: &supply{usable: []string{"default-0"}, ask: func(context.Context) error { return errPoolEmpty }},
		links:  &links{},
		lives:  map[attachment.ID]bool{},
	}
	b.Assigner = New(Config{
		BlockTimeout: time.Second, UndoTimeout: 5 * time.Second, Suspicion: suspicion, NodeAddrs: func() ipam.Address { return ipam.Address{} },
		Unguarded: func(string) bool { return false },
		Lives:     func(alloc store.Allocation) bool { return b.lives[alloc.ID] },
		Warn: func(reason, format string, args ...any) {
			b.warnings = append(b.warnings, reason+": "+fmt.Sprintf(format, args...))
		},
	}, s, b.supply, b.net, b.links)
	b.end = testkit.Background(t.Context(), t, b.Run)
	return b
}

func request(container string) node.AddRequest {
	return node.AddRequest{
		ID: attachment.ID{ContainerID: container, IfName: "eth0"}, Pod: store.Pod{Namespace: "ns", Name: "pod-" + container},
		Netns: store.Netns{Path: "/run/netns/" + container, Inode: 7}, Pool: "default",
	}
}

// mustAgree fails unless record and kernel have exactly the given containers, once
// the links of the others are removed.
func (b *bench) mustAgree(t *testing.T, containers ...string) {
	t.Helper()
	testkit.Eventually(t, 5*time.Second, "links are removed", func() error {
		b.removals.mu.Lock()
		defer b.removals.mu.Unlock()
		if n := len(b.removals.pending); n > 0 {
			return fmt.Errorf("of %d pools not", n)
		}
		return nil
	})
	all, err := b.store.List(context.WithoutCancel(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{}
	for _, c := range containers {
		want[c] = true
	}
	b.net.mu.Lock()
	defer b.net.mu.Unlock()
	if n := len(b.net.prepared); n > 0 {
		t.Errorf("%d prepared links are left", n)
	}
	if len(all) != len(want) || len(b.net.pods) != len(want) {
		t.Errorf("%d records, %d links, want %d", len(all), len(b.net.pods), len(want))
	}
	for _, a := range all {
		if !want[a.ContainerID] || a.State != store.Attached || b.net.pods[a.ID] != a.Address {
			t.Errorf("record %s %s %s; kernel %s", a.ContainerID, a.State, a.Address, b.net.pods[a.ID])
		}
	}
}

// mustState fails unless the record of a container is in a state.
func (b *bench) mustState(t *testing.T, container string, want store.State) {
	t.Helper()
	got, err := b.store.Get(t.Context(), request(container).ID)
	if err != nil || got.State != want {
		t.Errorf("record of %s is %q, %v; want %s", container, got.State, err, want)
	}
}

// There are routes to pods that run or are about to, unless they have lost their links.
func TestWired(t *testing.T) {
	b := newBench(t)
	var alloc store.Allocation
	for _, c := range []string{"c1", "c2"} {
		var err error
		if alloc, err = b.Add(t.Context(), request(c)); err != nil {
			t.Fatal(err)
		}
	}
	b.linkless.Set(alloc.ID, alloc.HostIfIndex)
	got, err := b.Wired(t.Context())
	if err != nil || len(got) != 1 || got[0].ContainerID != "c1" || got[0].HostIfIndex == 0 {
		t.Errorf("%+v, %v; want the pod that has its link", got, err)
	}
	for state, want := range map[store.State]int{store.Attached: 1, store.Pending: 1, store.Releasing: 0} {
		if got := b.WiredOf([]store.Allocation{{ID: request("c3").ID, State: state}}); len(got) != want {
			t.Errorf("%s: %d pods, want %d", state, len(got), want)
		}
	}
}
