package loadbalancer

import (
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// written knows objects that the controller has written into and whose events haven't come: what a cache has of them is old, and another write would be
// refused as a conflict. It is safe for concurrent use.
type written struct {
	mu sync.Mutex
	// read are their resource versions before, by UID.
	read map[types.UID]string
}

// add notes a write into an object that was read before. After a write that has changed nothing no event comes.
func (w *written) add(read, after metav1.Object) {
	if read.GetResourceVersion() == after.GetResourceVersion() {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.read == nil {
		w.read = map[types.UID]string{}
	}
	w.read[read.GetUID()] = read.GetResourceVersion()
}

// has says whether an object of a cache is one that was written into since.
func (w *written) has(o metav1.Object) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	version, ok := w.read[o.GetUID()]
	return ok && version == o.GetResourceVersion()
}

// forget forgets an object of which an event came.
func (w *written) forget(o metav1.Object) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.read, o.GetUID())
}
