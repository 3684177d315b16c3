package view

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/testkit"
)

// policyAt is an EgressPolicy of namespace shop as it was at a resource version.
func policyAt(name, version string) *v2.EgressPolicy {
	p := &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: "uid", ResourceVersion: version}}
	p.Spec.Pods = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	p.Spec.Egress = &v2.EgressReference{Namespace: "net", Name: "at-" + version}
	return p
}

// listing is an API server that lists policies.
type listing struct {
	version string
	has     []v2.EgressPolicy
	err     error
	asked   int
}

func (l *listing) list(context.Context, string) ([]v2.EgressPolicy, string, error) {
	l.asked++
	return l.has, l.version, l.err
}

// ofShop are the policies of a cache at a resource version, and of an API server.
func ofShop(l *listing, version string, cached ...*v2.EgressPolicy) *kind[v2.EgressPolicy, *v2.EgressPolicy] {
	i := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	for _, p := range cached {
		_ = i.Add(p)
	}
	i.Bookmark(version)
	return &kind[v2.EgressPolicy, *v2.EgressPolicy]{cached: kube.Cache[v2.EgressPolicy]{Indexer: i}, of: policy.Of, list: l.list}
}

// names are the names and versions of policies.
func names(all []policy.Policy) string {
	var texts []string
	for _, p := range all {
		texts = append(texts, p.Name.Name+" "+p.Egress.Name)
	}
	slices.Sort(texts)
	return strings.Join(texts, ", ")
}

func TestCurrentPolicies(t *testing.T) {
	noDefinition := apierrors.NewNotFound(v2.Resource("egresspolicies"), "")
	for _, c := range []struct {
		name    string
		version string // of the cache
		cached  []*v2.EgressPolicy
		live    listing
		asOf    string
		want    string
		err     bool
		asked   int
		after   string // what the cache and the lists have then
	}{
		{name: "the cache is as new", version: "100", cached: []*v2.EgressPolicy{policyAt("p", "50")}, asOf: "100", want: "p at-50", after: "p at-50"},
		{name: "the cache is behind, and nothing is new", version: "99", cached: []*v2.EgressPolicy{policyAt("p", "50")},
			live: listing{version: "120", has: []v2.EgressPolicy{*policyAt("p", "50")}}, asOf: "100", want: "p at-50", asked: 1, after: "p at-50"},
		{name: "the cache lacks one", version: "60", cached: []*v2.EgressPolicy{policyAt("p", "50")},
			live: listing{version: "120", has: []v2.EgressPolicy{*policyAt("p", "50"), *policyAt("q", "98")}}, asOf: "100", want: "p at-50, q at-98", asked: 1, after: "p at-50, q at-98"},
		{name: "the cache has it as it was", version: "60", cached: []*v2.EgressPolicy{policyAt("p", "50")},
			live: listing{version: "120", has: []v2.EgressPolicy{*policyAt("p", "97")}}, asOf: "100", want: "p at-97", asked: 1, after: "p at-97"},
		{name: "the cache has one that is gone", version: "60", cached: []*v2.EgressPolicy{policyAt("p", "50")},
			live: listing{version: "120"}, asOf: "100", want: "", asked: 1, after: ""},
		{name: "the cache has one that is gone, and another one", version: "60", cached: []*v2.EgressPolicy{policyAt("p", "50"), policyAt("q", "51")},
			live: listing{version: "120", has: []v2.EgressPolicy{*policyAt("q", "51")}}, asOf: "100", want: "q at-51", asked: 1, after: "q at-51"},
		{name: "there is no definition", live: listing{err: noDefinition}, asOf: "100", asked: 1},
		{name: "no answer", version: "60", cached: []*v2.EgressPolicy{policyAt("p", "50")}, live: listing{err: errors.New("connection refused")}, asOf: "100",
			err: true, asked: 1, after: "p at-50"},
		{name: "versions that are no numbers", version: "new", live: listing{version: "newer", has: []v2.EgressPolicy{*policyAt("p", "x")}}, asOf: "newest",
			want: "p at-x", asked: 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := ofShop(&c.live, c.version, c.cached...)
			got, err := k.current(t.Context(), "shop", c.asOf)
			if names(got) != c.want || (err != nil) != c.err {
				t.Errorf("got %q, %v; want %q", names(got), err, c.want)
			}
			if c.live.asked != c.asked {
				t.Errorf("the API server was asked %d times, want %d", c.live.asked, c.asked)
			}
			if got := names(k.in("shop")); got != c.after {
				t.Errorf("then %q is known, want %q", got, c.after)
			}
			if got := names(k.in("other")); got != "" {
				t.Errorf("another namespace has %q", got)
			}
		})
	}
}

