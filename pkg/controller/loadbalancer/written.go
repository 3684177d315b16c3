package loadbalancer

import (
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// eventTime is for how long the event of a write is waited for, at least.
const eventTime = time.Minute

// written knows the objects that the controller has written into. Until the event of the write comes, the cache has an old one, and so has a step that read the
// cache before: another write would be refused as a conflict. It is safe for concurrent use.
type written struct {
	mu sync.Mutex
	// recent are resource versions that were read before a write, by UID, and earlier those of the time before began.
	recent, earlier map[types.UID]string
	began           time.Time
}

// add notes a write into an object that was read before. After a write that has changed nothing no event comes.
func (w *written) add(read, after metav1.Object) {
	if read.GetResourceVersion() == after.GetResourceVersion() {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.turn()
	w.recent[read.GetUID()] = read.GetResourceVersion()
}

// has says whether an object is one that was written into since it was read.
func (w *written) has(o metav1.Object) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.turn()
	version, ok := w.recent[o.GetUID()]
	if !ok {
		version, ok = w.earlier[o.GetUID()]
	}
	return ok && version == o.GetResourceVersion()
}

// turn forgets what is older than twice eventTime. It must be called with mu held.
func (w *written) turn() {
	switch age := time.Since(w.began); {
	case age < eventTime:
		return
	case age < 2*eventTime:
		w.earlier = w.recent
	default:
		w.earlier = nil
	}
	w.recent, w.began = map[types.UID]string{}, time.Now()
}
