package pool

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	corefake "k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	"github.com/coil-net/coil/generated/informers/externalversions"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/pools"
)

type fakeCarver struct {
	last *int32
	busy bool
	// claims are those of each pool.
	claims pools.Claims
	tell   func(pool string)
}

func (f *fakeCarver) LastIndex(*v2.AddressPool) *int32 { return f.last }
func (f *fakeCarver) Busy(string) bool                 { return f.busy }
func (f *fakeCarver) Claims(string) pools.Claims       { return f.claims }
func (f *fakeCarver) OnClaim(tell func(string))        { f.tell = tell }

// fixture is a controller whose caches are filled by hand and whose writes are noted
// and done in the cache.
type fixture struct {
	*Controller
	carver   *fakeCarver
	pools    cache.Indexer
	events   *events.FakeRecorder
	registry *prometheus.Registry
	writes   []string
	live     []v2.AddressBlock // what a list of blocks returns
	fail     error
	// failDelete and failLabel are by block.
	failDelete, failLabel map[string]error
}

func newFixture(t *testing.T, p *v2.AddressPool) *fixture {
	t.Helper()
	f := &fixture{carver: &fakeCarver{}, events: events.NewFakeRecorder(100), registry: prometheus.NewRegistry()}
	coil := fake.NewSimpleClientset()
	coil.PrependReactor("*", "*", f.react)
	informed := externalversions.NewSharedInformerFactory(coil, 0).Coil().V2()
	core := informers.NewSharedInformerFactory(corefake.NewSimpleClientset(), 0)
	c, err := New(Config{
		Coil: coil, Pools: informed.AddressPools(), Blocks: informed.AddressBlocks(),
		Nodes: core.Core().V1().Nodes(), Services: core.Networking().V1().ServiceCIDRs(),
		Carver: f.carver, Recorder: f.events, Registry: f.registry,
	})
	if err != nil {
		t.Fatal(err)
	}
	f.Controller, f.pools = c, informed.AddressPools().Informer().GetIndexer()
	if err := f.pools.Add(p); err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *fixture) react(action clienttesting.Action) (bool, runtime.Object, error) {
	if f.fail != nil {
		return true, nil, f.fail
	}
	switch a := action.(type) {
	case clienttesting.ListActionImpl:
		if a.ListRestrictions.Labels.Empty() { // or it can't be parsed
			return true, nil, apierrors.NewBadRequest("no selector")
		}
		return true, &v2.AddressBlockList{Items: f.live}, nil
	case clienttesting.UpdateActionImpl:
		p := a.Object.(*v2.AddressPool)
		f.writes = append(f.writes, "status")
		return true, p, f.pools.Update(p)
	case clienttesting.DeleteActionImpl:
		if pre := a.DeleteOptions.Preconditions; pre == nil || pre.UID == nil || pre.ResourceVersion == nil {
			return true, nil, errors.New("delete without preconditions")
		}
		f.writes = append(f.writes, "delete "+a.Name)
		return true, nil, f.failDelete[a.Name]
	case clienttesting.PatchActionImpl:
		var patch struct{ Metadata metav1.ObjectMeta }
		if err := json.Unmarshal(a.Patch, &patch); err != nil || patch.Metadata.UID == "" || patch.Metadata.ResourceVersion == "" {
			return true, nil, fmt.Errorf("patch %s without preconditions: %w", a.Patch, err)
		}
		if a.Resource.Resource == "addressblocks" {
			var labels struct {
				Metadata struct{ Labels map[string]json.RawMessage }
			}
			if err := json.Unmarshal(a.Patch, &labels); err != nil || len(labels.Metadata.Labels) != 1 {
				return true, nil, fmt.Errorf("patch %s of more than a label: %w", a.Patch, err)
			}
			if value, ok := labels.Metadata.Labels[v2.LabelClosed]; ok {
				f.writes = append(f.writes, fmt.Sprintf("close %s %s", a.Name, value))
				return true, &v2.AddressBlock{}, f.failLabel[a.Name]
			}
			f.writes = append(f.writes, fmt.Sprintf("label %s %s", a.Name, labels.Metadata.Labels[v2.LabelAnnounce]))
			return true, &v2.AddressBlock{}, f.failLabel[a.Name]
		}
		obj, _, err := f.pools.GetByKey(a.Name)
		if err != nil {
			return true, nil, err
		}
		p := obj.(*v2.AddressPool).DeepCopy()
		p.Finalizers = patch.Metadata.Finalizers
		f.writes = append(f.writes, fmt.Sprintf("finalizers %q", p.Finalizers))
		if p.DeletionTimestamp != nil && len(p.Finalizers) == 0 {
			return true, p, f.pools.Delete(p)
		}
		return true, p, f.pools.Update(p)
	}
	return true, nil, errors.New("unexpected call")
}

