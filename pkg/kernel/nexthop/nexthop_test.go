package nexthop_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nexthop"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

const (
	proto = 30
	table = 118
	group = dataplane.FirstNexthop + 0x100
)

// space is a network namespace with three links that are up.
type space struct {
	*testing.T
	*netnstest.NS
	handle *rtnl.Handle
	*nexthop.Syncer
	links []int
}

func newSpace(t *testing.T) *space {
	t.Helper()
	ns := netnstest.New(t)
	h := testkit.Must(rtnl.New(ns.NS))(t)
	t.Cleanup(h.Close)
	s := &space{t, ns, h, nexthop.New(h, proto), nil}
	for i := range 3 {
		name := fmt.Sprintf("l%d", i)
		ns.IP(t, "link", "add", name, "type", "veth", "peer", "name", "p"+name)
		ns.IP(t, "link", "set", "p"+name, "up")
		ns.IP(t, "link", "set", name, "arp", "off", "up") // no packet waits for a neighbour
		s.links = append(s.links, testkit.Must(h.IndexByName(name))(t))
	}
	return s
}

// set has objects by some of the links, with these weights, and a group of them.
func (s *space) set(f dataplane.Family, weights map[int]int) nexthop.Set {
	var out nexthop.Set
	g := dataplane.NexthopGroup{ID: group + uint32(f), Buckets: 64, Idle: time.Hour, Protocol: proto}
	for i, link := range s.links {
		if w := weights[i]; w > 0 {
			id := dataplane.FirstNexthop + uint32(16*i) + uint32(f)
			out.Nexthops = append(out.Nexthops, dataplane.Nexthop{ID: id, Family: f, Link: link, Protocol: proto})
			g.Members = append(g.Members, dataplane.NexthopMember{ID: id, Weight: w})
		}
	}
	out.Groups = []dataplane.NexthopGroup{g}
	return out
}

func (s *space) ensure(want nexthop.Set, result dataplane.Result) {
	s.Helper()
	if got, err := s.Ensure(s.Context(), want); err != nil || got != result {
		s.Fatalf("Ensure: %+v, %v; want %+v", got, err, result)
	}
	if got, err := s.Ensure(s.Context(), want); err != nil || got.Changed() {
		s.Fatalf("Ensure once more: %+v, %v", got, err)
	}
}

// use sends packets of so many flows by the routes of the table that each bucket gets some.
func (s *space) use(dst netip.Prefix) {
	s.Helper()
	family, from, flags := "-4", "198.51.100.1/32", []string(nil)
	if dst.Addr().Is6() {
		family, from, flags = "-6", "2001:db8:1::1/128", []string{"nodad"}
	}
	s.IP(s.T, "link", "set", "lo", "up")
	s.IP(s.T, append([]string{"address", "add", from, "dev", "lo"}, flags...)...)
	s.IP(s.T, family, "rule", "add", "lookup", fmt.Sprint(table))
	testkit.Must(s.NS.Run("sysctl", "-qw", "net.ipv4.fib_multipath_hash_policy=1", "net.ipv6.fib_multipath_hash_policy=1"))(s.T)
	source := netip.AddrPortFrom(netip.MustParsePrefix(from).Addr(), 0)
	testkit.Check(s.T, s.NS.NS.Do(func() error {
		conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(source))
		if err != nil {
			return err
		}
		defer conn.Close()
		for port := range 2000 {
			if _, err := conn.WriteToUDPAddrPort([]byte("x"), netip.AddrPortFrom(dst.Addr().Next(), uint16(1000+port))); err != nil {
				return err
			}
		}
		return nil
	}))
}

// share counts the buckets of each member.
func (s *space) share(f dataplane.Family) map[uint32]int {
	s.Helper()
	all := map[uint32]int{}
	for _, b := range testkit.Must(s.handle.Buckets(s.Context(), group+uint32(f)))(s.T) {
		all[b.Nexthop]++
	}
	return all
}