// As long as there is no definition, pods start without an answer of the API server, as they did before there were policies.
func TestNoDefinitionAndNoAnswer(t *testing.T) {
	l := &listing{err: apierrors.NewNotFound(v2.Resource("egresspolicies"), "")}
	k := ofShop(l, "")
	away := errors.New("connection refused")
	for _, step := range []struct {
		what string
		do   func()
		err  error
	}{
		{"no definition", func() {}, nil},
		{"no answer", func() { l.err = away }, nil},
		{"a definition", func() { l.err, l.version = nil, "150" }, nil},
		{"no answer, with a definition", func() { l.err = away }, away},
		{"no definition again", func() { l.err = apierrors.NewNotFound(v2.Resource("egresspolicies"), "") }, nil},
		{"the cache has found the definition, and no answer", func() { k.cached.Bookmark("160"); l.err = away }, away},
	} {
		step.do()
		clear(k.ahead.lists)
		if _, err := k.current(t.Context(), "shop", "1000"); !errors.Is(err, step.err) {
			t.Errorf("%s: %v", step.what, err)
		}
	}
}

// What a list had counts until the cache has come as far, also if it is gone again by then. A list serves later pods that aren't newer.
func TestListsAheadOfTheCache(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &listing{version: "120", has: []v2.EgressPolicy{*policyAt("p", "98")}}
		k := ofShop(l, "60")
		ask := func(asOf string, asked int) {
			t.Helper()
			if got, err := k.current(t.Context(), "shop", asOf); names(got) != "p at-98" || err != nil {
				t.Errorf("as of %s: %q, %v", asOf, names(got), err)
			}
			if l.asked != asked {
				t.Errorf("as of %s: the API server was asked %d times, want %d", asOf, l.asked, asked)
			}
		}
		ask("100", 1)
		ask("119", 1)
		ask("121", 3)         // the answer is as old as before
		time.Sleep(time.Hour) // without the API server
		ask("119", 3)
		k.cached.Bookmark("97")
		if got := names(k.in("shop")); got != "p at-98" {
			t.Errorf("the cache is behind still: %q", got)
		}
		k.cached.Bookmark("98")
		if got := names(k.in("shop")); got != "" {
			t.Errorf("the cache knows that it is gone: %q", got)
		}
		k.cached.Bookmark("200")
		if k.in("shop"); len(k.ahead.known)+len(k.ahead.lists) > 0 {
			t.Errorf("kept are %v and %v", k.ahead.known, k.ahead.lists)
		}

		// After a restore of the API server's data lists of before count no more.
		ask("210", 5)
		l.version = "100"
		k.cached.Bookmark("80")
		ask("100", 6)
	})
}

