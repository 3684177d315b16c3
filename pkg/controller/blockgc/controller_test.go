package blockgc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	corefake "k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	"github.com/coil-net/coil/generated/informers/externalversions"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// fixture is a controller whose cache is filled by hand and whose writes are noted.
type fixture struct {
	*Controller
	nodes  cache.Indexer
	events *events.FakeRecorder
	writes []string
	// fail is asked before each write of a block.
	fail func(block string) error
	live *corefake.Clientset
}

func newFixture(t *testing.T, live ...*corev1.Node) *fixture {
	t.Helper()
	f := &fixture{events: events.NewFakeRecorder(10000), fail: func(string) error { return nil }, live: corefake.NewSimpleClientset()}
	for _, n := range live {
		if _, err := f.live.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	coil := fake.NewSimpleClientset()
	coil.PrependReactor("*", "addressblocks", f.react)
	informed := externalversions.NewSharedInformerFactory(coil, 0).Coil().V2()
	nodes := informers.NewSharedInformerFactory(f.live, 0).Core().V1().Nodes()
	c, err := New(Config{
		Coil: coil, Core: f.live, Blocks: informed.AddressBlocks(), Pools: informed.AddressPools(), Nodes: nodes,
		Recorder: f.events, Interval: DefaultInterval, Quarantine: DefaultQuarantine,
	})
	if err != nil {
		t.Fatal(err)
	}
	f.Controller, f.nodes = c, nodes.Informer().GetIndexer()
	return f
}

func (f *fixture) react(action clienttesting.Action) (bool, runtime.Object, error) {
	switch a := action.(type) {
	case clienttesting.PatchActionImpl:
		if err := f.fail(a.Name); err != nil {
			return true, nil, err
		}
		var p struct{ Metadata metav1.ObjectMeta }
		if err := json.Unmarshal(a.Patch, &p); err != nil || p.Metadata.UID == "" || p.Metadata.ResourceVersion == "" {
			return true, nil, fmt.Errorf("patch %s without preconditions: %w", a.Patch, err)
		}
		what := "note"
		if a.Subresource == "status" {
			what = "conditions " + string(a.Patch) + " of"
		} else if p.Metadata.Annotations == nil {
			what = "release"
		} else if p.Metadata.Finalizers != nil {
			what = "note and finalizer"
		}
		f.writes = append(f.writes, what+" "+a.Name)
		obj, _, err := f.blocks.GetByKey(a.Name)
		if err != nil {
			return true, nil, err
		}
		b := obj.(*v2.AddressBlock).DeepCopy()
		b.ResourceVersion = "2"
		return true, b, nil
	case clienttesting.DeleteActionImpl:
		pre := a.DeleteOptions.Preconditions
		if pre == nil || pre.UID == nil || pre.ResourceVersion == nil {
			return true, nil, errors.New("delete without preconditions")
		}
		f.writes = append(f.writes, "delete "+a.Name+" at "+*pre.ResourceVersion)
		return true, nil, f.fail(a.Name)
	}
	return true, nil, errors.New("unexpected call")
}

func (f *fixture) add(t *testing.T, bs ...*v2.AddressBlock) {
	t.Helper()
	for _, b := range bs {
		if err := f.blocks.Add(b); err != nil {
			t.Fatal(err)
		}
	}
}

func block(name, node, uid string) *v2.AddressBlock {
	return &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{
		Name: name, UID: types.UID("uid of " + name), ResourceVersion: "1", Finalizers: []string{v2.Finalizer},
		Labels:      map[string]string{v2.LabelNode: node, v2.LabelPool: "default"},
		Annotations: map[string]string{v2.AnnotationNodeUID: uid},
	}}
}

