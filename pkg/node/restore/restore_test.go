package restore

import (
	"context"
	"errors"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/delqueue"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
)

// links is the kernel's part.
type links struct {
	found  []podnet.Found
	strays []string
	err    error
}

func (l *links) Recover(context.Context) (podnet.Recovered, error) {
	return podnet.Recovered{Found: l.found, Strays: l.strays}, l.err
}

func (l *links) Label(_ context.Context, f podnet.Found) error {
	if l.err != nil {
		return l.err
	}
	for i := range l.found {
		if l.found[i].ID == f.ID {
			l.found[i].Unlabelled = false
		}
	}
	return nil
}

// detacher takes links and records down, as package assign does.
type detacher struct {
	store *sqlite.Store
	links *links
	err   error
	// meanwhile is what others do during a deletion; may be nil.
	meanwhile func()

	deleted []attachment.ID
}

func (d *detacher) Del(ctx context.Context, id attachment.ID) error {
	if d.meanwhile != nil {
		d.meanwhile()
	}
	if d.err != nil {
		return d.err
	}
	d.deleted = append(d.deleted, id)
	d.links.found = slices.DeleteFunc(d.links.found, func(f podnet.Found) bool { return f.ID == id })
	if _, err := d.store.Release(ctx, id); err != nil && !errors.Is(err, store.ErrNotFound) {
		return err
	}
	return d.store.Cool(ctx, id)
}

// node is a node whose record, kernel and blocks may differ.
type node struct {
	*Restorer
	t     *testing.T
	store *sqlite.Store
	links *links
	queue delqueue.Queue
	det   *detacher
	block store.Block
}