// Pods that are added at a moment share lists: one that runs already serves those that it is new enough for, another one all others.
func TestSharedLists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int32
		k := ofShop(nil, "60")
		k.list = func(ctx context.Context, _ string) ([]v2.EgressPolicy, string, error) {
			n := asked.Add(1)
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
			}
			return nil, fmt.Sprint(n * 100), ctx.Err()
		}
		var group sync.WaitGroup
		ask := func(asOf string, took time.Duration) {
			group.Go(func() {
				begin := time.Now()
				if _, err := k.current(t.Context(), "shop", asOf); err != nil || time.Since(begin) != took {
					t.Errorf("as of %s: %v after %s, want it after %s", asOf, err, time.Since(begin), took)
				}
			})
		}
		for range 20 {
			ask("90", time.Second)
		}
		time.Sleep(time.Second / 2)
		for range 20 {
			ask("95", time.Second/2)
			ask("150", 3*time.Second/2)
		}
		group.Wait()
		if n := asked.Load(); n != 2 {
			t.Errorf("the API server was asked %d times", n)
		}

		// One caller that gives up, the first, doesn't end the list of others.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second/4)
		defer cancel()
		group.Go(func() {
			if _, err := k.current(ctx, "shop", "250"); !errors.Is(err, errUnanswered) {
				t.Errorf("a caller that gives up: %v", err)
			}
		})
		synctest.Wait()
		ask("250", time.Second)
		group.Wait()
	})
}

// A namespace whose labels the cache may have as they were is read, and counts as it was read.
func TestLabelsOfPolicies(t *testing.T) {
	ns := func(version, team string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
			ObjectMeta: metav1.ObjectMeta{Name: "shop", ResourceVersion: version, Labels: map[string]string{"team": team}},
		}
	}
	scheme := metadatafake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	client := metadatafake.NewSimpleMetadataClient(scheme, ns("98", "red"))
	cached := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	if err := cached.Add(ns("50", "blue")); err != nil {
		t.Fatal(err)
	}
	clients := kube.Clients{Metadata: client}
	e := &Egresses{clients: clients, namespaces: &Namespaces{clients: clients, cached: kube.Cache[metav1.PartialObjectMetadata]{Indexer: cached}}}
	e.policies.own.cached = ofShop(nil, "100").cached
	of := &v2.EgressClusterPolicy{ObjectMeta: metav1.ObjectMeta{Name: "p", ResourceVersion: "40"}}
	of.Spec.Egress = &v2.EgressReference{Namespace: "net", Name: "nat"}
	all := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	if err := all.Add(of); err != nil {
		t.Fatal(err)
	}
	all.Bookmark("100")
	e.policies.cluster.cached, e.policies.cluster.of = kube.Cache[v2.EgressClusterPolicy]{Indexer: all}, policy.OfCluster
	for _, step := range []struct {
		what, asOf, team string
		asked            int
	}{
		{"as the cache has it", "", "blue", 0},
		{"as of a version that the cache has", "50", "blue", 0},
		{"as of a newer one", "100", "red", 1},
		{"as it was read", "", "red", 1},
		{"as of that one again", "100", "red", 1},
	} {
		policies, labels, err := e.policiesAsOf(t.Context(), "shop", step.asOf)
		if err != nil || len(policies) != 1 || labels["team"] != step.team {
			t.Errorf("%s: %d policies, labels %v, %v", step.what, len(policies), labels, err)
		}
		if asked := len(client.Actions()); asked != step.asked {
			t.Errorf("%s: the API server was asked %d times, want %d", step.what, asked, step.asked)
		}
	}
	cached.Bookmark("98")
	if _, labels, _ := e.policiesAsOf(t.Context(), "shop", ""); labels["team"] != "blue" {
		t.Errorf("the cache has come as far: %v", labels)
	}
	client.PrependReactor("get", "namespaces", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("connection refused")
	})
	e.policies.own.cached.Bookmark("200")
	all.Bookmark("200")
	if _, _, err := e.policiesAsOf(t.Context(), "shop", "200"); err == nil {
		t.Error("labels that can't be read")
	}
	if err := all.Delete(of); err != nil {
		t.Fatal(err)
	}
	all.Bookmark("200")
	if _, _, err := e.policiesAsOf(t.Context(), "shop", "200"); err != nil {
		t.Errorf("no policy asks for them: %v", err)
	}
}