func TestSync(t *testing.T) {
	old := func(b *v2.AddressBlock) *v2.AddressBlock {
		b.DeletionTimestamp = new(metav1.NewTime(time.Now().Add(-time.Hour)))
		b.Annotations[v2.AnnotationNodeGone] = goneNote(b, time.Now().Add(-time.Hour))
		return b
	}
	bare := block("default-3", "node", "a")
	bare.Finalizers = []string{"example.com/other"}
	foreign := old(block("default-4", "node", "a"))
	foreign.Finalizers = []string{"example.com/other"}
	// As Coil 2.x made it: it names no Node.
	v2x := func(name string) *v2.AddressBlock {
		b := block(name, "node", "")
		b.Annotations[v2.AnnotationDisowned] = "b"
		return b
	}
	own := v2x("default-2")
	own.Annotations[v2.AnnotationNodeUID] = "b"
	tests := []struct {
		name   string
		blocks []*v2.AddressBlock
		live   []*corev1.Node
		cached []*corev1.Node
		fail   map[string]error
		want   []string
		failed string // in the error
	}{
		{name: "a lost node", blocks: []*v2.AddressBlock{block("default-0", "node", "a"), old(block("default-1", "node", "a"))},
			want: []string{"note default-0", "delete default-0 at 2", "release default-1"}},
		{name: "the cache doesn't have the node, the API server has", blocks: []*v2.AddressBlock{block("default-0", "node", "a"), old(block("default-1", "node", "a"))},
			live: []*corev1.Node{node("node", "a")}},
		{name: "the cache has the node, the API server hasn't", blocks: []*v2.AddressBlock{block("default-0", "node", "a")},
			cached: []*corev1.Node{node("node", "a")}},
		{name: "the cache has a node made again, the API server has none", blocks: []*v2.AddressBlock{block("default-0", "node", "a")},
			cached: []*corev1.Node{node("node", "b")}, want: []string{"note default-0", "delete default-0 at 2"}},
		{name: "made again, and its coild disowned what Coil 2.x made, not what it claimed",
			blocks: []*v2.AddressBlock{v2x("default-0"), old(v2x("default-1")), own, block("default-3", "node", "")},
			live:   []*corev1.Node{node("node", "b")}, cached: []*corev1.Node{node("node", "b")},
			want: []string{"note default-0", "delete default-0 at 2", "release default-1"}},
		{name: "without our finalizer the name would be free at once", blocks: []*v2.AddressBlock{bare},
			want: []string{"note and finalizer default-3", "delete default-3 at 2"}},
		{name: "somebody else's finalizer", blocks: []*v2.AddressBlock{foreign}},
		{name: "one that can't be written doesn't stop the others",
			blocks: []*v2.AddressBlock{block("default-0", "node", "a"), block("default-1", "node", "a"), block("default-2", "node", "a")},
			fail:   map[string]error{"default-1": apierrors.NewConflict(v2.Resource("addressblocks"), "default-1", errors.New("it was changed"))},
			want:   []string{"delete default-0 at 2", "delete default-2 at 2", "note default-0", "note default-2"}, failed: "default-1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, tt.live...)
			f.add(t, tt.blocks...)
			for _, b := range tt.blocks {
				f.seen.Set(b.UID, time.Now().Add(-time.Hour))
			}
			f.add(t, block("strange", "", ""), block("default-9", "other", "o"))
			for _, n := range tt.cached {
				if err := f.nodes.Add(n); err != nil {
					t.Fatal(err)
				}
			}
			f.fail = func(b string) error { return tt.fail[b] }
			err := f.sync(t.Context(), "node")
			if tt.failed != "" && (err == nil || !strings.Contains(err.Error(), tt.failed) || !apierrors.IsConflict(err)) {
				t.Errorf("error is %v, want a conflict about %s", err, tt.failed)
			}
			slices.Sort(f.writes)
			slices.Sort(tt.want)
			if !slices.Equal(f.writes, tt.want) {
				t.Errorf("writes are %q, want %q", f.writes, tt.want)
			}
		})
	}
}

func node(name, uid string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(uid)}}
}

// A Node that is gone sees nothing wrong with addresses any more. One that is there says so itself.
func TestLinesOfNodes(t *testing.T) {
	condition := func(kind, message string) metav1.Condition {
		return metav1.Condition{Type: kind, Status: metav1.ConditionTrue, Reason: v2.ReasonPacketsDropped, Message: message}
	}
	told := func(name string, conditions ...metav1.Condition) *v2.AddressBlock {
		b := block(name, "", "")
		b.Labels = map[string]string{v2.LabelPool: "out"}
		b.Status.Conditions = conditions
		return b
	}
	blocks := []*v2.AddressBlock{
		told("out-0", condition(v2.BlockConflicting, "node other: a rival"), condition(v2.BlockForwardingBlocked, "node other: dropped\nnode node: dropped")),
		told("out-1", condition(v2.BlockForwardingBlocked, "node node: dropped")),
		told("out-2", condition(v2.BlockForwardingBlocked, "node other: dropped")),
	}
	for name, there := range map[string]bool{"gone": false, "there": true} {
		t.Run(name, func(t *testing.T) {
			var live []*corev1.Node
			if there {
				live = append(live, node("node", "a"))
			}
			f := newFixture(t, live...)
			f.add(t, blocks...)
			if err := f.sync(t.Context(), "node"); err != nil {
				t.Fatal(err)
			}
			if there {
				if len(f.writes) != 0 {
					t.Errorf("writes are %q, want none", f.writes)
				}
				return
			}
			wants := map[string][]string{
				"of out-0": {`"message":"node other: a rival"`, `"message":"node other: dropped"`},
				"of out-1": {`"message":"node node: the Node is gone"`, `"status":"False"`},
			}
			for _, w := range f.writes {
				i := strings.LastIndex(w, "of ")
				for _, want := range wants[w[i:]] {
					if !strings.Contains(w, want) {
						t.Errorf("write is %q, want one with %s", w, want)
					}
				}
				delete(wants, w[i:])
			}
			if len(wants) != 0 || len(f.writes) != 2 {
				t.Errorf("writes are %q, want one each of out-0 and out-1", f.writes)
			}
		})
	}
}

