package client

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

func TestRoutersOf(t *testing.T) {
	yes, no := new(true), new(false)
	list := func(es ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{Endpoints: es}
	}
	endpoint := func(ready, serving, terminating *bool, addrs ...string) discoveryv1.Endpoint {
		return discoveryv1.Endpoint{Addresses: addrs, Conditions: discoveryv1.EndpointConditions{Ready: ready, Serving: serving, Terminating: terminating}}
	}
	for _, c := range []struct {
		name  string
		lists []*discoveryv1.EndpointSlice
		want  string
	}{
		{"none", nil, "[]"},
		{"ready, or not said", []*discoveryv1.EndpointSlice{list(endpoint(yes, yes, no, "10.1.0.2"), endpoint(nil, nil, nil, "10.1.0.1"))}, "[{10.1.0.1 1  } {10.1.0.2 1  }]"},
		{"ends", []*discoveryv1.EndpointSlice{list(endpoint(no, yes, yes, "10.1.0.1"))}, "[{10.1.0.1 2  }]"},
		{"starts", []*discoveryv1.EndpointSlice{list(endpoint(no, no, no, "fd00::1"))}, "[{fd00::1 2  }]"},
		{"two lists, one twice", []*discoveryv1.EndpointSlice{
			list(endpoint(no, no, no, "10.1.0.1")), list(endpoint(yes, yes, no, "10.1.0.1"), endpoint(yes, yes, no, "10.1.0.3")),
		}, "[{10.1.0.1 1  } {10.1.0.3 1  }]"},
		{"of a pod", []*discoveryv1.EndpointSlice{list(discoveryv1.Endpoint{Addresses: []string{"10.1.0.1", "fd00::1"}, TargetRef: &corev1.ObjectReference{UID: "uid", Name: "r"}})},
			"[{10.1.0.1 1 uid r} {fd00::1 1 uid r}]"},
		{"what is no address of a pod", []*discoveryv1.EndpointSlice{list(endpoint(yes, yes, no, "x", "127.0.0.1", "ff02::1", "fe80::1"))}, "[]"},
	} {
		if got := fmt.Sprint(RoutersOf(c.lists)); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// direct is an Egress with routers, as "10.1.0.1 live, ...".
func direct(name, routers string, destinations ...string) Egress {
	e := Egress{Name: name, Destinations: prefixes.Valid(destinations), Direct: true, Peers: clientAddrs("46", "10.96.0.1", "fd96::1")}
	for text := range strings.SplitSeq(routers, ", ") {
		if addr, state, ok := strings.Cut(text, " "); ok {
			e.Routers = append(e.Routers, Router{
				Addr: netip.MustParseAddr(addr), State: map[string]RouterState{"live": RouterLive, "draining": RouterDraining, "dead": RouterDead}[state],
			})
		}
	}
	return e
}

// linksOf are links to the tunnels of a state, from 10.
func linksOf(s State, but ...string) map[netip.Addr]int {
	links := map[netip.Addr]int{}
	for i, t := range s.Tunnels {
		if !slices.Contains(but, t.Remote.String()) {
			links[t.Remote] = 10 + i
		}
	}
	return links
}

func TestDirectState(t *testing.T) {
	a4, a6 := dataplane.NexthopGroupOf("a/a", dataplane.IPv4, 0), dataplane.NexthopGroupOf("a/a", dataplane.IPv6, 0)
	const three = "10.1.1.1 live, 10.1.1.2 draining, 10.1.1.3 dead, 10.1.1.4 live"
	for _, c := range []struct {
		name   string
		client Client
		broken []string
		want   []string
	}{
		{"no router", clientOfFamilies("4", direct("a/a", "", "192.0.2.0/24")), nil, []string{"unreachable 192.0.2.0/24 table 118"}},
		{"no router that lives", clientOfFamilies("4", direct("a/a", "10.1.1.2 draining, 10.1.1.3 dead", "192.0.2.0/24")), nil, []string{
			"throw 10.1.1.2/32 table 117", "throw 10.1.1.3/32 table 117", "throw 10.1.1.2/32 table 118", "throw 10.1.1.3/32 table 118",
			"unreachable 192.0.2.0/24 table 118",
			"0.0.0.0/0 dev 10 src 10.1.0.5 table A", "0.0.0.0/0 dev 11 src 10.1.0.5 table B",
		}},
		{"all states", clientOfFamilies("4", direct("a/a", three, "0.0.0.0/0", "10.9.0.0/16")), nil, []string{
			"throw 10.1.1.1/32 table 117", "throw 10.1.1.2/32 table 117", "throw 10.1.1.3/32 table 117", "throw 10.1.1.4/32 table 117",
			fmt.Sprintf("10.9.0.0/16 nhid %#x src 10.1.0.5 table 117", a4), "unreachable 10.9.0.0/16 table 117",
			fmt.Sprintf("0.0.0.0/0 nhid %#x src 10.1.0.5 table 118", a4), "unreachable 0.0.0.0/0 table 118",
			"throw 10.1.1.1/32 table 118", "throw 10.1.1.2/32 table 118", "throw 10.1.1.3/32 table 118", "throw 10.1.1.4/32 table 118",
			"id 0x6300000a dev 10 proto 30 (IPv4)", "id 0x6300000d dev 13 proto 30 (IPv4)",
			fmt.Sprintf("id %#x group 0x6300000a,1/0x6300000d,1 type resilient buckets 128 idle_timer 2m0s proto 30", a4),
			"0.0.0.0/0 dev 10 src 10.1.0.5 table A", "0.0.0.0/0 dev 11 src 10.1.0.5 table B", "0.0.0.0/0 dev 13 src 10.1.0.5 table D",
		}},
		{"a tunnel is missing", clientOfFamilies("4", direct("a/a", "10.1.1.1 live, 10.1.1.2 live", "192.0.2.0/24")), []string{"10.1.1.1"}, []string{
			"throw 10.1.1.1/32 table 117", "throw 10.1.1.2/32 table 117", "throw 10.1.1.1/32 table 118", "throw 10.1.1.2/32 table 118",
			fmt.Sprintf("192.0.2.0/24 nhid %#x src 10.1.0.5 table 118", a4), "unreachable 192.0.2.0/24 table 118",
			"id 0x6300000b dev 11 proto 30 (IPv4)",
			fmt.Sprintf("id %#x group 0x6300000b,1 type resilient buckets 128 idle_timer 2m0s proto 30", a4),
			"0.0.0.0/0 dev 11 src 10.1.0.5 table B",
		}},
		{"all tunnels are missing", clientOfFamilies("4", direct("a/a", "10.1.1.1 live", "192.0.2.0/24")), []string{"10.1.1.1"}, []string{
			"throw 10.1.1.1/32 table 117", "throw 10.1.1.1/32 table 118", "unreachable 192.0.2.0/24 table 118",
		}},
		{"a family without routers, beside a Service", clientOfFamilies("46", direct("a/a", "fd01::9 live", "192.0.2.0/24", "2001:db8::/32"), egressOf("b/b", "4", 1, "198.51.100.0/24")), nil, []string{
			throw1v4n, "throw fd01::9/128 table 117",
			throw1v4w, "unreachable 192.0.2.0/24 table 118",
			"198.51.100.0/24 dev 10 src 10.1.0.5 table 118", "unreachable 198.51.100.0/24 table 118",
			fmt.Sprintf("2001:db8::/32 nhid %#x src fd01::5 table 118", a6), "unreachable 2001:db8::/32 table 118", "throw fd01::9/128 table 118",
			"id 0x6300000b dev 11 proto 30 (IPv6)",
			fmt.Sprintf("id %#x group 0x6300000b,1 type resilient buckets 128 idle_timer 2m0s proto 30", a6),
			"::/0 dev 11 src fd01::5 table B",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.client.Idle = 2 * time.Minute
			s := StateOf(c.client)
			links := linksOf(s, c.broken...)
			var got []string
			nexthops, groups := s.NexthopsBy(links)
			pins, tables := s.PinRoutesBy(links)
			for _, r := range s.By(links, nil) {
				got = append(got, r.String())
			}
			for _, n := range nexthops {
				got = append(got, n.String())
			}
			for _, g := range groups {
				got = append(got, g.String())
			}
			for _, r := range pins {
				if !slices.Contains(tables, r.Table) {
					t.Errorf("%s: not in one of the tables %d", r, tables)
				}
				table := string(rune('A' + dataplane.LinkOf(r.Table) - 10))
				r.Table = 0
				got = append(got, strings.Replace(r.String(), "table 0", "table "+table, 1))
			}
			for i := range got {
				if !strings.HasPrefix(got[i], "id ") {
					got[i] = strings.ReplaceAll(got[i], " proto 30", "")
				}
				got[i] = strings.ReplaceAll(got[i], fmt.Sprint(" metric ", uint32(dataplane.MetricUnreachable)), "")
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			for _, r := range s.Closed(nil) {
				if r.Nexthop != 0 || r.Link != 0 {
					t.Errorf("%s needs a tunnel", r)
				}
			}
		})
	}
}

// Each router has a tunnel, whatever its state: a dead one is asked through it.
func TestDirectTunnels(t *testing.T) {
	e := direct("a/a", "10.1.1.1 live, 10.1.1.2 draining, 10.1.1.3 dead, fd01::9 live", "192.0.2.0/24", "2001:db8::/32")
	e.SourcePortAuto = true
	var got []string
	for _, tunnel := range StateOf(clientOfFamilies("46", e)).Tunnels {
		got = append(got, tunnel.String())
	}
	want := []string{
		"fou 10.1.0.5 -> 10.1.1.1 sport auto dport 5555 mtu 1472", "fou 10.1.0.5 -> 10.1.1.2 sport auto dport 5555 mtu 1472",
		"fou 10.1.0.5 -> 10.1.1.3 sport auto dport 5555 mtu 1472", "fou fd01::5 -> fd01::9 sport auto dport 5555 mtu 1452",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// Two Egresses whose names have one ID get two.
func TestGroupIDsCollide(t *testing.T) {
	names := map[uint32]string{}
	for i := 0; ; i++ {
		name := fmt.Sprintf("a/%d", i)
		id := dataplane.NexthopGroupOf(name, dataplane.IPv4, 0)
		other := names[id]
		names[id] = name
		if other == "" {
			continue
		}
		s := StateOf(clientOfFamilies("46", direct(other, "", "192.0.2.0/25"), direct(name, "", "192.0.2.128/25")))
		seen := map[uint32]bool{}
		for _, g := range s.Groups {
			if seen[g.ID] || g.ID <= dataplane.NexthopOf(1<<20) {
				t.Errorf("%s has %#x", g.Egress, g.ID)
			}
			seen[g.ID] = true
		}
		if len(seen) != 4 {
			t.Errorf("%d groups, want 4", len(seen))
		}
		return
	}
}

// However many endpoints slices list, a client has no more tunnels than shares, to those first that
// take flows.
func TestRoutersAreBounded(t *testing.T) {
	draining := &discoveryv1.EndpointSlice{Endpoints: []discoveryv1.Endpoint{{Conditions: discoveryv1.EndpointConditions{Ready: new(false)}}}}
	live := &discoveryv1.EndpointSlice{Endpoints: []discoveryv1.Endpoint{{}}}
	for i := range 1000 {
		draining.Endpoints[0].Addresses = append(draining.Endpoints[0].Addresses, netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String())
		live.Endpoints[0].Addresses = append(live.Endpoints[0].Addresses, netip.AddrFrom4([4]byte{10, 2, byte(i >> 8), byte(i)}).String())
	}
	live.Endpoints[0].Addresses = append(live.Endpoints[0].Addresses[:100], "2001:db8::1")
	got := RoutersOf([]*discoveryv1.EndpointSlice{draining, live})
	n := map[RouterState]int{}
	for _, r := range got {
		n[r.State]++
	}
	if n[RouterLive] != 101 || n[RouterDraining] != groupBuckets-100 {
		t.Errorf("%d live ones, %d that drain", n[RouterLive], n[RouterDraining])
	}
	if !slices.IsSortedFunc(got, func(a, b Router) int { return a.Addr.Compare(b.Addr) }) {
		t.Error("they aren't sorted")
	}
}

// Packets to routers take no tunnel: a list of routers, which tenants write, can't exempt what is outside of
// the cluster from another Egress.
func TestRoutersOutsideOfTheCluster(t *testing.T) {
	for _, c := range []struct {
		name, inCluster string
		others          []string // destinations of another Egress
		want            string   // the tunnels' ends
		conflicts       int
	}{
		{"nothing else has them", "10.1.0.0/16", []string{"203.0.113.0/24"}, "10.1.1.1 192.0.2.99 2001:db8::99", 0},
		{"another Egress has them", "10.1.0.0/16", []string{"0.0.0.0/0", "::/0"}, "10.1.1.1", 2},
		{"private ones", "192.0.2.0/24", []string{"10.0.0.0/8"}, "192.0.2.99 2001:db8::99", 1},
		{"pods with public addresses", "192.0.2.0/24", []string{"0.0.0.0/0"}, "10.1.1.1 192.0.2.99 2001:db8::99", 0},
		{"all is the cluster's", "0.0.0.0/0", []string{"0.0.0.0/0"}, "10.1.1.1 2001:db8::99", 1},
	} {
		a := direct("a/a", "10.1.1.1 live, 192.0.2.99 draining, 2001:db8::99 dead", "198.51.100.0/24")
		listed := slices.Clone(a.Routers)
		other := Egress{Name: "b/b", Destinations: prefixes.Valid(c.others), InCluster: prefixes.Valid([]string{c.inCluster})}
		s := StateOf(clientOfFamilies("46", a, other))
		var got []string
		for _, tunnel := range s.Tunnels {
			got = append(got, tunnel.Remote.String())
		}
		if strings.Join(got, " ") != c.want || len(s.Conflicts) != c.conflicts {
			t.Errorf("%s: tunnels to %v, conflicts %v; want %s and %d", c.name, got, s.Conflicts, c.want, c.conflicts)
		}
		for _, r := range s.Routes {
			if r.Type == dataplane.Throw && r.Dst.IsSingleIP() && !slices.Contains(got, r.Dst.Addr().String()) {
				t.Errorf("%s: %s is spared", c.name, r.Dst)
			}
		}
		if d := cmp.Diff(listed, a.Routers, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
			t.Errorf("%s: what a cache has was changed (-want +got):\n%s", c.name, d)
		}
	}
}