func TestTrimPolicy(t *testing.T) {
	p := policyAt("p", "1")
	p.Annotations, p.Labels, p.ManagedFields = map[string]string{"a": "b"}, map[string]string{"a": "b"}, []metav1.ManagedFieldsEntry{{Manager: "kubectl"}}
	p.Status = v2.EgressPolicyStatus{Clients: 7, Resolved: &v2.ResolvedPolicy{ObservedGeneration: 3}, Conditions: []metav1.Condition{{Type: "Accepted"}}}
	if _, err := trimPolicy(p); err != nil {
		t.Fatal(err)
	}
	if s := p.Status; s.Clients != 0 || s.Conditions != nil || s.Resolved == nil || p.Annotations != nil || p.Labels != nil || p.ManagedFields != nil || p.Spec.Egress == nil {
		t.Errorf("left: %+v", p)
	}
}

// Counters of the status are nothing to pods; the spec and what is resolved are.
func TestSamePolicy(t *testing.T) {
	for what, change := range map[string]func(*v2.EgressPolicy){
		"same: clients":           func(p *v2.EgressPolicy) { p.Status.Clients = 8 },
		"same: conditions":        func(p *v2.EgressPolicy) { p.Status.Conditions = []metav1.Condition{{Type: "Accepted"}} },
		"other: generation":       func(p *v2.EgressPolicy) { p.Generation++ },
		"other: made again":       func(p *v2.EgressPolicy) { p.UID = "another" },
		"other: what is resolved": func(p *v2.EgressPolicy) { p.Status.Resolved = &v2.ResolvedPolicy{ObservedGeneration: 4} },
	} {
		was := policyAt("p", "1")
		was.Status.Resolved = &v2.ResolvedPolicy{ObservedGeneration: 3}
		is := was.DeepCopy()
		change(is)
		if got := samePolicy(was, is); got != strings.HasPrefix(what, "same") {
			t.Errorf("%s: %t", what, got)
		}
	}
}

// A change wakes the pods of the namespaces that the policy may select pods of, before or after it, and no others.
func TestNamespacesThatPoliciesConcern(t *testing.T) {
	index := func() cache.Indexer {
		return cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	}
	pods, namespaces := index(), index()
	for namespace, team := range map[string]string{"shop": "red", "blog": "blue", "wiki": "blue", "away": "red", "new": ""} {
		meta := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: namespace, Labels: map[string]string{"team": team}}}
		if namespace != "new" { // which no cache has yet
			_ = namespaces.Add(meta)
		}
		if namespace != "away" { // which has no pod on the node
			_ = pods.Add(&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "p"}})
		}
	}
	e := &Egresses{pods: kube.Cache[metav1.PartialObjectMetadata]{Indexer: pods}, namespaces: &Namespaces{cached: kube.Cache[metav1.PartialObjectMetadata]{Indexer: namespaces}}}
	woken := map[string]bool{}
	concerned := func(p policy.Policy) { e.concerned(p, func(namespace string) { woken[namespace] = true }) }
	e.policies.own.of, e.policies.cluster.of = policy.Of, policy.OfCluster
	own, cluster := e.policies.own.handler(concerned), e.policies.cluster.handler(concerned)
	team := func(name string, generation int64) *v2.EgressClusterPolicy {
		p := &v2.EgressClusterPolicy{ObjectMeta: metav1.ObjectMeta{Name: "p", UID: "uid", Generation: generation}}
		p.Spec.NamespaceSelector.MatchLabels = map[string]string{"team": name}
		return p
	}
	for _, c := range []struct {
		what string
		do   func()
		want string
	}{
		{"a policy", func() { own.OnAdd(policyAt("p", "1"), false) }, "new shop"},
		{"one that is the same", func() { own.OnUpdate(policyAt("p", "1"), policyAt("p", "2")) }, ""},
		{"one that is gone", func() { own.OnDelete(cache.DeletedFinalStateUnknown{Obj: policyAt("p", "1")}) }, "new shop"},
		{"one of the cluster", func() { cluster.OnAdd(team("blue", 1), true) }, "blog new wiki"},
		{"one of the cluster for others", func() { cluster.OnUpdate(team("blue", 1), team("red", 2)) }, "blog new shop wiki"},
	} {
		clear(woken)
		c.do()
		if got := strings.Join(slices.Sorted(maps.Keys(woken)), " "); got != c.want {
			t.Errorf("%s: it wakes the pods of %q, want %q", c.what, got, c.want)
		}
	}
}