// The clock that noted the time on a block may have been another leader's, and wrong.
func TestQuarantineByTheOwnClock(t *testing.T) {
	start := time.Now()
	for name, noted := range map[string]time.Time{"behind": start.Add(-time.Hour), "ahead": start.Add(24 * time.Hour)} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			b := block("default-0", "node", "a")
			b.DeletionTimestamp = new(metav1.NewTime(noted))
			b.Annotations[v2.AnnotationNodeGone] = goneNote(b, noted)
			f.add(t, b)
			for _, step := range []struct {
				after time.Duration
				want  []string
			}{
				{0, nil},
				{DefaultQuarantine - time.Second, nil},
				{DefaultQuarantine, []string{"release default-0"}},
			} {
				f.now = func() time.Time { return start.Add(step.after) }
				_ = f.sync(t.Context(), "node") // which says when to look again
				if !slices.Equal(f.writes, step.want) {
					t.Errorf("%s after the block was first seen: writes are %q, want %q", step.after, f.writes, step.want)
				}
			}
			claimed := b.DeepCopy()
			claimed.Annotations[v2.AnnotationNodeUID] = "b"
			f.blockChanged(b, claimed)
			if _, ok := f.seen.Find(b.UID); ok {
				t.Error("a claimed block counts as one in quarantine")
			}
		})
	}
}

// A Node that is made again and deleted once more before its coild said anything may have pods that use the block:
// the quarantine of the first deletion doesn't count. A replica that takes over knows that, too.
func TestQuarantineOfASecondDeletion(t *testing.T) {
	const again, gone = 5 * time.Minute, 20 * time.Minute
	for _, tt := range []struct {
		name string
		// told, synced and cached say how the controller learns of the Node that was made again; cached is a look at the
		// API server before the event of the deletion.
		told, synced, cached bool
		uid                  string // of the block; Coil 2.x has none
		disowned             string
		released             time.Duration
	}{
		{"an event told of it", true, false, false, "a", "", gone + DefaultQuarantine},
		{"a look at the API server", false, true, false, "a", "", 16*time.Minute + DefaultQuarantine},
		{"a look ahead of the event", false, false, true, "a", "", gone + DefaultQuarantine},
		{"both", true, true, false, "a", "", gone + DefaultQuarantine},
		{"of Coil 2.x", true, true, false, "", "", gone + DefaultQuarantine},
		{"disowned by that Node", true, true, true, "a", "b", DefaultQuarantine},
		{"disowned by another Node", true, true, false, "a", "c", gone + DefaultQuarantine},
		{"nobody saw that Node", false, false, false, "a", "", DefaultQuarantine},
	} {
		t.Run(tt.name, func(t *testing.T) {
			start := time.Now()
			f := newFixture(t)
			b := block("default-0", "node", tt.uid)
			b.DeletionTimestamp = new(metav1.NewTime(start))
			b.Annotations[v2.AnnotationNodeGone] = goneNote(b, start)
			b.Annotations[v2.AnnotationDisowned] = tt.disowned
			f.add(t, b)
			n := node("node", "b")
			for _, step := range []struct {
				at time.Duration
				do func() error
			}{
				{0, func() error { f.blockChanged(nil, b); return nil }},
				{again, func() error {
					if tt.told {
						f.nodeChanged(n)
					}
					return f.live.Tracker().Add(n)
				}},
				{16 * time.Minute, func() error {
					if tt.synced {
						_ = f.sync(t.Context(), "node") // which says when to look again
					}
					return nil
				}},
				{gone, func() error {
					if tt.told {
						f.nodeChanged(n)
					}
					if err := f.live.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("nodes"), "", "node"); err != nil || !tt.cached {
						return err
					}
					if err := f.nodes.Add(n); err != nil {
						return err
					}
					_ = f.sync(t.Context(), "node")
					return f.nodes.Delete(n)
				}},
			} {
				f.now = func() time.Time { return start.Add(step.at) }
				if err := step.do(); err != nil {
					t.Fatal(err)
				}
			}
			for _, step := range []struct {
				at   time.Duration
				want bool
			}{{max(gone, tt.released-time.Second), tt.released <= gone}, {max(gone, tt.released), true}} {
				f.now = func() time.Time { return start.Add(step.at) }
				_ = f.sync(t.Context(), "node")
				if got := slices.Contains(f.writes, "release default-0"); got != step.want {
					t.Errorf("released %s after the first deletion: %t, want %t", step.at, got, step.want)
				}
			}
		})
	}
}