func newNode(t *testing.T) *node {
	t.Helper()
	s, _, err := sqlite.Open(t.Context(), sqlite.Options{
		Path: filepath.Join(t.TempDir(), "coild.db"), Identity: store.Identity{NodeName: "node"}, BootID: "boot", CoolDown: time.Hour,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	n := &node{t: t, store: s, links: &links{}, queue: delqueue.New(filepath.Join(t.TempDir(), "queue"))}
	n.det = &detacher{store: s, links: n.links}
	n.block = store.Block{Name: "default-0", Pool: "default", Block: ipam.Block{IPv4: netip.MustParsePrefix("10.1.0.0/29")}}
	n.Restorer = &Restorer{Store: s, Links: n.links, Detach: n.det.Del, Queue: n.queue}
	return n
}

func id(container string) attachment.ID { return attachment.ID{ContainerID: container, IfName: "eth0"} }

// record makes a record in a state, and returns its address.
func (n *node) record(container string, state store.State) ipam.Address {
	n.t.Helper()
	ctx := n.t.Context()
	if err := n.store.SetBlocks(ctx, []store.Block{n.block}); err != nil {
		n.t.Fatal(err)
	}
	a, err := n.store.Reserve(ctx, store.Request{ID: id(container), Pool: "default", Blocks: []string{"default-0"}})
	if err != nil {
		n.t.Fatal(err)
	}
	if state == store.Attached || state == store.Releasing {
		err = n.store.Attach(ctx, id(container), store.Wiring{HostIfName: "veth" + container, HostIfIndex: 7})
	}
	if err == nil && state == store.Releasing {
		_, err = n.store.Release(ctx, id(container))
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return a.Address
}

// link makes a link in the kernel.
func (n *node) link(container string, addrs ...netip.Addr) {
	n.links.found = append(n.links.found, podnet.Found{
		ID: id(container), Pool: "default", HostIfName: "veth" + container, HostIfIndex: 7, Addresses: addrs,
	})
}

// state is what is recorded: "container state address" for each attachment.
func (n *node) state() []string {
	n.t.Helper()
	all, err := n.store.List(n.t.Context())
	if err != nil {
		n.t.Fatal(err)
	}
	var lines []string
	for _, a := range all {
		lines = append(lines, a.ContainerID+" "+string(a.State)+" "+a.Address.String())
	}
	slices.Sort(lines)
	return lines
}

// cooling is the number of addresses of the block that can't be given.
func (n *node) cooling() int {
	n.t.Helper()
	us, err := n.store.Usage(n.t.Context())
	if err != nil {
		n.t.Fatal(err)
	}
	if len(us) == 0 {
		return 0
	}
	return us[0].Cooling
}

// Each case of the package's table.
func TestRestoreCases(t *testing.T) {
	for _, tt := range []struct {
		name    string
		link    bool
		state   store.State // empty: no record
		want    string
		cooling int
		report  Report
	}{
		{"link and record agree", true, store.Attached, "attached", 0, Report{Kept: 1}},
		{"the record was lost", true, "", "attached", 0, Report{Adopted: 1}},
		{"an ADD died after wiring", true, store.Pending, "", 1, Report{TakenDown: 1}},
		{"an ADD died before wiring", false, store.Pending, "", 1, Report{TakenDown: 1}},
		{"a DEL died before the link went", true, store.Releasing, "", 1, Report{TakenDown: 1}},
		{"a DEL died after the link went", false, store.Releasing, "", 1, Report{TakenDown: 1}},
		{"the pod has no network any more", false, store.Attached, "", 1, Report{TakenDown: 1}},
		{"nothing", false, "", "", 0, Report{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := newNode(t)
			addr := ipam.Address{IPv4: netip.MustParseAddr("10.1.0.5")}
			if tt.state != "" {
				addr = n.record("c1", tt.state)
			}
			if tt.link {
				n.link("c1", addr.Addrs()...)
			}
			if err := n.store.SetBlocks(t.Context(), []store.Block{n.block}); err != nil {
				t.Fatal(err)
			}
			got, err := n.Restore(t.Context(), []store.Block{n.block})
			if err != nil {
				t.Fatal(err)
			}
			if (len(got.Found) == 1) != tt.link {
				t.Errorf("found %v, want the link: %t", got.Found, tt.link)
			}
			got.Found = nil
			if d := cmp.Diff(tt.report, got); d != "" {
				t.Errorf("report (-want +got):\n%s", d)
			}
			var want []string
			if tt.want != "" {
				want = []string{"c1 " + tt.want + " " + addr.String()}
			}
			if d := cmp.Diff(want, n.state()); d != "" {
				t.Errorf("record (-want +got):\n%s", d)
			}
			if (len(n.links.found) > 0) != (tt.want != "") {
				t.Errorf("links %v", n.links.found)
			}
			if got := n.cooling(); got != tt.cooling {
				t.Errorf("%d addresses cool, want %d", got, tt.cooling)
			}
		})
	}
}

// The record was put back, or has lost its log, and is of a moment in the ADD of a pod that runs now. A link that an
// ADD hasn't completed, or that nothing can use, is taken down with its record.
func TestPendingRecordOfAWholeLink(t *testing.T) {
	for _, tt := range []struct {
		name  string
		spoil func(n *node, f *podnet.Found)
		state store.State
		kept  bool
	}{
		{"whole", func(*node, *podnet.Found) {}, store.Pending, true},
		{"a DEL was queued", func(n *node, f *podnet.Found) {
			if err := n.queue.Add(delqueue.Record{ID: f.ID, QueuedAt: time.Now()}); err != nil {
				n.t.Fatal(err)
			}
		}, store.Pending, false},
		{"no route", func(_ *node, f *podnet.Found) { f.Addresses = nil }, store.Pending, false},
		{"one route of two", func(_ *node, f *podnet.Found) { f.Addresses = f.Addresses[:1] }, store.Pending, false},
		{"one route twice", func(_ *node, f *podnet.Found) { f.Addresses[1] = f.Addresses[0] }, store.Pending, false},
		{"without labels", func(_ *node, f *podnet.Found) { f.Unlabelled = true }, store.Pending, false},
		{"of another pool", func(_ *node, f *podnet.Found) { f.Pool = "other" }, store.Pending, false},
		{"its namespace is gone", func(n *node, _ *podnet.Found) { n.Lives = func(store.Allocation) bool { return false } }, store.Pending, false},
		{"nobody knows its namespace", func(n *node, _ *podnet.Found) { n.Lives = nil }, store.Pending, false},
		{"its DEL died", func(*node, *podnet.Found) {}, store.Releasing, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := newNode(t)
			n.Lives = func(a store.Allocation) bool { return a.ID == id("c1") }
			n.block.IPv6 = netip.MustParsePrefix("fd00::/125")
			addr := n.record("c1", tt.state)
			n.link("c1", addr.Addrs()...)
			tt.spoil(n, &n.links.found[0])
			rep, err := n.Restore(t.Context(), []store.Block{n.block})
			if err != nil {
				t.Fatal(err)
			}
			var want []string
			if tt.kept {
				want = []string{"c1 attached " + addr.String()}
				if a, err := n.store.Get(t.Context(), id("c1")); err != nil || a.HostIfName != "vethc1" || a.HostIfIndex != 7 {
					t.Errorf("recorded %+v, %v", a, err)
				}
			}
			if d := cmp.Diff(want, n.state()); d != "" || len(n.links.found) != len(want) {
				t.Errorf("links %v, record (-want +got):\n%s", n.links.found, d)
			}
			if tt.kept && (rep.Adopted != 1 || rep.TakenDown > 0) {
				t.Errorf("report %+v", rep)
			}
		})
	}
}

// A link that can't be read is not absent: nothing may be freed because of it.
func TestInterruptedListChangesNothing(t *testing.T) {
	n := newNode(t)
	addr := n.record("c1", store.Attached)
	n.links.err = errors.New("dump was interrupted")
	if _, err := n.Restore(t.Context(), nil); err == nil {
		t.Error("Restore succeeded without the kernel's list")
	}
	if got := n.state(); !slices.Equal(got, []string{"c1 attached " + addr.String()}) {
		t.Errorf("record %v", got)
	}
}

// When the record is made anew, no address of the node's blocks is given before
// it has cooled down, since nobody knows when it was used last.
func TestFreshRecordCoolsEverything(t *testing.T) {
	n := newNode(t)
	n.link("c1", netip.MustParseAddr("10.1.0.3"))
	n.Fresh = true
	rep, err := n.Restore(t.Context(), []store.Block{n.block})
	if err != nil || rep.Adopted != 1 {
		t.Fatalf("%+v, %v", rep, err)
	}
	if got := n.cooling(); got != 7 {
		t.Errorf("%d addresses cool, want the 7 that aren't in use", got)
	}
	_, err = n.store.Reserve(t.Context(), store.Request{ID: id("c2"), Pool: "default", Blocks: []string{"default-0"}})
	if !errors.Is(err, store.ErrNoAddress) {
		t.Errorf("Reserve: %v, want no address", err)
	}
}

// A record that is older than the kernel, such as one that lost its log, must not
// cost those their network who got the addresses since.
func TestOutdatedRecords(t *testing.T) {
	t.Run("another pod has the address", func(t *testing.T) {
		n := newNode(t)
		addr := n.record("old", store.Attached)
		n.link("new", addr.Addrs()...)
		rep, err := n.Restore(t.Context(), []store.Block{n.block})
		if err != nil || rep.Adopted != 1 || rep.Outdated != 1 || len(rep.Conflicts) > 0 {
			t.Errorf("%+v, %v", rep, err)
		}
		if d := cmp.Diff([]string{"new attached " + addr.String()}, n.state()); d != "" || len(n.links.found) != 1 {
			t.Errorf("links %v, record (-want +got):\n%s", n.links.found, d)
		}
		if len(n.det.deleted) > 0 {
			t.Errorf("%v taken down: that withdraws the route of the other pod", n.det.deleted)
		}
	})
	t.Run("two pods have each other's", func(t *testing.T) {
		n := newNode(t)
		one, two := n.record("c1", store.Attached), n.record("c2", store.Attached)
		n.link("c1", two.Addrs()...)
		n.link("c2", one.Addrs()...)
		if rep, err := n.Restore(t.Context(), []store.Block{n.block}); err != nil || rep.Adopted != 2 || rep.Outdated != 2 {
			t.Errorf("%+v, %v", rep, err)
		}
		if d := cmp.Diff([]string{"c1 attached " + two.String(), "c2 attached " + one.String()}, n.state()); d != "" {
			t.Errorf("record (-want +got):\n%s", d)
		}
	})
	t.Run("the pod has another address", func(t *testing.T) {
		n := newNode(t)
		n.record("c1", store.Attached)
		n.link("c1", netip.MustParseAddr("10.1.0.5"))
		if rep, err := n.Restore(t.Context(), []store.Block{n.block}); err != nil || rep.Adopted != 1 || rep.Outdated != 1 {
			t.Errorf("%+v, %v", rep, err)
		}
		if d := cmp.Diff([]string{"c1 attached 10.1.0.5"}, n.state()); d != "" {
			t.Errorf("record (-want +got):\n%s", d)
		}
	})
	t.Run("routes are missing", func(t *testing.T) {
		n := newNode(t)
		addr := n.record("c1", store.Attached)
		n.link("c1")
		if rep, err := n.Restore(t.Context(), []store.Block{n.block}); err != nil || rep.Kept != 1 || rep.Outdated != 0 {
			t.Errorf("%+v, %v", rep, err)
		}
		if d := cmp.Diff([]string{"c1 attached " + addr.String()}, n.state()); d != "" {
			t.Errorf("record (-want +got):\n%s", d)
		}
	})
}

// The routes of a pod are made from the recorded link.
func TestLinksAreRecordedAsTheyAre(t *testing.T) {
	n := newNode(t)
	addr := n.record("c1", store.Attached)
	n.link("c1", addr.Addrs()...)
	n.links.found[0].HostIfName, n.links.found[0].HostIfIndex = "vethnew", 12
	if rep, err := n.Restore(t.Context(), []store.Block{n.block}); err != nil || rep.Kept != 1 {
		t.Errorf("%+v, %v", rep, err)
	}
	if a, err := n.store.Get(t.Context(), id("c1")); err != nil || a.HostIfName != "vethnew" || a.HostIfIndex != 12 || a.Address != addr {
		t.Errorf("recorded %+v, %v", a, err)
	}
}

func TestConflictsAreLeftAlone(t *testing.T) {
	n := newNode(t)
	addr := n.record("c1", store.Attached)
	n.link("c1", addr.Addrs()...)
	n.link("c2", addr.Addrs()...)
	n.link("c3")
	n.link("c4", netip.MustParseAddr("10.1.0.6"), netip.MustParseAddr("10.1.0.7"))
	rep, err := n.Restore(t.Context(), []store.Block{n.block})
	if err != nil {
		t.Fatal(err)
	}
	if rep.Kept != 1 || len(rep.Conflicts) != 3 || len(n.links.found) != 4 {
		t.Errorf("report %+v, %d links; want one kept and three named conflicts, all links left", rep, len(n.links.found))
	}
	if text := strings.Join(rep.Conflicts, "\n"); !strings.Contains(text, "c2") || !strings.Contains(text, addr.String()) {
		t.Errorf("conflicts don't name the container and the address:\n%s", text)
	}
}

// A block that the API server doesn't have keeps its pods and is reported, their addresses aren't: it is claimed.
// One without pods is forgotten.
func TestBlocksThatTheAPILost(t *testing.T) {
	n := newNode(t)
	addr := n.record("c1", store.Attached)
	n.link("c1", addr.Addrs()...)
	empty := store.Block{Name: "default-1", Pool: "default", Block: ipam.Block{IPv4: netip.MustParsePrefix("10.1.1.0/29")}}
	if err := n.store.SetBlocks(t.Context(), []store.Block{empty}); err != nil {
		t.Fatal(err)
	}
	rep, err := n.Restore(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(rep.MissingBlocks, []string{"default-0"}) || len(rep.Homeless) > 0 || rep.Kept != 1 {
		t.Errorf("report %+v", rep)
	}
	us, err := n.store.Usage(t.Context())
	if err != nil || len(us) != 1 || us[0].Name != "default-0" {
		t.Errorf("recorded blocks %+v, %v", us, err)
	}
}

func TestQueuedDeletionsAreReplayed(t *testing.T) {
	n := newNode(t)
	addr := n.record("c1", store.Attached)
	n.link("c1", addr.Addrs()...)
	for _, c := range []string{"c1", "unknown"} {
		if err := n.queue.Add(delqueue.Record{ID: attachment.ID{ContainerID: c, IfName: "eth0"}, QueuedAt: time.Now()}); err != nil {
			t.Fatal(err)
		}
	}
	n.det.err = errors.New("netlink: busy")
	if _, err := n.Restore(t.Context(), []store.Block{n.block}); err == nil {
		t.Error("Restore succeeded though a queued deletion failed")
	}
	n.det.err = nil
	rep, err := n.Restore(t.Context(), []store.Block{n.block})
	if err != nil || rep.Replayed != 2 {
		t.Fatalf("%+v, %v", rep, err)
	}
	if left, _, err := n.queue.List(); err != nil || len(left) > 0 || len(n.state()) > 0 || len(n.links.found) > 0 {
		t.Errorf("queue %v, %v; record %v; links %v", left, err, n.state(), n.links.found)
	}
}

// An ADD takes the queued DEL of its own ID away, also while the replay is at another one.
func TestReplaySparesWhatIsAddedMeanwhile(t *testing.T) {
	n := newNode(t)
	for i, c := range []string{"first", "again"} {
		rec := delqueue.Record{ID: id(c), QueuedAt: time.Unix(int64(i), 0)}
		if err := n.queue.Add(rec); err != nil {
			t.Fatal(err)
		}
	}
	var addr ipam.Address
	n.det.meanwhile = func() {
		n.det.meanwhile = nil
		if err := n.queue.Remove(id("again")); err != nil {
			t.Fatal(err)
		}
		addr = n.record("again", store.Attached)
	}
	replayed, err := n.Replay(t.Context())
	if err != nil || replayed != 1 || !slices.Equal(n.det.deleted, []attachment.ID{id("first")}) {
		t.Errorf("%d replayed, deleted %v, %v; want only the first", replayed, n.det.deleted, err)
	}
	if d := cmp.Diff([]string{"again attached " + addr.String()}, n.state()); d != "" {
		t.Errorf("record (-want +got):\n%s", d)
	}
}

// Links of 2.x get the marks of today's; addresses without a block are named. Pods that
// have no address of Coil are left alone.
func TestLinksOfEarlierVersions(t *testing.T) {
	n := newNode(t)
	n.link("inside", netip.MustParseAddr("10.1.0.1"))
	n.link("outside", netip.MustParseAddr("10.9.0.1"))
	n.link("none")
	for i := range n.links.found {
		n.links.found[i].Unlabelled = true
	}
	n.links.found[2].Pool = ""
	n.Fresh = true
	rep, err := n.Restore(t.Context(), []store.Block{n.block})
	if err != nil {
		t.Fatal(err)
	}
	if len(rep.Homeless) != 1 || !strings.HasPrefix(rep.Homeless[0], "10.9.0.1 of link vethoutside") || rep.Adopted != 2 {
		t.Errorf("%+v, want 2 adopted, and that 10.9.0.1 has no block", rep)
	}
	for i, want := range []bool{false, false, true} {
		if f := n.links.found[i]; f.Unlabelled != want {
			t.Errorf("%s: unlabelled %t, want %t", f.ContainerID, f.Unlabelled, want)
		}
	}
}
