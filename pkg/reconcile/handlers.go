package reconcile

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

// Handler returns an event handler that passes each object that was added,
// changed or deleted to enqueue, which adds keys to loops and must not block. A
// resync without a change is skipped; the last known state of an object whose
// deletion was missed is passed like any other.
func Handler[T metav1.Object](enqueue func(T)) cache.ResourceEventHandler {
	return handler(enqueue, func(old, now T) bool { return old.GetResourceVersion() == now.GetResourceVersion() })
}

// ChangeHandler is a Handler that skips all changes after which an object is the same to whom it is
// passed.
func ChangeHandler[T metav1.Object](enqueue func(T), same func(old, now T) bool) cache.ResourceEventHandler {
	return handler(enqueue, func(old, now T) bool { return old.GetUID() == now.GetUID() && same(old, now) })
}

func handler[T metav1.Object](enqueue func(T), same func(old, now T) bool) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			if o, ok := obj.(T); ok {
				enqueue(o)
			}
		},
		UpdateFunc: func(old, obj any) {
			o, ok := obj.(T)
			if !ok {
				return
			}
			if p, ok := old.(T); ok && same(p, o) {
				return
			}
			enqueue(o)
		},
		DeleteFunc: func(obj any) {
			if o, ok := known(obj).(T); ok {
				enqueue(o)
			}
		},
	}
}

// Changes returns an event handler that passes each object on as it was and as it is; nil is
// one that wasn't there, or isn't any more, never both. Resyncs are passed like changes, and the
// last known state of an object whose deletion was missed like any other.
func Changes[T any](changed func(before, after *T)) cache.ResourceEventHandler {
	pass := func(before, after any) {
		a, _ := known(before).(*T)
		b, _ := known(after).(*T)
		if a != nil || b != nil {
			changed(a, b)
		}
	}
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { pass(nil, obj) },
		UpdateFunc: pass,
		DeleteFunc: func(obj any) { pass(obj, nil) },
	}
}

// known is the object of an event, whose deletion may have been missed.
func known(obj any) any {
	if t, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		return t.Obj
	}
	return obj
}

// Source is an informer, and who handles its events.
type Source struct {
	informer cache.SharedIndexInformer
	handler  cache.ResourceEventHandler
}

// On returns a Source.
func On(i cache.SharedIndexInformer, h cache.ResourceEventHandler) Source { return Source{i, h} }

// Register adds handlers. It returns, of each, whether it has handled what its informer began with.
func Register(sources ...Source) ([]cache.DoneChecker, error) {
	var synced []cache.DoneChecker
	for _, s := range sources {
		r, err := s.informer.AddEventHandler(s.handler)
		if err != nil {
			return nil, err
		}
		synced = append(synced, r.HasSyncedChecker())
	}
	return synced, nil
}