// "Could not read" is not "gone".
func TestUnreadableNodeIsNotGone(t *testing.T) {
	f := newFixture(t)
	f.add(t, block("default-0", "node", "a"))
	f.live.PrependReactor("get", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewTimeoutError("slow", 1)
	})
	if err := f.sync(t.Context(), "node"); err == nil || len(f.writes) > 0 {
		t.Errorf("error is %v, writes are %q", err, f.writes)
	}
}

// A node whose deletion was missed is found when all blocks are looked at, and blocks
// that nobody frees are explained.
func TestAllFindsWhatEventsDidNotTell(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		for i := range 1000 {
			f.add(t, block(fmt.Sprintf("default-%d", i), fmt.Sprintf("node-%d", i), "a"))
		}
		f.add(t, block("no-label", "", ""))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		f.all(t.Context())
		go func() { done <- f.loop.Run(ctx, 1) }()
		synctest.Wait()
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		deletes := 0
		for _, w := range f.writes {
			if strings.HasPrefix(w, "delete ") {
				deletes++
			}
		}
		if deletes != 1000 {
			t.Errorf("%d blocks of 1000 lost nodes are in quarantine", deletes)
		}
		close(f.events.Events)
		var reasons []string
		for e := range f.events.Events {
			reasons = append(reasons, strings.Fields(e)[1])
		}
		slices.Sort(reasons)
		if reasons = slices.Compact(reasons); !slices.Equal(reasons, []string{"NoHolder", "NodeGone", "PoolGone"}) {
			t.Errorf("Events have the reasons %q", reasons)
		}
	})
}

// A block of an earlier Node is told of when coild had time to claim or disown it and did neither.
func TestBlockThatNobodyClaims(t *testing.T) {
	start := time.Now()
	for _, c := range []struct {
		name, uid, disowned string
		blockAge, nodeAge   time.Duration
		want                bool
	}{
		{"of an earlier Node", "a", "", time.Hour, 30 * time.Minute, true},
		{"of an earlier Node, disowned", "a", "b", time.Hour, 30 * time.Minute, false},
		{"of an earlier Node, which was made again just now", "a", "", time.Hour, time.Minute, false},
		{"of the Node", "b", "", 20 * time.Minute, 30 * time.Minute, false},
		{"of Coil 2.x, older than the Node", "", "", time.Hour, 30 * time.Minute, true},
		{"of Coil 2.x, older than the Node, disowned", "", "b", time.Hour, 30 * time.Minute, false},
		{"of Coil 2.x, made for the Node", "", "", 20 * time.Minute, 30 * time.Minute, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFixture(t)
			n := node("node", "b")
			n.CreationTimestamp = metav1.NewTime(start.Add(-c.nodeAge))
			if err := f.nodes.Add(n); err != nil {
				t.Fatal(err)
			}
			b := block("default-0", "node", c.uid)
			b.CreationTimestamp = metav1.NewTime(start.Add(-c.blockAge))
			b.Annotations[v2.AnnotationDisowned] = c.disowned
			f.explain(t.Context(), b)
			close(f.events.Events)
			told := false
			for e := range f.events.Events {
				told = told || strings.Contains(e, "NotClaimed")
			}
			if told != c.want {
				t.Errorf("the Event NotClaimed: %t, want %t", told, c.want)
			}
		})
	}
}
