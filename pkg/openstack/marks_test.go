package openstack

import (
	"slices"
	"strings"
	"testing"
)

func TestKeyOf(t *testing.T) {
	m := marks{cluster: "one"}
	long := strings.Repeat("x", 63)
	for _, tt := range []struct {
		name, description string
		tags              []string
		key               string // empty: none of the cluster's
	}{
		{"both", "Coil: cluster one, address web", []string{"coil-cluster=one", "coil-address=web"}, "web"},
		{"described", "Coil: cluster one, address web", nil, "web"},
		{"tagged", "theirs", []string{"theirs", "coil-address=web", "coil-cluster=one"}, "web"},
		{"half tagged", "Coil: cluster one, address web", []string{"coil-cluster=one"}, "web"},
		{"the tag decides", "Coil: cluster one, address old", []string{"coil-cluster=one", "coil-address=web"}, "web"},
		{"long", "Coil: cluster one, address " + long, nil, long},

		{"nothing", "", nil, ""},
		{"no key", "", []string{"coil-cluster=one"}, ""},
		{"no cluster", "", []string{"coil-address=web"}, ""},
		{"no cluster, and another key", "Coil: cluster one, address web", []string{"coil-address=db"}, ""},
		{"another cluster", "Coil: cluster two, address web", []string{"coil-cluster=two", "coil-address=web"}, ""},
		{"another cluster's tag", "Coil: cluster one, address web", []string{"coil-cluster=two"}, ""},
		{"another cluster's description", "Coil: cluster two, address web", []string{"coil-cluster=one", "coil-address=web"}, ""},
		{"two clusters", "", []string{"coil-cluster=one", "coil-cluster=two", "coil-address=web"}, ""},
		{"two keys", "Coil: cluster one, address web", []string{"coil-cluster=one", "coil-address=web", "coil-address=db"}, ""},
		{"longer", "Coil: cluster one, address web.", nil, ""},
		{"in a sentence", "see Coil: cluster one, address web", nil, ""},
		{"beginning of the cluster", "Coil: cluster one-more, address web", nil, ""},
		{"two descriptions", "Coil: cluster one, address a, address b", nil, ""},
		{"too long", "Coil: cluster one, address " + long + "x", nil, ""},
	} {
		if got, ok := m.keyOf(tt.description, tt.tags); got != tt.key || ok != (tt.key != "") {
			t.Errorf("%s: key %q, %t; want %q", tt.name, got, ok, tt.key)
		}
	}
	if d := (marks{long}).description(long); len(d) > 255 {
		t.Errorf("a description has %d characters", len(d))
	}
}

func FuzzKeyOf(f *testing.F) {
	f.Add("Coil: cluster one, address web", "coil-cluster=one,coil-address=web")
	f.Add("Coil: cluster two, address web", "coil-cluster=one")
	f.Add("a database", "")
	f.Fuzz(func(t *testing.T, description, list string) {
		m, other := marks{"one"}, marks{"two"}
		tags := strings.Split(list, ",")
		k, ok := m.keyOf(description, tags)
		if _, both := other.keyOf(description, tags); ok && both {
			t.Fatalf("%q with %q is of two clusters", description, tags)
		}
		if !ok {
			return
		}
		if checkKey(k) != nil {
			t.Fatalf("the key %q isn't one", k)
		}
		if description != m.description(k) && !m.tagged(k, tags) {
			t.Fatalf("%q with %q is of address %s without a mark", description, tags, k)
		}
		// With tags it stays what it is.
		all := append(slices.Clone(tags), m.tags(k)...)
		if again, ok := m.keyOf(description, all); !ok || again != k || !m.tagged(k, all) {
			t.Fatalf("%q with %q is of address %s, and with tags of %q", description, tags, k, again)
		}
	})
}