func (f *fixture) mustSync(t *testing.T) {
	t.Helper()
	f.writes = nil
	if err := f.sync(t.Context(), "default"); err != nil {
		t.Fatal(err)
	}
}

func newPool() *v2.AddressPool {
	return &v2.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: "default", UID: "uid", ResourceVersion: "1", Finalizers: []string{"example.com/other"}},
		Spec:       v2.AddressPoolSpec{BlockSizeBits: 0, Subnets: []v2.SubnetSet{{IPv4: new("10.0.0.0/30")}}},
	}
}

func deletedPool() *v2.AddressPool {
	p := newPool()
	p.DeletionTimestamp = new(metav1.Now())
	p.Finalizers = []string{v2.Finalizer}
	return p
}

func (f *fixture) addBlock(t *testing.T, name, label string, allocated int32) {
	t.Helper()
	b := &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v2.LabelPool: label, v2.LabelNode: "node"}},
		Status:     v2.AddressBlockStatus{Allocated: allocated},
	}
	if err := f.blocks.Add(b); err != nil {
		t.Fatal(err)
	}
}

func TestSyncWritesWhatHasChanged(t *testing.T) {
	f := newFixture(t, newPool())
	f.mustSync(t)
	if want := []string{`finalizers ["example.com/other" "coil.cybozu.com"]`, "status"}; !slices.Equal(f.writes, want) {
		t.Errorf("writes are %q, want %q", f.writes, want)
	}
	f.mustSync(t)
	if len(f.writes) > 0 {
		t.Errorf("with nothing changed, writes are %q", f.writes)
	}
	// One malformed block among others counts, and does no harm.
	f.addBlock(t, "default-0", "default", 1)
	f.addBlock(t, "default-nonsense", "default", 0)
	f.addBlock(t, "default-1", "", 1) // its name is taken, whatever its label
	f.addBlock(t, "other-0", "other", 1)
	f.carver.last = new(int32(1))
	f.mustSync(t)
	p := f.pool(t)
	if p.Status.Blocks.Summary != "3/4" || p.Status.Addresses.Summary != "2/4" || *p.Status.LastIndex != 1 {
		t.Errorf("status is %+v", p.Status)
	}
	f.requireMetrics(t, `coil_controller_allocated_blocks{pool="default"} 3`, `coil_controller_max_blocks{pool="default"} 4`,
		`coil_floating_addresses{pool="default",state="cooling"} 0`, `coil_floating_addresses{pool="default",state="used"} 0`)
	f.addBlock(t, "default-2", "default", 1)
	f.mustSync(t)
	f.mustSync(t)
	if len(f.events.Events) != 1 {
		t.Fatalf("%d Events, want 1", len(f.events.Events))
	}
	if e := <-f.events.Events; !strings.Contains(e, v2.ReasonPoolExhausted) {
		t.Errorf("Event is %q", e)
	}
}

func (f *fixture) pool(t *testing.T) *v2.AddressPool {
	t.Helper()
	obj, ok, err := f.pools.GetByKey("default")
	if !ok || err != nil {
		t.Fatalf("there is no pool: %v", err)
	}
	return obj.(*v2.AddressPool)
}

