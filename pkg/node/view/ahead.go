package view

import (
	"maps"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/kube"
)

// ahead are objects that were read from the API server and that a cache doesn't have yet, by their names.
type ahead[P metav1.Object] struct {
	mu    sync.Mutex
	known map[string]P
}

// nameOf is the key of an object.
func nameOf(o metav1.Object) string {
	if o.GetNamespace() == "" {
		return o.GetName()
	}
	return o.GetNamespace() + "/" + o.GetName()
}

// note notes an object, unless a cache of a version has it.
func (a *ahead[P]) note(have uint64, o P) {
	a.mu.Lock()
	defer a.mu.Unlock()
	v := kube.ParseVersion(o.GetResourceVersion())
	if last, known := a.known[nameOf(o)]; v <= have || known && v <= kube.ParseVersion(last.GetResourceVersion()) {
		return
	}
	if a.known == nil {
		a.known = map[string]P{}
	}
	a.known[nameOf(o)] = o
}

// beyond returns the objects that a cache of a version doesn't have, and forgets the others.
func (a *ahead[P]) beyond(have uint64) map[string]P {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.known, func(_ string, o P) bool { return kube.ParseVersion(o.GetResourceVersion()) <= have })
	return maps.Clone(a.known)
}
