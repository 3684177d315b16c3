package view

import (
	"maps"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/kube"
)

// ahead are objects that were read from the API server and that a cache doesn't have yet. The zero value has none. Its methods ask
// for the version that the cache has, one after the other: an older one than before would be that of a restored API server.
type ahead[P metav1.Object] struct {
	mu   sync.Mutex
	have uint64
	// known are the objects by name.
	known map[string]P
	// lists are the newest lists by namespace, or reads by name: what was there then is known, by the cache or here.
	lists map[string]listed
}

// listed is a list: its version, and the names of what it had.
type listed struct {
	version uint64
	names   map[string]bool
}

// nameOf is the key of an object.
func nameOf(o metav1.Object) string {
	if o.GetNamespace() == "" {
		return o.GetName()
	}
	return o.GetNamespace() + "/" + o.GetName()
}

// follow forgets what the cache has by now, whose version it returns. It must be called with mu held.
func (a *ahead[P]) follow(cached func() uint64) (have uint64) {
	have = cached()
	if have < a.have { // the API server has lost what it had: its data were restored
		a.known, a.lists = nil, nil
	}
	if a.have = have; len(a.known)+len(a.lists) == 0 {
		return have
	}
	maps.DeleteFunc(a.known, func(_ string, o P) bool { return kube.ParseVersion(o.GetResourceVersion()) <= have })
	maps.DeleteFunc(a.lists, func(_ string, l listed) bool { return l.version <= have })
	return have
}

// note notes all objects of a namespace, or one by its name, as they were at a version.
func (a *ahead[P]) note(cached func() uint64, name string, version uint64, objects ...P) {
	a.mu.Lock()
	defer a.mu.Unlock()
	have := a.follow(cached)
	if a.known == nil {
		a.known, a.lists = map[string]P{}, map[string]listed{}
	}
	newest := a.lists[name].version
	for _, o := range objects {
		v := kube.ParseVersion(o.GetResourceVersion())
		if version <= newest && v <= newest {
			continue // the newest list had it, or it was gone by then
		}
		if last, known := a.known[nameOf(o)]; v > have && (!known || v > kube.ParseVersion(last.GetResourceVersion())) {
			a.known[nameOf(o)] = o
		}
	}
	if version > max(have, newest) {
		names := map[string]bool{}
		for _, o := range objects {
			names[nameOf(o)] = true
		}
		a.lists[name] = listed{version, names}
		maps.DeleteFunc(a.known, func(key string, o P) bool {
			return o.GetNamespace() == name && !names[key] && kube.ParseVersion(o.GetResourceVersion()) <= version
		})
	}
}

// beyond returns the objects that the cache doesn't have, and whether one that it has was gone when the namespace was listed.
func (a *ahead[P]) beyond(cached func() uint64, namespace string) (known map[string]P, gone func(P) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.follow(cached)
	list, read := a.lists[namespace]
	return maps.Clone(a.known), func(o P) bool {
		return read && !list.names[nameOf(o)] && kube.ParseVersion(o.GetResourceVersion()) <= list.version
	}
}

// upTo returns the version up to which all is known of a namespace, or of a name.
func (a *ahead[P]) upTo(cached func() uint64, name string) uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return max(a.follow(cached), a.lists[name].version)
}
