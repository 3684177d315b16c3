package view

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kube"
)

func TestPoolOf(t *testing.T) {
	long := strings.Repeat("x", 63)
	for annotation, want := range map[string]string{
		"": v2.DefaultPool, "internet": "internet", "a.b-1": "a.b-1", long: long,
		long + "x": "", strings.Repeat("x", 250<<10): "", "Internet": "", "a/b": "", "a b": "", "-a": "",
	} {
		cached := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
		if err := cached.Add(&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			Name: "ns", Annotations: map[string]string{v2.AnnotationPool: annotation},
		}}); err != nil {
			t.Fatal(err)
		}
		v := &Namespaces{cached: kube.Cache[metav1.PartialObjectMetadata]{Indexer: cached}, current: func() bool { return true }}
		got, err := v.PoolOf(t.Context(), "ns")
		if got != want || (err == nil) != (want != "") {
			t.Errorf("annotation %.70q: pool %q, %v; want %q", annotation, got, err, want)
		}
		if err != nil && (len(err.Error()) > 300 || !strings.Contains(err.Error(), v2.AnnotationPool)) {
			t.Errorf("annotation %.70q: an error of %d bytes, want a short one that names the annotation", annotation, len(err.Error()))
		}
	}
}

// While the watch of Namespaces is broken, the cache may have a former pool. Without an answer of the
// API server pods start all the same.
func TestPoolOfAStaleCache(t *testing.T) {
	ns := func(pool string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
			ObjectMeta: metav1.ObjectMeta{Name: "ns", Annotations: map[string]string{v2.AnnotationPool: pool}},
		}
	}
	scheme := metadatafake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name    string
		current bool
		live    []runtime.Object
		err     error
		want    string
		asked   int
	}{
		{"the watch is open", true, []runtime.Object{ns("now")}, nil, "cached", 0},
		{"the watch is broken", false, []runtime.Object{ns("now")}, nil, "now", 1},
		{"no answer", false, nil, errors.New("connection refused"), "cached", 1},
		{"the namespace is gone", false, nil, nil, "", 1},
	} {
		cached := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
		if err := cached.Add(ns("cached")); err != nil {
			t.Fatal(err)
		}
		client := metadatafake.NewSimpleMetadataClient(scheme, c.live...)
		client.PrependReactor("get", "namespaces", func(clienttesting.Action) (bool, runtime.Object, error) {
			return c.err != nil, nil, c.err
		})
		v := &Namespaces{cached: kube.Cache[metav1.PartialObjectMetadata]{Indexer: cached}, current: func() bool { return c.current }, clients: kube.Clients{Metadata: client}}
		got, err := v.PoolOf(t.Context(), "ns")
		if got != c.want || apierrors.IsNotFound(err) != (c.want == "") {
			t.Errorf("%s: pool %q, %v; want %q", c.name, got, err, c.want)
		}
		if asked := len(client.Actions()); asked != c.asked {
			t.Errorf("%s: %d calls of the API server, want %d", c.name, asked, c.asked)
		}
	}
}

// The keeper of the pods' links is told when pods of a namespace may send from any address, or no longer.
func TestUnguarded(t *testing.T) {
	cached := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	v := &Namespaces{cached: kube.Cache[metav1.PartialObjectMetadata]{Indexer: cached}}
	told := 0
	v.OnUnguarded(func() { told++ })
	ns := func(annotation string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			Name: "vpn", Annotations: map[string]string{v2.AnnotationSourceGuard: annotation},
		}}
	}
	for i, step := range []struct {
		annotation string
		unguarded  bool
		told       int
	}{{"on", false, 0}, {"off", true, 1}, {"off", true, 1}, {"OFF", false, 2}, {"", false, 2}, {"off", true, 3}} {
		if err := cached.Update(ns(step.annotation)); err != nil {
			t.Fatal(err)
		}
		v.changed[0]("vpn")
		if got := v.Unguarded("vpn"); got != step.unguarded || told != step.told {
			t.Errorf("step %d, %q: unguarded %t, told %d times, want %+v", i, step.annotation, got, told, step)
		}
	}
	if err := cached.Delete(ns("")); err != nil {
		t.Fatal(err)
	}
	v.changed[0]("vpn")
	if v.Unguarded("vpn") || told != 4 {
		t.Errorf("a namespace that is gone is unguarded: %t, told %d times", v.Unguarded("vpn"), told)
	}
}

func TestTrim(t *testing.T) {
	n := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Labels:        map[string]string{"team": "a"},
		ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl"}},
		Annotations: map[string]string{
			v2.AnnotationPool: "p", v2.AnnotationSourceGuard: "off", v2.AnnotationEgressPrefix + "ns": "e", corev1.MirrorPodAnnotationKey: "m", corev1.LastAppliedConfigAnnotation: "{}",
		},
	}}
	if _, err := trim(n); err != nil {
		t.Fatal(err)
	}
	want := []string{v2.AnnotationPool, v2.AnnotationSourceGuard, v2.AnnotationEgressPrefix + "ns", corev1.MirrorPodAnnotationKey}
	slices.Sort(want)
	if got := slices.Sorted(maps.Keys(n.Annotations)); !slices.Equal(got, want) || len(n.Labels) != 1 || len(n.ManagedFields) > 0 {
		t.Errorf("left: annotations %v, labels %v, %d managed fields; want annotations %v and the labels", got, n.Labels, len(n.ManagedFields), want)
	}
}

// The addresses of the Node are those of the cache, which the handlers find filled.
func TestNodeAddrsFollowTheNode(t *testing.T) {
	cached := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	v := &Node{name: "node", nodes: kube.Cache[corev1.Node]{Indexer: cached}}
	with := func(ip string) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: ip}}
		return n
	}
	if got := v.Addrs(); got != (ipam.Address{}) {
		t.Errorf("before the Node is known: %v", got)
	}
	for _, ip := range []string{"192.0.2.1", "192.0.2.2"} {
		if err := cached.Update(with(ip)); err != nil {
			t.Fatal(err)
		}
		if got := v.Addrs(); got.IPv4.String() != ip {
			t.Errorf("got %s, want %s", got.IPv4, ip)
		}
	}
	if err := cached.Delete(with("")); err != nil {
		t.Fatal(err)
	}
	if got := v.Addrs(); got != (ipam.Address{}) {
		t.Errorf("of a Node that is gone: %v", got)
	}
}
