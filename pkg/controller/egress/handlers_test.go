package egress

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clienttesting "k8s.io/client-go/testing"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/egress"
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
	}, nil)
	requireKeys := func(what string, want ...string) {
		t.Helper()
		testkit.Eventually(t, 5*time.Second, what, func() error {
			mu.Lock()
			defer mu.Unlock()
			slices.Sort(keys) // one that is asked for twice may be looked at twice
			if keys = slices.Compact(keys); !slices.Equal(keys, want) {
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

// queued calls do and returns the Egresses that it added to the loop of objects, sorted.
func (f *fixture) queued(t *testing.T, do func(context.Context)) (keys []string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f.Controller.objects = reconcile.New("objects", func(_ context.Context, key types.NamespacedName) error {
			keys = append(keys, key.String())
			return nil
		}, nil)
		do(t.Context())
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() {
			if err := f.Controller.objects.Run(ctx, 1); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait()
		cancel()
		running.Wait()
	})
	slices.Sort(keys)
	return keys
}

// An Egress that comes or goes, and owners that change, don't make work for all others of the
// namespace, which may have thousands.
func TestEgressesDontWakeEachOther(t *testing.T) {
	f := newFixture(t)
	named := func(name string) *v2.Egress {
		return &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: nat.Namespace, Name: name, UID: types.UID(name)}}
	}
	for i := range 20 {
		f.put(t, f.egresses, named(fmt.Sprint("other-", i)))
	}
	made := named("made")
	if got := f.queued(t, func(context.Context) { f.egressChanged(nil, made) }); !slices.Equal(got, []string{"internet/made"}) {
		t.Errorf("an Egress was made: %q are looked at", got)
	}
	// Another Egress takes its place as an owner.
	if got := f.queued(t, func(context.Context) { f.egressChanged(made, nil) }); len(got) != 2 || !slices.Contains(got, "internet/made") {
		t.Errorf("an Egress has gone: %q are looked at", got)
	}
	binding := egress.RouterBinding(nat.Namespace, []*v2.Egress{named("other-1")})
	owned := egress.RouterBinding(nat.Namespace, []*v2.Egress{named("other-1"), named("other-2")})
	foreign := binding.DeepCopy()
	foreign.Subjects = nil
	for _, tt := range []struct {
		name          string
		before, after *rbacv1.RoleBinding
		want          int
	}{
		{"another owner", binding, owned, 1},
		{"another subject", binding, foreign, 21},
		{"made", nil, binding, 21},
		{"gone", binding, nil, 21},
	} {
		if got := f.queued(t, func(context.Context) { f.bindingChanged(tt.before, tt.after) }); len(got) != tt.want {
			t.Errorf("binding: %s: %q are looked at, want %d", tt.name, got, tt.want)
		}
	}
}
