package kube

import (
	"fmt"
	"strconv"

	"k8s.io/client-go/tools/cache"
)

// Cache is the cache of an informer of objects of type *T. Objects in it must not be changed.
type Cache[T any] struct{ cache.Indexer }

// CacheOf returns the cache of an informer.
func CacheOf[T any](i cache.SharedIndexInformer) Cache[T] { return Cache[T]{i.GetIndexer()} }

// Find returns the object of a key, nil if there is none. The key is the name, or "namespace/name".
func (c Cache[T]) Find(key string) *T {
	obj, _, _ := c.GetByKey(key) // a cache in memory has no errors
	o, _ := obj.(*T)
	return o
}

// Version returns the resource version up to which the cache has all changes, as far as it was told; 0 if that isn't known. See
// ParseVersion.
func (c Cache[T]) Version() uint64 { return ParseVersion(c.LastStoreSyncResourceVersion()) }

// ParseVersion returns a resource version as a number, 0 if it is none. Of two versions of one API server the newer one is greater,
// whatever objects they are of, as long as these are in one etcd.
func ParseVersion(version string) uint64 {
	v, _ := strconv.ParseUint(version, 10, 64)
	return v
}

// All returns the objects.
func (c Cache[T]) All() []*T { return objects[T](c.List()) }

// In returns the objects of a namespace.
func (c Cache[T]) In(namespace string) []*T { return c.index(cache.NamespaceIndex).Under(namespace) }

// Index has the objects of a cache under keys.
type Index[T any] struct {
	cache.Indexer
	name string
}

func (c Cache[T]) index(name string) Index[T] { return Index[T]{c.Indexer, name} }

// IndexBy adds an index to the cache, in which each object is under the keys that a function returns.
func (c Cache[T]) IndexBy(keys func(*T) []string) Index[T] {
	name := fmt.Sprintf("index %d", len(c.GetIndexers()))
	// The only error is that there is an index of the name.
	_ = c.AddIndexers(cache.Indexers{name: func(obj any) ([]string, error) {
		if o, ok := obj.(*T); ok {
			return keys(o), nil
		}
		return nil, nil
	}})
	return c.index(name)
}

// Under returns the objects under a key.
func (i Index[T]) Under(key string) []*T {
	objs, _ := i.ByIndex(i.name, key) // the index exists
	return objects[T](objs)
}

// Keys returns the keys under which there are objects.
func (i Index[T]) Keys() []string { return i.ListIndexFuncValues(i.name) }

func objects[T any](objs []any) []*T {
	all := make([]*T, 0, len(objs))
	for _, obj := range objs {
		if o, ok := obj.(*T); ok {
			all = append(all, o)
		}
	}
	return all
}