func (f *fixture) requireMetrics(t *testing.T, lines ...string) {
	t.Helper()
	want, last := "", ""
	for _, l := range lines {
		name, _, _ := strings.Cut(l, "{")
		if name == last {
			want += l + "\n"
			continue
		}
		last = name
		help := map[string]string{
			"coil_controller_allocated_blocks": "Blocks of an AddressPool that nodes hold, and floating addresses. Only the leader exports it.",
			"coil_controller_max_blocks":       "Blocks that an AddressPool has, taken or not. Only the leader exports it.",
			"coil_floating_addresses": "Floating addresses of an AddressPool, pairs as one: used ones belong to an object, cooling ones were released. " +
				"Only the leader exports it.",
		}[name]
		want += fmt.Sprintf("# HELP %s %s\n# TYPE %s gauge\n%s\n", name, help, name, l)
	}
	if err := testutil.GatherAndCompare(f.registry, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}

// Floating addresses are counted apart, in the status and in metrics.
func TestFloatingIsCounted(t *testing.T) {
	f := newFixture(t, newPool())
	for i, released := range []*metav1.Time{nil, nil, new(metav1.Now())} {
		b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("default-%d", i), Labels: map[string]string{v2.LabelPool: "default", v2.LabelReserved: v2.ReservedValue, v2.LabelFloating: v2.FloatingValue}},
			Floating: &v2.Floating{Claim: "c", ReleasedAt: released}}
		if err := f.blocks.Add(b); err != nil {
			t.Fatal(err)
		}
	}
	f.mustSync(t)
	f.requireMetrics(t, `coil_controller_allocated_blocks{pool="default"} 3`, `coil_controller_max_blocks{pool="default"} 4`,
		`coil_floating_addresses{pool="default",state="cooling"} 1`, `coil_floating_addresses{pool="default",state="used"} 2`)
	if got := f.pool(t).Status.Floating; got != (v2.FloatingUsage{Used: 2, Cooling: 1}) {
		t.Errorf("the status counts %+v", got)
	}
}

func TestDeletedPool(t *testing.T) {
	t.Run("waits for its blocks, and has their nodes drain them", func(t *testing.T) {
		f := newFixture(t, deletedPool())
		for i := range 3 {
			f.addBlock(t, fmt.Sprintf("default-%d", i), "default", 1)
		}
		conflict := apierrors.NewConflict(v2.Resource("addressblocks"), "default-1", errors.New("it was changed"))
		f.failDelete = map[string]error{"default-1": conflict}
		reserved := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: "default-3", Labels: map[string]string{v2.LabelPool: "default", v2.LabelReserved: v2.ReservedValue}}}
		going := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: "default-4", Labels: map[string]string{v2.LabelPool: "default"}, DeletionTimestamp: new(metav1.Now())}}
		for _, b := range []*v2.AddressBlock{reserved, going} {
			if err := f.blocks.Add(b); err != nil {
				t.Fatal(err)
			}
		}
		if err := f.sync(t.Context(), "default"); !apierrors.IsConflict(err) {
			t.Errorf("error is %v, want the conflict, so that it is tried again", err)
		}
		slices.Sort(f.writes)
		if want := []string{"delete default-0", "delete default-1", "delete default-2", "status"}; !slices.Equal(f.writes, want) {
			t.Errorf("writes are %q, want %q", f.writes, want)
		}
	})
	t.Run("waits for blocks that only the API server knows", func(t *testing.T) {
		f := newFixture(t, deletedPool())
		f.live = []v2.AddressBlock{{ObjectMeta: metav1.ObjectMeta{Name: "default-0", Labels: map[string]string{v2.LabelPool: "default"}}}}
		f.mustSync(t)
		if !slices.Equal(f.writes, []string{"status"}) {
			t.Errorf("writes are %q", f.writes)
		}
	})
	t.Run("waits for who may be carving", func(t *testing.T) {
		f := newFixture(t, deletedPool())
		f.carver.busy = true
		if err := f.sync(t.Context(), "default"); err == nil || len(f.writes) > 0 {
			t.Errorf("error is %v, writes are %q; want to be called again", err, f.writes)
		}
	})
	t.Run("stays when blocks can't be listed", func(t *testing.T) {
		f := newFixture(t, deletedPool())
		f.fail = errors.New("no")
		if err := f.sync(t.Context(), "default"); err == nil || len(f.writes) > 0 {
			t.Errorf("error is %v, writes are %q", err, f.writes)
		}
	})
	t.Run("goes, and its metrics with it", func(t *testing.T) {
		f := newFixture(t, deletedPool())
		f.mustSync(t)
		if !slices.Equal(f.writes, []string{"finalizers []"}) {
			t.Errorf("writes are %q", f.writes)
		}
		f.requireMetrics(t, `coil_controller_allocated_blocks{pool="default"} 0`, `coil_controller_max_blocks{pool="default"} 4`,
			`coil_floating_addresses{pool="default",state="cooling"} 0`, `coil_floating_addresses{pool="default",state="used"} 0`)
		f.mustSync(t)
		f.requireMetrics(t)
	})
	t.Run("goes, though its name can't be in a label", func(t *testing.T) {
		p := deletedPool()
		p.Name = strings.Repeat("a", 64) // of Coil 2.x
		f := newFixture(t, p)
		if err := f.sync(t.Context(), p.Name); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(f.writes, []string{"finalizers []"}) {
			t.Errorf("writes are %q", f.writes)
		}
	})
	t.Run("leaves the finalizers of others alone", func(t *testing.T) {
		p := deletedPool()
		p.Finalizers = append(p.Finalizers, "example.com/other")
		f := newFixture(t, p)
		f.mustSync(t)
		f.mustSync(t)
		if !slices.Equal(f.pool(t).Finalizers, []string{"example.com/other"}) || len(f.writes) > 0 {
			t.Errorf("finalizers are %q, writes %q", f.pool(t).Finalizers, f.writes)
		}
	})
}

