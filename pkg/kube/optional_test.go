package kube

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Without its definition there is nothing of a resource, and no error. When it is made, the informer has what there is; when it is
// taken away, nothing again.
func TestMissingDefinition(t *testing.T) {
	errs := countErrors(t)
	synctest.Test(t, func(t *testing.T) {
		var defined atomic.Bool
		var asked atomic.Int32
		var open atomic.Pointer[watch.FakeWatcher]
		missing := apierrors.NewNotFound(v2.Resource("egresspolicies"), "")
		policy := &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "p", ResourceVersion: "7"}}
		lw := optional(&cache.ListWatch{
			ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
				asked.Add(1)
				if !defined.Load() {
					return nil, missing
				}
				return &v2.EgressPolicyList{ListMeta: metav1.ListMeta{ResourceVersion: "9"}, Items: []v2.EgressPolicy{*policy}}, nil
			},
			WatchFuncWithContext: func(_ context.Context, o metav1.ListOptions) (watch.Interface, error) {
				asked.Add(1)
				if !defined.Load() {
					return nil, missing
				}
				w := watch.NewFakeWithChanSize(2, false)
				if o.SendInitialEvents != nil && *o.SendInitialEvents {
					w.Add(policy.DeepCopy())
					w.Action(watch.Bookmark, &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{
						ResourceVersion: "9", Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"},
					}})
				}
				open.Store(w)
				return w, nil
			},
		}, &v2.EgressPolicyList{})
		i := newInformer(&v2.EgressPolicy{}, lw)
		all := CacheOf[v2.EgressPolicy](i)
		stop := make(chan struct{})
		i.Start(stop)
		defer func() {
			close(stop)
			i.Shutdown()
		}()
		has := func(what string, want int, version uint64) {
			t.Helper()
			time.Sleep(2 * definitionPause)
			synctest.Wait()
			if got := len(all.All()); got != want || all.Version() != version || !i.HasSynced() {
				t.Errorf("%s: %d policies at version %d, filled %t; want %d at %d", what, got, all.Version(), i.HasSynced(), want, version)
			}
		}
		begin := time.Now()
		has("no definition", 0, 0)
		time.Sleep(10 * time.Minute)
		if n, most := asked.Load(), int32(time.Since(begin)/(definitionPause/2))+3; n > most {
			t.Errorf("the API server was asked %d times in %s, want at most %d", n, time.Since(begin), most)
		}
		defined.Store(true)
		has("a definition", 1, 9)
		defined.Store(false)
		open.Load().Stop()
		has("no definition any more", 0, 0)
		defined.Store(true)
		has("a definition again", 1, 9)
	})
	if n := errs(); n > 0 {
		t.Errorf("%d errors were logged", n)
	}
}

// countErrors counts what client-go logs as errors.
func countErrors(t *testing.T) func() int32 {
	var n atomic.Int32
	before := utilruntime.ErrorHandlers
	utilruntime.ErrorHandlers = []utilruntime.ErrorHandler{func(context.Context, error, string, ...any) { n.Add(1) }}
	t.Cleanup(func() { utilruntime.ErrorHandlers = before })
	return n.Load
}
