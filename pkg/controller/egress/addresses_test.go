package egress

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clienttesting "k8s.io/client-go/testing"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/testkit"
)

// patched is what the controller writes to the objects of a resource, in order.
func (f *fixture) patched(resource string) []string {
	var all []string
	for _, a := range f.coil.Actions() {
		switch a := a.(type) {
		case clienttesting.PatchAction:
			if a.GetResource().Resource == resource {
				all = append(all, "patch "+a.GetName()+" "+string(a.GetPatch()))
			}
		case clienttesting.DeleteAction:
			if a.GetResource().Resource == resource {
				all = append(all, "delete "+a.GetName())
			}
		}
	}
	f.coil.ClearActions()
	return all
}

// expect fails the test unless there is one write for each of the wants, which has all of its words.
func expect(t *testing.T, got []string, wants ...[]string) {
	t.Helper()
	if len(got) != len(wants) {
		t.Fatalf("writes: %q, want %q", got, wants)
	}
	for i, words := range wants {
		for _, w := range words {
			if !strings.Contains(got[i], w) {
				t.Errorf("write %q, want %q in it", got[i], w)
			}
		}
	}
}

func (f *fixture) withAddresses(t *testing.T, pool string) *v2.Egress {
	t.Helper()
	e := f.egress(t).DeepCopy()
	e.Spec.Addresses = &v2.EgressAddresses{Use: v2.EgressAddressOfClient, Pool: pool, Count: new(int32(2))}
	f.put(t, f.egresses, e)
	return e
}

// The claim follows the spec: another pool's is another claim, and the claim of before goes, as without addresses.
func TestClaimOfAnEgress(t *testing.T) {
	f := newFixture(t)
	f.coil.PrependReactor("patch", "addressclaims", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, nil })
	sync := func() {
		t.Helper()
		if err := f.syncObjects(t.Context(), nat); err != nil {
			t.Fatal(err)
		}
	}
	sync()
	expect(t, f.patched("addressclaims"))
	e := f.withAddresses(t, "partners")
	sync()
	expect(t, f.patched("addressclaims"), []string{"patch nat.partners ", `"pool":"partners"`, `"count":2`, `"kind":"Egress"`, `"uid":"uid"`})
	claims := f.cfg.Floating.Claims.Informer().GetIndexer()
	f.put(t, claims, egress.AddressClaim(e))
	f.withAddresses(t, "others")
	sync()
	expect(t, f.patched("addressclaims"), []string{"patch nat.others "}, []string{"delete nat.partners"})
	e = f.egress(t).DeepCopy()
	e.Spec.Addresses = nil
	f.put(t, f.egresses, e)
	sync()
	expect(t, f.patched("addressclaims"), []string{"delete nat.partners"})
}

// Blocks learn which nodes may have their address. Blocks that were released, or that belong to an earlier Egress of the name, don't.
func TestPlacesAreWritten(t *testing.T) {
	f := newFixture(t)
	f.coil.PrependReactor("patch", "addressblocks", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, nil })
	f.withAddresses(t, "partners")
	for i, owner := range []types.UID{"uid", "uid", "of an earlier one"} {
		b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("partners-", i), UID: "block", ResourceVersion: "7"}, Floating: &v2.Floating{
			Owner: v2.FloatingOwner{Kind: "Egress", Namespace: nat.Namespace, Name: nat.Name, UID: owner},
		}}
		if i == 1 {
			b.Floating.ReleasedAt = &metav1.Time{}
		}
		f.put(t, f.cfg.Floating.Blocks.GetIndexer(), b)
	}
	places := func() {
		t.Helper()
		if err := f.syncPlaces(t.Context(), nat); err != nil {
			t.Fatal(err)
		}
	}
	places()
	expect(t, f.patched("addressblocks"))
	router := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: nat.Namespace, Name: "router", UID: "pod", Labels: plan.RouterLabels(nat.Name)}, Spec: corev1.PodSpec{NodeName: "a"}}
	router.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}, {Type: corev1.NodeInternalIP, Address: "fd00::1"}, {Type: corev1.NodeInternalIP, Address: "192.0.2.9"},
	}}}
	f.put(t, f.cfg.Cluster.Core().V1().Pods().Informer().GetIndexer(), router)
	f.put(t, f.cfg.Cluster.Core().V1().Nodes().Informer().GetIndexer(), node)
	places()
	expect(t, f.patched("addressblocks"), []string{"patch partners-0 ", `"resourceVersion":"7"`, `{"node":"a","addresses":["192.0.2.1","fd00::1"],"podUID":"pod"}`})
}

// Blocks have the addresses at which nodes ask each other: when those of a Node change, the blocks follow, those of Egresses with addresses.
func TestPlacesFollowNodes(t *testing.T) {
	f := newFixture(t)
	f.withAddresses(t, "partners")
	other := f.egress(t).DeepCopy()
	other.Name, other.UID, other.Spec.Addresses = "other", "other", nil
	f.put(t, f.egresses, other)
	looked := make(chan string, 10)
	f.Controller.places = reconcile.New("places", func(_ context.Context, key types.NamespacedName) error {
		looked <- key.String()
		return nil
	}, nil)
	var running sync.WaitGroup
	t.Cleanup(running.Wait) // for the end of the test's context
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", ResourceVersion: "1"}}
	api := f.core.CoreV1().Nodes()
	testkit.Must(api.Create(t.Context(), node, metav1.CreateOptions{}))(t)
	watched := make(chan struct{}) // the fake forgets what changes between a list and the watch that follows it
	f.core.PrependWatchReactor("nodes", func(a clienttesting.Action) (bool, watch.Interface, error) {
		defer close(watched)
		w, err := f.core.Tracker().Watch(a.GetResource(), a.GetNamespace())
		return true, w, err
	})
	running.Go(func() { f.cfg.Cluster.Core().V1().Nodes().Informer().Run(t.Context().Done()) })
	running.Go(func() {
		if err := f.Controller.places.Run(t.Context(), 1); err != nil {
			t.Error(err)
		}
	})
	<-watched
	expectLook := func(what string) {
		t.Helper()
		select {
		case key := <-looked:
			if key != nat.String() {
				t.Errorf("%s: places of %s are looked at", what, key)
			}
		case <-time.After(testkit.Timeout(5 * time.Second)):
			t.Errorf("%s: no places are looked at", what)
		}
	}
	expectLook("the Node is there")
	node.ResourceVersion, node.Labels = "2", map[string]string{"heart": "beat"}
	testkit.Must(api.Update(t.Context(), node, metav1.UpdateOptions{}))(t)
	node.ResourceVersion, node.Status.Addresses = "3", []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.7"}}
	testkit.Must(api.Update(t.Context(), node, metav1.UpdateOptions{}))(t)
	expectLook("its address has changed")
	testkit.Check(t, api.Delete(t.Context(), "a", metav1.DeleteOptions{}))
	expectLook("it is gone")
	if len(looked) > 0 {
		t.Errorf("places of %s are looked at without a reason", <-looked)
	}
}