func TestOverlapIsSeenAgainAfterAChangeOfOthers(t *testing.T) {
	f := newFixture(t, newPool())
	overlapping := func() metav1.ConditionStatus {
		t.Helper()
		f.mustSync(t)
		p, _, err := f.pools.GetByKey("default")
		if err != nil {
			t.Fatal(err)
		}
		c := meta.FindStatusCondition(p.(*v2.AddressPool).Status.Conditions, v2.PoolOverlapping)
		if c == nil {
			t.Fatal("the condition is missing")
		}
		return c.Status
	}
	if got := overlapping(); got != metav1.ConditionFalse {
		t.Errorf("Overlapping is %s of a pool that is alone, want False", got)
	}
	other := newPool()
	other.Name = "other"
	if err := f.pools.Add(other); err != nil {
		t.Fatal(err)
	}
	f.poolChanged(nil, other)
	if got := overlapping(); got != metav1.ConditionTrue {
		t.Errorf("Overlapping is %s beside a pool with the same subnet, want True", got)
	}
	if err := f.pools.Delete(other); err != nil {
		t.Fatal(err)
	}
	f.poolChanged(other, nil)
	if got := overlapping(); got != metav1.ConditionFalse {
		t.Errorf("Overlapping is %s after the other pool went, want False", got)
	}
}

