package client

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

func TestClientFilter(t *testing.T) {
	change := func(e Egress, f func(*Egress)) Egress { f(&e); return e }
	for _, c := range []struct {
		name         string
		client       Client
		destinations []string
		peers        string
	}{
		{"one destination of each family", clientOfFamilies("46", egressOf("a/a", "46", 1, "192.0.2.0/24", "2001:db8::/32")),
			[]string{"192.0.2.0-192.0.2.255", "2001:db8::-2001:db8:ffff:ffff:ffff:ffff:ffff:ffff"}, "[10.96.0.1 fd96::1]"},
		{"without a Service the same is closed", clientOfFamilies("4", egressOf("a/a", "", 1, "192.0.2.0/24", "192.0.3.0/24")), []string{"192.0.2.0-192.0.3.255"}, "[]"},
		{"a family in which no address is known is closed", clientOfFamilies("4", change(egressOf("a/a", "46", 1, "192.0.2.0/24", "2001:db8::/32"), func(e *Egress) {
			e.InCluster = prefixes.Valid([]string{"2001:db8:ffff::/48"})
		})), []string{"192.0.2.0-192.0.2.255", "2001:db8::-2001:db8:fffe:ffff:ffff:ffff:ffff:ffff"}, "[10.96.0.1 fd96::1]"},
		{"everything", clientOfFamilies("46", change(egressOf("a/a", "46", 1, "0.0.0.0/0", "::/0", "10.200.0.0/16"), func(e *Egress) {
			e.InCluster = prefixes.Valid([]string{"100.64.0.0/16", "2001:db8:1::/48"})
		})), []string{
			"0.0.0.0-9.255.255.255", "10.200.0.0-10.200.255.255", "11.0.0.0-100.63.255.255", "100.65.0.0-169.253.255.255",
			"169.255.0.0-172.15.255.255", "172.32.0.0-192.167.255.255", "192.169.0.0-223.255.255.255", "240.0.0.0-255.255.255.254",
			"::-2001:db8:0:ffff:ffff:ffff:ffff:ffff", "2001:db8:2::-fbff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
			"fe00::-fe7f:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fec0::-feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
		}, "[10.96.0.1 fd96::1]"},
		{"a Service inside of a destination", clientOfFamilies("4", egressOf("a/a", "4", 1, "10.96.0.0/24")),
			[]string{"10.96.0.0-10.96.0.0", "10.96.0.2-10.96.0.255"}, "[10.96.0.1]"},
		{"routers in whatever state, and those that left", clientOfFamilies("4", change(egressOf("a/a", "4", 1, "192.0.2.0/24"), func(e *Egress) {
			e.Routers = []Router{{Addr: netip.MustParseAddr("10.1.0.9"), State: RouterDead}, {Addr: netip.MustParseAddr("10.1.0.8"), State: RouterDraining}, {Addr: netip.MustParseAddr("10.1.0.7"), State: RouterLive}}
			e.Left = []netip.Addr{netip.MustParseAddr("10.1.0.6"), netip.MustParseAddr("10.1.0.9")}
		})), []string{"192.0.2.0-192.0.2.255"}, "[10.1.0.6 10.1.0.7 10.1.0.8 10.1.0.9 10.96.0.1]"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.client.Index = 7
			f := StateOf(c.client).Filter
			var got []string
			for _, r := range f.Destinations {
				got = append(got, r.String())
			}
			if d := cmp.Diff(c.destinations, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			if got := fmt.Sprint(f.Peers); got != c.peers || f.Uplink != 7 || f.Port != 5555 || !slices.Equal(f.Addresses, c.client.Address.Addrs()) || f.Sources != nil {
				t.Errorf("peers are %s, want %s, of %+v", got, c.peers, f)
			}
		})
	}
	if s := StateOf(clientOfFamilies("46")); s.Filter != nil {
		t.Errorf("without Egresses there is %+v", s.Filter)
	}
}

// The filter is for those addresses that the kernel finds in the tables of Egresses, where no multicast is.
func TestClientFilterIsTheRoutes(t *testing.T) {
	everything := egressOf("a/a", "46", 1, "0.0.0.0/0", "::/0", "172.20.0.0/16", "fd20::/64", "100.64.7.0/24", "10.96.0.0/16")
	everything.InCluster = prefixes.Valid([]string{"100.64.0.0/16", "2001:db8:1::/48", "172.20.5.0/24", "192.0.2.0/25"})
	some := egressOf("b/b", "46", 2, "192.0.2.0/24", "2001:db8::/32", "2001:db8:1:1::/64", "10.0.0.0/8", "128.0.0.0/1", "198.51.100.7/32", "169.254.0.0/17")
	for _, egresses := range [][]Egress{{everything}, {some}, {everything, some}} {
		mustFilterRoutes(t, StateOf(clientOfFamilies("46", egresses...)))
	}
}

