package listing

import (
	"context"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// Follower hears of the objects of a kind. It is called by goroutines of its own, and must not block.
type Follower struct {
	// Synced is called once, when all objects are there.
	Synced func()
	// Changed is called after each change of an object.
	Changed func()
	// Failed is called with the errors of requests, which are made again.
	Failed func(error)
	// Answered, if there is one, is called after each request that was answered: what Failed has told is over then.
	Answered func()
}

// told tells of the answer to a request.
func (f Follower) told(ctx context.Context, err error) {
	switch {
	case err == nil && f.Answered != nil:
		f.Answered()
	case err != nil && ctx.Err() == nil:
		f.Failed(err)
	}
}

// Follow lists objects and then watches them until ctx ends, which done awaits. The result returns the objects of the moment; others than the caller must not change them.
func Follow[T any, P Object[T]](ctx context.Context, done *sync.WaitGroup, s Source[T], to Follower) func() []P {
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				all := &metav1.List{}
				about, err := list(ctx, s, o, func(o P) { all.Items = append(all.Items, runtime.RawExtension{Object: o}) })
				all.ListMeta = about
				to.told(ctx, err)
				return all, err
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				o.Watch = true
				w, err := s.Client.Get().Resource(s.Resource).VersionedParams(s.options(o), metav1.ParameterCodec).Watch(ctx)
				to.told(ctx, err)
				return w, err
			},
		}, listsFirst{}),
		ObjectType: P(new(T)),
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc: func(any) { to.Changed() }, UpdateFunc: func(any, any) { to.Changed() }, DeleteFunc: func(any) { to.Changed() },
		},
		Transform: func(o any) (any, error) {
			if typed, ok := o.(P); ok && s.Trim != nil {
				s.Trim(typed)
			}
			return o, nil
		},
	})
	// What it would log is told.
	done.Go(func() { controller.RunWithContext(klog.NewContext(ctx, klog.Logger{})) })
	done.Go(func() {
		select {
		case <-ctx.Done():
		case <-controller.HasSyncedChecker().Done():
			to.Synced()
		}
	})
	return func() []P {
		var all []P
		for _, o := range store.List() {
			if typed, ok := o.(P); ok {
				all = append(all, typed)
			}
		}
		return all
	}
}

// listsFirst says that a watch doesn't begin with a list: an event takes twice as long to read as an item of a list.
type listsFirst struct{}

// IsWatchListSemanticsUnSupported is what client-go asks.
func (listsFirst) IsWatchListSemanticsUnSupported() bool { return true }
