package kube

import (
	"fmt"

	"k8s.io/client-go/tools/cache"
)

// Cache is the cache of an informer of objects of type *T. Objects in it must not be changed.
type Cache[T any] struct{ cache.Indexer }

// CacheOf returns the cache of an informer.
func CacheOf[T any](i cache.SharedIndexInformer) Cache[T] { return Cache[T]{i.GetIndexer()} }

// Find returns the object of a key, nil if there is none. The key is the name, or "namespace/name".
func (c Cache[T]) Find(key string) *T {
	obj, _, err := c.GetByKey(key)
	if err != nil {
		panic(fmt.Sprintf("cache of %T: %v", *new(T), err)) // a cache in memory has no errors
	}
	o, _ := obj.(*T)
	return o
}

// All returns the objects.
func (c Cache[T]) All() []*T { return objects[T](c.List()) }

// By returns the objects that an index has under a key. It panics if there is no such index.
func (c Cache[T]) By(index, key string) []*T {
	objs, err := c.ByIndex(index, key)
	if err != nil {
		panic(fmt.Sprintf("cache of %T: %v", *new(T), err))
	}
	return objects[T](objs)
}

func objects[T any](objs []any) []*T {
	all := make([]*T, 0, len(objs))
	for _, obj := range objs {
		if o, ok := obj.(*T); ok {
			all = append(all, o)
		}
	}
	return all
}

// IndexBy returns the function of an index that has each object under some keys.
func IndexBy[T any](keys func(*T) []string) cache.IndexFunc {
	return func(obj any) ([]string, error) {
		if o, ok := obj.(*T); ok {
			return keys(o), nil
		}
		return nil, nil
	}
}