// Whatever destinations two Egresses have, and whatever is in the cluster, no address that the routes capture is left out
// by the filter, and no other one is in it.
func FuzzFilter(f *testing.F) {
	f.Add("0.0.0.0/0 ::/0 172.20.0.0/16 fd20::/64", "192.0.2.0/24 128.0.0.0/1 169.254.0.0/17", "100.64.0.0/16 172.20.5.0/24 192.0.2.0/25", false)
	f.Add("10.0.0.0/8 10.0.0.0/8", "10.0.0.0/8 10.0.0.0/9", "10.0.0.0/8 0.0.0.0/0", true)
	f.Add("255.255.255.255/32 224.0.0.0/3 ff00::/7", "fe80::/10 169.254.0.0/16", "ffff::/16 10.96.0.1/32", true)
	f.Add("::ffff:10.0.0.0/104 ::/96", "::ffff:0:0/96", "::/1 8000::/1", false)
	f.Fuzz(func(t *testing.T, destinations, others, inCluster string, direct bool) {
		const most = 20 // each costs the square of all
		texts := [...][]string{strings.Fields(destinations), strings.Fields(others), strings.Fields(inCluster)}
		for i := range texts {
			texts[i] = texts[i][:min(len(texts[i]), most)]
		}
		a, b := egressOf("a/a", "46", 1, texts[0]...), egressOf("b/b", "46", 2, texts[1]...)
		a.InCluster, b.OriginatingOnly = prefixes.Valid(texts[2]), true
		if direct {
			b.Direct, b.Routers = true, []Router{{Addr: netip.MustParseAddr("10.1.1.1"), State: RouterLive}}
		}
		s := StateOf(clientOfFamilies("46", a, b))
		mustFilterRoutes(t, s)
		// With no tunnel at all, the same addresses are captured: they are unreachable, or packets there get lost.
		closed := s
		closed.Routes = nil
		for _, r := range s.Closed(map[dataplane.Family]int{dataplane.IPv4: 8, dataplane.IPv6: 9}) {
			closed.Routes = append(closed.Routes, Route{Route: r})
		}
		mustFilterRoutes(t, closed)
	})
}

// mustFilterRoutes fails the test unless the filter is for those addresses that the routes capture.
func mustFilterRoutes(t *testing.T, s State) {
	t.Helper()
	for i, r := range s.Filter.Destinations {
		if r.To().Less(r.From()) || i > 0 && !s.Filter.Destinations[i-1].To().Less(r.From()) {
			t.Errorf("%s isn't behind the one before", r)
		}
	}
	var edges []netip.Addr
	for _, p := range slices.Concat(dstsOf(s.Routes), dataplane.PrivateRanges, dataplane.LinkLocalRanges) {
		edges = append(edges, p.Addr().Prev(), p.Addr(), netipx.PrefixLastIP(p), netipx.PrefixLastIP(p).Next())
	}
	for _, a := range edges {
		if !a.IsValid() || prefixes.Within(netip.PrefixFrom(a, a.BitLen()), unrouted) {
			continue
		}
		in := slices.ContainsFunc(s.Filter.Destinations, func(r netipx.IPRange) bool {
			return a.BitLen() == r.From().BitLen() && r.From().Compare(a) <= 0 && a.Compare(r.To()) <= 0
		})
		if want := s.captures(a); in != want {
			t.Errorf("%s is in the filter: %t", a, in)
		}
	}
}

func dstsOf(routes []Route) (all []netip.Prefix) {
	for _, r := range routes {
		all = append(all, r.Dst)
	}
	return all
}

// captures does what the kernel does with the rules, one after the other.
func (s State) captures(a netip.Addr) bool {
	for _, rule := range s.Rules {
		switch {
		case rule.Mask != 0: // is for answers of connections that come in
		case rule.Family != dataplane.FamilyOf(a) || rule.To.IsValid() && !rule.To.Contains(a):
		case rule.Table == dataplane.TableMain:
			return false
		default:
			var best Route
			for _, r := range s.Routes {
				if r.Table == rule.Table && r.Dst.Contains(a) && (!best.Dst.IsValid() || r.Dst.Bits() > best.Dst.Bits()) {
					best = r
				}
			}
			if best.Dst.IsValid() && best.Type != dataplane.Throw {
				return true
			}
		}
	}
	return false
}
