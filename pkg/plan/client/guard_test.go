package client

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
)

// A node keeps what the client's own ruleset keeps.
func TestClientGuard(t *testing.T) {
	marked := egressOf("a/a", "46", 1, "192.0.2.0/24", "2001:db8::/32")
	marked.OriginatingOnly = true
	s := StateOf(clientOfFamilies("46", marked, egressOf("b/b", "46", 2, "192.0.2.128/25", "198.51.100.0/24")))
	g := s.Guard()
	if d := cmp.Diff(s.Filter.Destinations, g.Destinations, cmp.Comparer(func(a, b netipx.IPRange) bool { return a == b })); d != "" {
		t.Errorf("destinations (-of the client +of the node):\n%s", d)
	}
	if got, want := fmt.Sprint(g.Replies), "[192.0.2.0-192.0.2.127 2001:db8::-2001:db8:ffff:ffff:ffff:ffff:ffff:ffff]"; got != want {
		t.Errorf("answers pass to %s, want %s", got, want)
	}
	if g := (State{}).Guard(); len(g.Destinations)+len(g.Replies) > 0 {
		t.Errorf("without Egresses: %+v", g)
	}
}

// passes says whether a guard lets a packet through.
func passes(g dataplane.ClientGuard, to netip.Addr, reply bool) bool {
	in := func(ranges []netipx.IPRange) bool {
		return slices.ContainsFunc(ranges, func(r netipx.IPRange) bool {
			return r.From().BitLen() == to.BitLen() && !to.Less(r.From()) && !r.To().Less(to)
		})
	}
	return !in(g.Destinations) || reply && in(g.Replies)
}

// While a client changes, the packets of before and those of after pass, and no others. An answer may be
// one of either only where a guard lets answers through.
func TestWidenAndNarrowGuard(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	ranges := func() []netipx.IPRange {
		var out []netipx.IPRange
		next := 0
		for range random.IntN(4) {
			next += 1 + random.IntN(10)
			last := next + random.IntN(20)
			out = append(out, netipx.IPRangeFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(next)}), netip.AddrFrom4([4]byte{192, 0, 2, byte(last)})))
			next = last + 1
		}
		return out
	}
	for round := range 2000 {
		from, to := dataplane.ClientGuard{Destinations: ranges(), Replies: ranges()}, dataplane.ClientGuard{Destinations: ranges(), Replies: ranges()}
		both, err := WidenGuard(from, to)
		if err != nil {
			t.Fatal(err)
		}
		neither, err := NarrowGuard(from, to)
		if err != nil {
			t.Fatal(err)
		}
		for host := range 128 {
			a := netip.AddrFrom4([4]byte{192, 0, 2, byte(host)})
			if got, want := passes(both, a, false), passes(from, a, false) || passes(to, a, false); got != want {
				t.Fatalf("round %d: from %v to %v: %v lets a packet to %s through: %t", round, from, to, both, a, got)
			}
			if (passes(from, a, true) || passes(to, a, true)) && !passes(both, a, true) {
				t.Fatalf("round %d: from %v to %v: %v loses an answer to %s", round, from, to, both, a)
			}
			for _, answer := range []bool{false, true} {
				if got, want := passes(neither, a, answer), passes(from, a, answer) && passes(to, a, answer); got != want {
					t.Fatalf("round %d: of %v and %v: %v lets a packet to %s (an answer: %t) through: %t", round, from, to, neither, a, answer, got)
				}
			}
		}
	}
}
