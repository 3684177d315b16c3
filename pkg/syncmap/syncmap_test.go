package syncmap

import (
	"sync"
	"testing"
)

func TestMap(t *testing.T) {
	var m Map[string, int]
	if v, ok := m.Find("a"); v != 0 || ok {
		t.Errorf("the zero map has %d", v)
	}
	m.Delete("a")
	m.Set("a", 1)
	m.Set("b", 2)
	m.Set("a", 3)
	if v, ok := m.Find("a"); v != 3 || !ok || m.Get("b") != 2 {
		t.Errorf("%v", m.Copy())
	}
	before := m.Copy()
	m.DeleteFunc(func(k string, v int) bool { return k == "a" && v == 3 })
	if v, ok := m.Find("a"); ok || len(m.Copy()) != 1 || len(before) != 2 {
		t.Errorf("a is %d of %v, before %v", v, m.Copy(), before)
	}
	m.Delete("b")
	if len(m.Copy()) != 0 {
		t.Errorf("%v is left", m.Copy())
	}
}

// The race detector sees a missing lock.
func TestConcurrentUse(t *testing.T) {
	var m Map[int, int]
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			m.Set(i, i)
			m.DeleteFunc(func(k, _ int) bool { return k == i && k%2 == 0 })
			for k, v := range m.Copy() {
				if k != v || m.Get(k) > k {
					t.Errorf("%d has %d", k, v)
				}
			}
		})
	}
	wg.Wait()
	if n := len(m.Copy()); n != 4 {
		t.Errorf("%d keys, want 4", n)
	}
}
