// Package syncmap is a typed map for concurrent use.
package syncmap

import (
	"maps"
	"sync"
)

// Map is a map for concurrent use. The zero Map is empty. It must not be copied.
type Map[K comparable, V any] struct {
	mu sync.Mutex
	m  map[K]V
}

// Get returns the value of a key, the zero value if there is none.
func (m *Map[K, V]) Get(key K) V {
	v, _ := m.Find(key)
	return v
}

// Find returns the value of a key, and whether there is one.
func (m *Map[K, V]) Find(key K) (V, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v, ok := m.m[key]
	return v, ok
}

// Set sets the value of a key.
func (m *Map[K, V]) Set(key K, v V) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.m == nil {
		m.m = map[K]V{}
	}
	m.m[key] = v
}

// Delete deletes a key.
func (m *Map[K, V]) Delete(key K) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.m, key)
}

// DeleteFunc deletes the keys for which del returns true. del must not use the map.
func (m *Map[K, V]) DeleteFunc(del func(K, V) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	maps.DeleteFunc(m.m, del)
}

// Copy returns the map as it is now.
func (m *Map[K, V]) Copy() map[K]V {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.m)
}
