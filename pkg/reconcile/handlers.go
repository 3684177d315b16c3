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
			if t, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = t.Obj
			}
			if o, ok := obj.(T); ok {
				enqueue(o)
			}
		},
	}
}
