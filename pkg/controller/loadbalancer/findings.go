package loadbalancer

import "k8s.io/apimachinery/pkg/types"

// findings remembers a value for each object of a cache. An object never changes: another version is another object. A plan is made of all Services, most of which are
// as they were in the plan before.
type findings[O, V any] struct {
	byUID map[types.UID]finding[O, V]
}

// finding is the value of an object.
type finding[O, V any] struct {
	object *O
	value  V
}

// of returns the value of an object. It calls find once for each object. Callers share the value, and must not change it.
func (r *findings[O, V]) of(uid types.UID, o *O, find func(*O) V) V {
	if f, ok := r.byUID[uid]; ok && f.object == o {
		return f.value
	}
	if r.byUID == nil {
		r.byUID = map[types.UID]finding[O, V]{}
	}
	f := finding[O, V]{o, find(o)}
	r.byUID[uid] = f
	return f.value
}

// keep forgets all values when more than half of them are of objects that are gone. n is the number of objects.
func (r *findings[O, V]) keep(n int) {
	if len(r.byUID) > 2*n {
		clear(r.byUID)
	}
}
