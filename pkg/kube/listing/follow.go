package listing

import (
	"context"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
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
	request := func(o metav1.ListOptions) *rest.Request {
		return s.Client.Get().Resource(s.Resource).VersionedParams(s.options(o), metav1.ParameterCodec)
	}
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: &cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				list, err := request(o).Do(ctx).Get()
				to.told(ctx, err)
				return list, err
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				o.Watch = true
				w, err := request(o).Watch(ctx)
				// An API server that can't begin a watch with a list says that it is invalid, and is asked for a list then.
				if !apierrors.IsInvalid(err) {
					to.told(ctx, err)
				}
				return w, err
			},
		},
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
