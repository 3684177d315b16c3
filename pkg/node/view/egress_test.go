package view

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/store"
)

func TestIsPod(t *testing.T) {
	pod := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{UID: "8d2b"}}
	mirror := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		UID: "8d2b", Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "0f3e6a"},
	}}
	for _, c := range []struct {
		what string
		of   *metav1.PartialObjectMetadata
		uid  string
		want bool
	}{
		{"the same", pod, "8d2b", true},
		{"made again under its name", pod, "77aa", false},
		{"not known", pod, "", true},
		{"static, as the runtime calls it", mirror, "0f3e6a", true},
		{"static, as the API server calls it", mirror, "8d2b", true},
		{"static, of another manifest", mirror, "11", false},
	} {
		if got := isPod(c.of, c.uid); got != c.want {
			t.Errorf("%s: %t", c.what, got)
		}
	}
}

// The cache may still have the pod that had the name before.
func TestPodOfAStaleCache(t *testing.T) {
	of := func(uid string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web-0", UID: types.UID(uid)},
		}
	}
	scheme := runtime.NewScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	cached := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	if err := cached.Add(of("old")); err != nil {
		t.Fatal(err)
	}
	client := fake.NewSimpleMetadataClient(scheme, of("new"))
	v := &Egresses{clients: kube.Clients{Metadata: client}, pods: kube.Cache[metav1.PartialObjectMetadata]{Indexer: cached}}
	for _, c := range []struct {
		uid  string
		live bool
		want string
	}{
		{"new", true, "new"},
		{"", true, "new"}, // the runtime didn't tell
		{"", false, "old"},
		{"old", true, "old"},
	} {
		p, err := v.Pod(t.Context(), store.Pod{Namespace: "ns", Name: "web-0", UID: c.uid}, c.live)
		if err != nil || string(p.UID) != c.want {
			t.Errorf("UID %q, live %t: %v, %v; want %s", c.uid, c.live, p, err, c.want)
		}
	}
	client.PrependReactor("get", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("no route to host")
	})
	if p, err := v.Pod(t.Context(), store.Pod{Namespace: "ns", Name: "web-0"}, true); err != nil || p.UID != "old" {
		t.Errorf("while the API server is away: %v, %v", p, err)
	}
}

// Each coild of the cluster is told of each Egress whenever its status changes, most often for a client
// that is on another node.
func TestEgressesThatConcernClients(t *testing.T) {
	before := &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat", UID: "a", Generation: 3, ResourceVersion: "7"}}
	before.Spec.Destinations = []string{"0.0.0.0/0"}
	before.Status = v2.EgressStatus{ObservedGeneration: 2, Replicas: 2, Clients: 5, InClusterCIDRs: []string{"100.64.0.0/16"}}
	for _, c := range []struct {
		what   string
		change func(*v2.Egress)
		told   int
	}{
		{"clients", func(e *v2.Egress) { e.Status.Clients++ }, 0},
		{"routers", func(e *v2.Egress) { e.Status.Replicas++ }, 0},
		{"conditions", func(e *v2.Egress) { e.Status.Conditions = []metav1.Condition{{Type: v2.EgressAvailable}} }, 0},
		{"the generation is observed", func(e *v2.Egress) { e.Status.ObservedGeneration++ }, 0},
		{"labels", func(e *v2.Egress) { e.Labels = map[string]string{"a": "b"} }, 0},
		{"the spec", func(e *v2.Egress) { e.Generation++ }, 1},
		{"ranges of the cluster", func(e *v2.Egress) { e.Status.InClusterCIDRs = []string{"100.64.0.0/15"} }, 1},
		{"the first status, without ranges", func(e *v2.Egress) { e.Status = v2.EgressStatus{} }, 1},
		{"made again", func(e *v2.Egress) { e.UID = "b" }, 1},
	} {
		told := 0
		h := egressHandler(func(name types.NamespacedName) {
			if name.String() != "internet/nat" {
				t.Errorf("told of %s", name)
			}
			told++
		})
		after := before.DeepCopy()
		after.ResourceVersion = "8"
		c.change(after)
		if h.OnUpdate(before, after); told != c.told {
			t.Errorf("%s: told %d times, want %d", c.what, told, c.told)
		}
	}
	told := 0
	h := egressHandler(func(types.NamespacedName) { told++ })
	h.OnAdd(before, false)
	h.OnDelete(cache.DeletedFinalStateUnknown{Obj: before})
	if told != 2 {
		t.Errorf("told %d times of one that came and went", told)
	}
}
