package kube

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// definitionPause is the longest time from one question whether a definition is there to the next.
const definitionPause = 30 * time.Second

// optional lists and watches a resource whose definition may be missing: an API server of an earlier version of Coil doesn't have it.
// There is nothing of the resource then, which is no error, and the API server is asked from time to time whether the definition
// is there by now. The empty list is what is listed without it.
func optional(lw *cache.ListWatch, empty runtime.Object) *cache.ListWatch {
	list, watches := lw.ListWithContextFunc, lw.WatchFuncWithContext
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			all, err := list(ctx, o)
			if apierrors.IsNotFound(err) {
				return empty.DeepCopyObject(), nil
			}
			return all, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := watches(ctx, o)
			begins := o.SendInitialEvents != nil && *o.SendInitialEvents
			switch {
			case begins: // without the definition a list follows
				return w, err
			case apierrors.IsNotFound(err) && o.ResourceVersion == "":
				return pause(definitionPause/2 + rand.N(definitionPause/2)), nil
			case err == nil && o.ResourceVersion == "":
				w.Stop()
				return nil, apierrors.NewResourceExpired("the definition is there now: list again")
			case apierrors.IsNotFound(err):
				return nil, apierrors.NewResourceExpired("the definition is gone: list again")
			}
			return w, err
		},
	}
}

// paused is a watch without events that ends after a while.
type paused struct {
	once  sync.Once
	timer *time.Timer
	ended chan watch.Event
}

func pause(d time.Duration) watch.Interface {
	p := &paused{ended: make(chan watch.Event)}
	p.timer = time.AfterFunc(d, p.end)
	return p
}

func (p *paused) end() { p.once.Do(func() { close(p.ended) }) }

// Stop implements watch.Interface.
func (p *paused) Stop() {
	p.timer.Stop()
	p.end()
}

// ResultChan implements watch.Interface.
func (p *paused) ResultChan() <-chan watch.Event { return p.ended }
