package reconcile

import (
	"cmp"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

// object is a pointer to an object of the API.
type object[T any] interface {
	*T
	metav1.Object
}

// Handler returns an event handler that passes each object that was added,
// changed or deleted to enqueue, which adds keys to loops and must not block. A
// resync without a change is skipped; the last known state of an object whose
// deletion was missed is passed like any other.
func Handler[P object[T], T any](enqueue func(P)) cache.ResourceEventHandler {
	return ChangeHandler(enqueue, func(old, now P) bool { return old.GetResourceVersion() == now.GetResourceVersion() })
}

// ChangeHandler is a Handler that skips changes after which the object is the same by the given function. An
// object that was made again under the name of another one isn't the same.
func ChangeHandler[P object[T], T any](enqueue func(P), same func(old, now P) bool) cache.ResourceEventHandler {
	return Changes(func(before, after *T) {
		if before == nil || after == nil || P(before).GetUID() != P(after).GetUID() || !same(before, after) {
			enqueue(cmp.Or(after, before))
		}
	})
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

// Source is an informer, and the handler of its events.
type Source struct {
	informer cache.SharedIndexInformer
	handler  cache.ResourceEventHandler
}

// On returns a Source.
func On(i cache.SharedIndexInformer, h cache.ResourceEventHandler) Source { return Source{i, h} }

// Register adds handlers. It returns, of each, whether it has handled the objects with which its informer began.
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