// The blocks of a pool, floating ones among them, say how they are announced, whoever changed that, also while the pool is being
// deleted. Those of others stay as they are.
func TestBlocksSayHowTheyAreAnnounced(t *testing.T) {
	conflict := apierrors.NewConflict(v2.Resource("addressblocks"), "default-1", errors.New("it was changed"))
	for _, c := range []struct {
		name     string
		announce v2.PoolAnnounce
		deleted  bool
		fail     map[string]error
		want     []string
	}{
		{"as before there was a choice", "", false, nil, []string{"label default-1 null", "label default-2 null", "label default-3 null"}},
		{"by routes", v2.AnnounceRoute, false, nil, []string{"label default-1 null", "label default-2 null", "label default-3 null"}},
		{"as neighbours", v2.AnnounceNeighbor, false, nil, []string{`label default-0 "Neighbor"`, `label default-2 "Neighbor"`, `label default-3 "Neighbor"`}},
		{"while the pool is being deleted", v2.AnnounceNeighbor, true, nil, []string{`label default-0 "Neighbor"`, `label default-2 "Neighbor"`, `label default-3 "Neighbor"`}},
		{"one can't be labelled", v2.AnnounceRoute, false, map[string]error{"default-1": conflict}, []string{"label default-1 null", "label default-2 null", "label default-3 null"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPool()
			p.Spec.Announce, p.Finalizers = c.announce, []string{v2.Finalizer}
			if c.deleted {
				p.DeletionTimestamp = new(metav1.Now())
			}
			f := newFixture(t, p)
			f.failLabel = c.fail
			for name, labels := range map[string]map[string]string{
				"default-0": {v2.LabelPool: "default"},
				"default-1": {v2.LabelPool: "default", v2.LabelAnnounce: "Neighbor"},
				"default-2": {v2.LabelPool: "default", v2.LabelAnnounce: "", v2.LabelReserved: v2.ReservedValue, v2.LabelFloating: v2.FloatingValue},
				"default-3": {v2.LabelPool: "default", v2.LabelAnnounce: "Route", v2.LabelReserved: v2.ReservedValue},
				"default-4": {v2.LabelPool: "other", v2.LabelAnnounce: "somebody's"},
				"other-0":   {v2.LabelPool: "other"},
			} {
				b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: name, UID: "uid", ResourceVersion: "1", Labels: labels}}
				if err := f.blocks.Add(b); err != nil {
					t.Fatal(err)
				}
			}
			if err := f.sync(t.Context(), "default"); (err != nil) != (c.fail != nil) || c.fail != nil && !apierrors.IsConflict(err) {
				t.Errorf("error is %v, want %v", err, c.fail)
			}
			labels := slices.DeleteFunc(f.writes, func(w string) bool { return !strings.HasPrefix(w, "label ") })
			slices.Sort(labels)
			if !slices.Equal(labels, c.want) {
				t.Errorf("writes are %q, want %q", labels, c.want)
			}
		})
	}
}

// Blocks of nodes say whether they give addresses, as spec.exclude and spec.drain have it, whoever changed that.
func TestBlocksSayWhetherTheyAreClosed(t *testing.T) {
	for _, c := range []struct {
		name    string
		exclude []string
		drain   bool
		want    []string
	}{
		{"all give addresses", nil, false, []string{"close default-1 null", "close default-2 null"}},
		{"one is excluded", []string{"10.0.0.2"}, false, []string{`close default-1 "excluded"`, "close default-2 null"}},
		{"all drain", []string{"10.0.0.2"}, true, []string{`close default-0 "drain"`, `close default-1 "drain"`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPool()
			p.Spec.BlockSizeBits, p.Spec.Exclude, p.Spec.Drain, p.Finalizers = 1, c.exclude, c.drain, []string{v2.Finalizer}
			f := newFixture(t, p)
			for i, labels := range []map[string]string{
				{v2.LabelPool: "default", v2.LabelNode: "n"},
				{v2.LabelPool: "default", v2.LabelNode: "n", v2.LabelClosed: "somebody's"},
				{v2.LabelPool: "default", v2.LabelNode: "n", v2.LabelClosed: "drain"},
				{v2.LabelPool: "default", v2.LabelReserved: v2.ReservedValue, v2.LabelFloating: v2.FloatingValue},
				{v2.LabelPool: "other", v2.LabelNode: "n", v2.LabelClosed: "drain"},
			} {
				b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: pools.BlockName("default", int32(i)), UID: "uid", ResourceVersion: "1", Labels: labels}, Index: int32(i)}
				if err := f.blocks.Add(b); err != nil {
					t.Fatal(err)
				}
			}
			f.mustSync(t)
			got := slices.DeleteFunc(f.writes, func(w string) bool { return !strings.HasPrefix(w, "close ") })
			slices.Sort(got)
			if !slices.Equal(got, c.want) {
				t.Errorf("writes are %q, want %q", got, c.want)
			}
		})
	}
}
