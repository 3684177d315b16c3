package egress

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube/lists"
	"github.com/coil-net/coil/pkg/plan/egress"
)

var nat = types.NamespacedName{Namespace: "internet", Name: "nat"}

// TestClientsAreCollected holds that the first client is written at once, and those that come soon
// after it together.
func TestClientsAreCollected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		come := func(names ...string) {
			t.Helper()
			for i, name := range names {
				f.put(t, f.pods, &corev1.Pod{
					ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: name, UID: types.UID(name), Annotations: map[string]string{v2.AnnotationEgressPrefix + nat.Namespace: nat.Name}},
					Status:     corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: fmt.Sprintf("10.0.%d.%d", len(f.pods.List()), i)}}},
				})
			}
		}
		// sync returns how many writes a sync makes, which the cache shows then.
		sync := func() (writes int, err error) {
			t.Helper()
			f.core.ClearActions()
			err = f.syncClients(t.Context(), nat)
			for _, a := range f.core.Actions() {
				if w, ok := a.(clienttesting.CreateAction); ok { // an update is one, too
					s := w.GetObject().(*discoveryv1.EndpointSlice).DeepCopy()
					s.ResourceVersion += "1"
					f.put(t, f.slices, s)
					writes++
				}
			}
			return writes, err
		}
		for i, step := range []struct {
			pause  time.Duration
			come   []string
			writes int
		}{
			{0, []string{"a"}, 1},
			{0, []string{"b"}, 0},
			{lists.Collect / 2, []string{"c", "d"}, 0},
			{lists.Collect / 2, nil, 1},
			{lists.Collect, nil, 0},
			{0, []string{"e"}, 1}, // nothing was written lately
			{0, []string{"f"}, 0},
			{lists.Collect, nil, 1},
		} {
			time.Sleep(step.pause)
			come(step.come...)
			n, err := sync()
			if n != step.writes {
				t.Errorf("step %d: %d writes, want %d", i, n, step.writes)
			}
			if again := err != nil; again != (len(step.come) > 0 && n == 0) {
				t.Errorf("step %d: error %v", i, err)
			}
		}
		ended, end := context.WithCancel(t.Context())
		end()
		if err := f.Run(ended); err != nil { // which ends the queues
			t.Error(err)
		}
		if n := egress.CountClients(f.slices.Under(nat.String())); n != 6 {
			t.Errorf("%d clients are written, want 6", n)
		}
	})
}

func TestRefusalsAreToldOnce(t *testing.T) {
	pod := func(uid string) *corev1.Pod { return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid)}} }
	var c Controller
	for i, step := range []struct {
		refused []*corev1.Pod
		told    int
	}{
		{nil, 0}, {[]*corev1.Pod{pod("a")}, 1}, {[]*corev1.Pod{pod("a"), pod("b")}, 1}, {[]*corev1.Pod{pod("b")}, 0},
		{[]*corev1.Pod{pod("a"), pod("b")}, 1}, {nil, 0},
	} {
		if got := c.newlyRefused(nat, step.refused); len(got) != step.told {
			t.Errorf("step %d: %d pods are told, want %d", i, len(got), step.told)
		}
	}
	if kept := c.refused.Get(nat); len(kept) > 0 {
		t.Errorf("%v are kept", kept)
	}
}