func TestEnsure(t *testing.T) {
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		t.Run(f.String(), func(t *testing.T) {
			s := newSpace(t)
			two := s.set(f, map[int]int{0: 1, 1: 1})
			s.ensure(two, dataplane.Result{Added: 3})
			before := testkit.Must(s.handle.Buckets(t.Context(), group+uint32(f)))(t)
			if n := s.share(f); len(before) != 64 || n[two.Nexthops[0].ID] != 32 || n[two.Nexthops[1].ID] != 32 {
				t.Fatalf("buckets are shared %v", n)
			}

			// Routes by the group, next to the one without it.
			routes := route.New(s.handle, proto, table)
			dst := map[dataplane.Family]netip.Prefix{4: netip.MustParsePrefix("192.0.2.0/24"), 6: netip.MustParsePrefix("2001:db8::/32")}[f]
			want := []dataplane.Route{
				{Table: table, Dst: dst, Nexthop: group + uint32(f), Protocol: proto},
				{Table: table, Dst: dst, Type: dataplane.Unreachable, Metric: 4278, Protocol: proto},
			}
			if got := testkit.Must(routes.Sync(t.Context(), want))(t); got.Added != 2 {
				t.Errorf("routes: %+v", got)
			}
			if got := testkit.Must(routes.Sync(t.Context(), want))(t); got.Changed() {
				t.Errorf("routes are changed without need: %+v", got)
			}

			// One that comes gets its share of what was never used, and nothing of what is.
			three := s.set(f, map[int]int{0: 1, 1: 1, 2: 1})
			s.ensure(three, dataplane.Result{Added: 1, Replaced: 1})
			if n := s.share(f)[three.Nexthops[2].ID]; n < 20 || n > 22 {
				t.Errorf("%d unused buckets of 64 went to the third member", n)
			}
			s.ensure(two, dataplane.Result{Replaced: 1})
			s.use(dst)
			before = testkit.Must(s.handle.Buckets(t.Context(), group+uint32(f)))(t)
			s.ensure(three, dataplane.Result{Replaced: 1})
			if after := testkit.Must(s.handle.Buckets(t.Context(), group+uint32(f)))(t); !sameHolders(before, after) {
				t.Errorf("buckets in use moved from %v to %v", before, after)
			}
			// The buckets of a member that goes are the others', and no other bucket moves.
			s.ensure(s.set(f, map[int]int{1: 1, 2: 1}), dataplane.Result{Replaced: 1})
			for i, b := range testkit.Must(s.handle.Buckets(t.Context(), group+uint32(f)))(t) {
				if was := before[i].Nexthop; was == two.Nexthops[1].ID && b.Nexthop != was {
					t.Errorf("bucket %d moved from %#x to %#x", i, was, b.Nexthop)
				}
			}
			if n := s.share(f); n[two.Nexthops[0].ID] != 0 || n[two.Nexthops[1].ID] != 32 {
				t.Errorf("buckets are shared %v", n)
			}
			s.ensure(s.set(f, map[int]int{1: 256, 2: 1}), dataplane.Result{Replaced: 1})

			keep := s.set(f, map[int]int{1: 256, 2: 1})
			if got, err := s.Sync(t.Context(), keep); err != nil || got != (dataplane.Result{Deleted: 1}) {
				t.Errorf("Sync: %+v, %v", got, err)
			}
			if got, err := s.Sync(t.Context(), nexthop.Set{}); err != nil || got != (dataplane.Result{Deleted: 3}) {
				t.Errorf("Sync of nothing: %+v, %v", got, err)
			}
			if out := s.IP(t, "nexthop"); out != "" {
				t.Errorf("left: %s", out)
			}
			family := map[dataplane.Family]string{4: "-4", 6: "-6"}[f]
			if out := s.IP(t, family, "route", "show", "table", "118"); !strings.HasPrefix(out, "unreachable") || strings.Contains(out, "nhid") {
				t.Errorf("routes without the group: %s", out)
			}
		})
	}
}

// Turn decides which member gets which buckets when the group is made, and nothing after that.
func TestTurn(t *testing.T) {
	var holders []int
	for turn := range uint32(3) {
		s := newSpace(t)
		set := s.set(dataplane.IPv4, map[int]int{0: 1, 1: 1})
		set.Groups[0].Turn = turn
		s.ensure(set, dataplane.Result{Added: 3})
		buckets := testkit.Must(s.handle.Buckets(t.Context(), group+uint32(dataplane.IPv4)))(t)
		holders = append(holders, slices.IndexFunc(set.Nexthops, func(n dataplane.Nexthop) bool { return n.ID == buckets[0].Nexthop }))
		set.Groups[0].Turn++
		s.ensure(set, dataplane.Result{})
	}
	if holders[0] == holders[1] || holders[0] != holders[2] {
		t.Errorf("the first bucket is member %d's, turned once %d's, twice %d's", holders[0], holders[1], holders[2])
	}
}