// The policies of a pod that comes to the node are asked for at once, so that they are known when it is added, whatever kubelet has
// changed of it meanwhile. Pods that were there before aren't asked for.
func TestNewPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &listing{version: "120", has: []v2.EgressPolicy{*policyAt("p", "98")}}
		e := &Egresses{}
		own := ofShop(l, "60")
		e.policies.own.cached, e.policies.own.of, e.policies.own.list = own.cached, own.of, own.list
		none := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
		none.Bookmark("1000")
		e.policies.cluster.cached = kube.Cache[v2.EgressClusterPolicy]{Indexer: none}
		e.policies.pods.asking = reconcile.New("new-pods", e.ask, nil)
		testkit.Background(t.Context(), t, e.Run)
		changed := 0
		h := e.policies.pods.handler(func(*metav1.PartialObjectMetadata) { changed++ })
		pod := func(name, version string) *metav1.PartialObjectMetadata {
			return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name), ResourceVersion: version}}
		}
		want := func(what string, p *metav1.PartialObjectMetadata, asked int) {
			t.Helper()
			if got, _, err := e.Policies(t.Context(), p, true); err != nil || names(got) != "p at-98" || l.asked != asked {
				t.Errorf("%s: %q, %v; the API server was asked %d times, want %d", what, names(got), err, l.asked, asked)
			}
		}
		h.OnAdd(pod("old", "50"), true)
		synctest.Wait()
		if l.asked != 0 {
			t.Errorf("asked %d times for pods that were there before", l.asked)
		}
		h.OnAdd(pod("new", "100"), false)
		synctest.Wait()
		if l.asked != 1 {
			t.Errorf("asked %d times for a pod that came", l.asked)
		}
		h.OnUpdate(pod("new", "100"), pod("new", "150"))
		want("a pod that kubelet has changed", pod("new", "150"), 1)
		want("a pod that hasn't come yet", pod("unseen", "110"), 1)
		want("a pod that hasn't come yet and is newer", pod("unseen", "150"), 3) // the answer is as old as before
		// A watch that was away shows one pod after the other under a name as a change.
		again := pod("new", "170")
		again.UID, l.version = "again", "180"
		h.OnUpdate(pod("new", "150"), again)
		synctest.Wait()
		if l.asked != 4 {
			t.Errorf("asked %d times, and a pod came under the name of another one", l.asked)
		}
		want("a pod that came under the name of another one", again, 4)
		h.OnDelete(cache.DeletedFinalStateUnknown{Obj: again})
		if len(e.policies.pods.came) != 0 || changed != 5 {
			t.Errorf("%v are known, and %d changes were told", e.policies.pods.came, changed)
		}
	})
}

// BenchmarkPolicies measures what caches cost a pod that is added or looked at.
func BenchmarkPolicies(b *testing.B) {
	for _, n := range []int{0, 1, 100} {
		b.Run(fmt.Sprint(n, " policies"), func(b *testing.B) {
			var all []*v2.EgressPolicy
			for i := range n {
				all = append(all, policyAt(fmt.Sprint("p", i), "50"))
			}
			e := &Egresses{}
			e.policies.own.cached, e.policies.own.of = ofShop(nil, "100", all...).cached, policy.Of
			none := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
			none.Bookmark("100")
			e.policies.cluster.cached = kube.Cache[v2.EgressClusterPolicy]{Indexer: none}
			pod := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", ResourceVersion: "90"}}
			for b.Loop() {
				if got, _, err := e.Policies(b.Context(), pod, true); len(got) != n || err != nil {
					b.Fatal(len(got), err)
				}
			}
		})
	}
}
