package loadbalancer

import "k8s.io/apimachinery/pkg/types"

// findings are what was found out of objects of a cache, which never change: another version is another object. A plan of thousands of Services is made for each
// change, and most of them are as they were.
type findings[O, V any] struct {
	byUID map[types.UID]finding[O, V]
}

// finding is what was found out of an object.
type finding[O, V any] struct {
	object *O
	value  V
}

// of returns what is found out of an object, which is called for once. The value belongs to all who ask.
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

// keep forgets everything once most of it is of objects that are gone: n is how many there are.
func (r *findings[O, V]) keep(n int) {
	if len(r.byUID) > 2*n {
		clear(r.byUID)
	}
}
