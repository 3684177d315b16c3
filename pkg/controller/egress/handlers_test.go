package egress

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clienttesting "k8s.io/client-go/testing"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/testkit"
)

// A slice that somebody gives to another Egress is one less of the Egress that it was of.
func TestSliceThatChangesItsEgress(t *testing.T) {
	f := newFixture(t)
	var mu sync.Mutex
	var keys []string
	f.Controller.clients = reconcile.New("clients", func(_ context.Context, key types.NamespacedName) error {
		mu.Lock()
		defer mu.Unlock()
		keys = append(keys, key.String())
		return nil
	})
	requireKeys := func(what string, want ...string) {
		t.Helper()
		testkit.Eventually(t, 5*time.Second, what, func() error {
			mu.Lock()
			defer mu.Unlock()
			if slices.Sort(keys); !slices.Equal(keys, want) {
				return fmt.Errorf("clients of %q are looked at, want %q", keys, want)
			}
			keys = nil
			return nil
		})
	}
	slice := func(version, egress string) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
			Namespace: nat.Namespace, Name: "s", ResourceVersion: version, Labels: map[string]string{v2.LabelEgress: egress},
		}}
	}
	// The fake forgets what changes between a list and the watch that follows it.
	watched := make(chan struct{})
	f.core.PrependWatchReactor("endpointslices", func(a clienttesting.Action) (bool, watch.Interface, error) {
		defer close(watched)
		w, err := f.core.Tracker().Watch(a.GetResource(), a.GetNamespace())
		return true, w, err
	})
	var running sync.WaitGroup
	t.Cleanup(running.Wait) // for the end of the test's context
	running.Go(func() { f.cfg.Clients.Discovery().V1().EndpointSlices().Informer().Run(t.Context().Done()) })
	running.Go(func() {
		if err := f.Controller.clients.Run(t.Context(), 1); err != nil {
			t.Error(err)
		}
	})
	<-watched

	api := f.core.DiscoveryV1().EndpointSlices(nat.Namespace)
	testkit.Must(api.Create(t.Context(), slice("1", "a"), metav1.CreateOptions{}))(t)
	requireKeys("it is there", "internet/a")
	testkit.Must(api.Update(t.Context(), slice("2", "b"), metav1.UpdateOptions{}))(t)
	requireKeys("it is another's", "internet/a", "internet/b")
	testkit.Must(api.Update(t.Context(), slice("3", "b"), metav1.UpdateOptions{}))(t)
	requireKeys("it has changed", "internet/b")
	testkit.Check(t, api.Delete(t.Context(), "s", metav1.DeleteOptions{}))
	requireKeys("it is gone", "internet/b")
}
