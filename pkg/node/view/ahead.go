package view

import (
	"maps"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/kube"
)

// ahead are objects that were read from the API server and that a cache doesn't have yet, by their names. The zero value has none.
type ahead[P metav1.Object] struct {
	mu    sync.Mutex
	known map[string]P
	// lists are the last ones by namespace, or by name: what was there then is known, by the cache or here.
	lists map[string]list
}

// list is the version of a list, and when it was there.
type list struct {
	version uint64
	at      time.Time
}

// keepList is for how long a list counts. API servers tell caches how far they are as often (bookmarks).
const keepList = time.Minute

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
	if len(a.known) == 0 {
		return nil
	}
	maps.DeleteFunc(a.known, func(_ string, o P) bool { return kube.ParseVersion(o.GetResourceVersion()) <= have })
	return maps.Clone(a.known)
}

// listed notes that all objects of a namespace, or with that name, were noted that were there at a version.
func (a *ahead[P]) listed(namespace string, version uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.lists, func(_ string, l list) bool { return time.Since(l.at) > keepList })
	if a.lists == nil {
		a.lists = map[string]list{}
	}
	if version > a.lists[namespace].version {
		a.lists[namespace] = list{version, time.Now()}
	}
}

// upTo returns the version of the last list of a namespace, 0 for none.
func (a *ahead[P]) upTo(namespace string) uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	if l := a.lists[namespace]; time.Since(l.at) <= keepList {
		return l.version
	}
	return 0
}
