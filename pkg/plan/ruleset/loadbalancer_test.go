package ruleset_test

import (
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// elements are those of all sets of the table of some frontends.
func elements(all ...ruleset.Frontend) map[string]map[dataplane.Element]bool {
	l := ruleset.LoadBalancer{Frontends: all}
	for _, at := range all {
		l.LoadBalancerShape = l.With(at)
	}
	has := map[string]map[dataplane.Element]bool{}
	for _, s := range l.Ruleset().Sets {
		for _, e := range s.Elements {
			if has[s.Name] == nil {
				has[s.Name] = map[dataplane.Element]bool{}
			}
			has[s.Name][e] = true
		}
	}
	return has
}

// Changes of a frontend lead from the elements of one table to those of the other, and touch no element twice.
func TestChange(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	random := func() *ruleset.Frontend {
		if r.IntN(5) == 0 {
			return nil
		}
		at := &ruleset.Frontend{Address: netip.MustParseAddr("2001:db8::1"), Port: ruleset.Port{Protocol: unix.IPPROTO_TCP, Port: 80}}
		for _, i := range r.Perm(6)[:r.IntN(6)] {
			at.Endpoints = append(at.Endpoints, netip.AddrPortFrom(netip.MustParseAddr("fd00::1"), uint16(i+1)))
		}
		if r.IntN(3) == 0 {
			at.Affinity = time.Duration(1+r.IntN(2)) * time.Hour
		}
		if r.IntN(3) == 0 {
			at.Sources = []netipx.IPRange{netipx.RangeOfPrefix(netip.MustParsePrefix([]string{"fd01::/64", "fd02::/64"}[r.IntN(2)]))}
		}
		return at
	}
	list := func(at *ruleset.Frontend) []ruleset.Frontend {
		if at == nil {
			return nil
		}
		return []ruleset.Frontend{*at}
	}
	seen := 0
	for range 2000 {
		before, after := random(), random()
		has := elements(list(before)...)
		for _, c := range ruleset.Change(before, after) {
			if has[c.Set] == nil {
				has[c.Set] = map[dataplane.Element]bool{}
			}
			for _, e := range c.Remove {
				if !has[c.Set][e] {
					t.Fatalf("%+v isn't in %s", e, c.Set)
				}
				delete(has[c.Set], e)
			}
			for _, e := range c.Add {
				if has[c.Set][e] {
					t.Fatalf("%+v is in %s already", e, c.Set)
				}
				has[c.Set][e] = true
			}
			if len(has[c.Set]) == 0 {
				delete(has, c.Set)
			}
			seen++
		}
		want := elements(list(after)...)
		for _, name := range []string{"addresses_ipv6", "to_node_ipv6", "to_node_ipv4"} { // of the table, not of a frontend
			delete(want, name)
			delete(has, name)
		}
		if d := cmp.Diff(want, has); d != "" {
			t.Fatalf("from %+v to %+v (-want +got):\n%s", before, after, d)
		}
	}
	if seen < 4000 {
		t.Errorf("there were only %d changes", seen)
	}
}

// An endpoint that comes or goes changes few elements, whatever the number of the others.
func TestChangeIsSmall(t *testing.T) {
	before := ruleset.Frontend{Address: netip.MustParseAddr("198.51.100.1"), Port: ruleset.Port{Protocol: unix.IPPROTO_UDP, Port: 53}}
	for i := range 100 {
		before.Endpoints = append(before.Endpoints, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 53))
	}
	after := before
	after.Endpoints = before.Endpoints[:99]
	for _, c := range [][2]*ruleset.Frontend{{&before, &after}, {&after, &before}} {
		n := 0
		for _, s := range ruleset.Change(c[0], c[1]) {
			n += len(s.Add) + len(s.Remove)
		}
		if n != 3 { // the chain that chooses among so many, before and after, and the endpoint
			t.Errorf("%d elements change, want 3", n)
		}
	}
}