// sameHolders says whether each bucket has the same member.
func sameHolders(a, b []rtnl.Bucket) bool {
	for i := range a {
		if i >= len(b) || a[i].Nexthop != b[i].Nexthop {
			return false
		}
	}
	return len(a) == len(b)
}

// Objects that others have destroyed are made again, and those of others are left alone.
func TestDrift(t *testing.T) {
	s := newSpace(t)
	want := s.set(dataplane.IPv4, map[int]int{0: 1, 1: 1})
	s.IP(t, "nexthop", "add", "id", "7", "dev", "l2", "proto", "30")
	s.IP(t, "nexthop", "add", "id", fmt.Sprint(dataplane.FirstNexthop+0x200), "dev", "l2", "proto", "99")
	foreign := s.IP(t, "nexthop")
	if missing, err := s.Missing(t.Context(), want); err != nil || len(missing.Nexthops) != 2 || len(missing.Groups) != 1 {
		t.Errorf("of what isn't there %v are missing, %v", missing, err)
	}
	s.ensure(want, dataplane.Result{Added: 3})
	if groups := testkit.Must(s.Groups(t.Context()))(t); len(groups) != 1 || !groups[0].Equal(want.Groups[0]) {
		t.Errorf("groups are %v", groups)
	}
	if missing, err := s.Missing(t.Context(), want); err != nil || len(missing.Nexthops)+len(missing.Groups) > 0 {
		t.Errorf("of what is there %v are missing, %v", missing, err)
	}
	s.IP(t, "nexthop", "del", "id", fmt.Sprint(want.Nexthops[0].ID))
	if missing, err := s.Missing(t.Context(), want); err != nil || len(missing.Nexthops) != 1 || len(missing.Groups) != 1 {
		t.Errorf("of a group without a member %v are missing, %v", missing, err)
	}
	s.ensure(want, dataplane.Result{Added: 1, Replaced: 1})
	s.IP(t, "nexthop", "replace", "id", fmt.Sprint(want.Nexthops[0].ID), "dev", "l2", "proto", "30")
	s.ensure(want, dataplane.Result{Replaced: 1})
	s.IP(t, "nexthop", "replace", "id", fmt.Sprint(want.Groups[0].ID), "group", fmt.Sprint(want.Nexthops[0].ID), "type", "resilient", "buckets", "64", "proto", "30")
	s.ensure(want, dataplane.Result{Replaced: 1})
	s.IP(t, "link", "set", "l1", "down") // which takes what is by it away
	s.IP(t, "link", "set", "l1", "up")
	s.ensure(want, dataplane.Result{Added: 1, Replaced: 1})
	more := want
	more.Groups = []dataplane.NexthopGroup{want.Groups[0]}
	more.Groups[0].Buckets = 128
	s.ensure(more, dataplane.Result{}) // as an earlier version has made it

	taken := s.set(dataplane.IPv4, map[int]int{0: 1})
	taken.Nexthops[0].ID = dataplane.FirstNexthop + 0x200
	if _, err := s.Missing(t.Context(), nexthop.Set{Nexthops: taken.Nexthops}); !errors.Is(err, rtnl.ErrExist) {
		t.Errorf("Missing of another's ID: %v", err)
	}
	if _, err := s.Ensure(t.Context(), nexthop.Set{Nexthops: taken.Nexthops}); !errors.Is(err, rtnl.ErrExist) || !strings.Contains(err.Error(), "protocol 99") {
		t.Errorf("another's ID: %v", err)
	}
	testkit.Must(s.Sync(t.Context(), nexthop.Set{}))(t)
	if out := s.IP(t, "nexthop"); out != foreign {
		t.Errorf("others' objects are\n%s, were\n%s", out, foreign)
	}
}
