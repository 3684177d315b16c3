package client

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// clientAddrs are those of a client and of peers, of the families "4", "6" and "46".
func clientAddrs(families, ipv4, ipv6 string) ipam.Address {
	var a ipam.Address
	if strings.Contains(families, "4") {
		a.IPv4 = netip.MustParseAddr(ipv4)
	}
	if strings.Contains(families, "6") {
		a.IPv6 = netip.MustParseAddr(ipv6)
	}
	return a
}

// egressOf is an Egress with peers of families, to the nth Service.
func egressOf(name, families string, n int, destinations ...string) Egress {
	return Egress{
		Name: name, Destinations: prefixes.Valid(destinations),
		Peers: clientAddrs(families, fmt.Sprintf("10.96.0.%d", n), fmt.Sprintf("fd96::%d", n)),
	}
}

func clientOfFamilies(families string, egresses ...Egress) Client {
	return Client{
		Address: clientAddrs(families, "10.1.0.5", "fd01::5"), Link: "eth0", MTU: 1500, Port: 5555, Protocol: 30, Egresses: egresses,
	}
}

// lines prints a state, routes without their protocol, one thing a line.
func lines(s State) []string {
	var all []string
	for _, t := range s.Tunnels {
		all = append(all, t.String())
	}
	for _, r := range s.Routes {
		text := strings.ReplaceAll(r.String(), " proto 30", "")
		if r.Peer.IsValid() {
			text += " by " + r.Peer.String()
		}
		if r.Sink {
			text = "lose " + strings.ReplaceAll(text, fmt.Sprint(" metric ", uint32(dataplane.MetricSink)), "")
		}
		all = append(all, strings.ReplaceAll(text, fmt.Sprint(" metric ", uint32(dataplane.MetricUnreachable)), ""))
	}
	for _, c := range s.Conflicts {
		all = append(all, fmt.Sprintf("conflict about %s: %s, not %s", c.Dst, c.Winner, c.Loser))
	}
	if s.Filter != nil && s.Filter.Sources != nil {
		all = append(all, fmt.Sprintf("mark from %s", s.Filter.Sources))
	}
	return all
}

const (
	tunnel1v4 = "fou 10.1.0.5 -> 10.96.0.1 sport 5555 dport 5555 mtu 1472"
	tunnel1v6 = "fou fd01::5 -> fd96::1 sport 5555 dport 5555 mtu 1452"
	throw1v4n = "throw 10.96.0.1/32 table 117"
	throw1v4w = "throw 10.96.0.1/32 table 118"
	throw1v6n = "throw fd96::1/128 table 117"
	throw1v6w = "throw fd96::1/128 table 118"
)

func TestClientState(t *testing.T) {
	change := func(e Egress, f func(*Egress)) Egress { f(&e); return e }
	for _, c := range []struct {
		name   string
		client Client
		want   []string
	}{
		{"no Egress", clientOfFamilies("46"), nil},
		{"IPv4", clientOfFamilies("4", egressOf("a/a", "46", 1, "192.0.2.0/24", "10.200.0.0/16", "2001:db8::/32")), []string{
			tunnel1v4,
			throw1v4n, "10.200.0.0/16 src 10.1.0.5 table 117 by 10.96.0.1", "unreachable 10.200.0.0/16 table 117",
			throw1v4w, "192.0.2.0/24 src 10.1.0.5 table 118 by 10.96.0.1", "unreachable 192.0.2.0/24 table 118",
		}},
		{"IPv6", clientOfFamilies("6", egressOf("a/a", "46", 1, "192.0.2.0/24", "fd20::/32", "2001:db8::/32")), []string{
			tunnel1v6,
			"fd20::/32 src fd01::5 table 117 by fd96::1", "unreachable fd20::/32 table 117", throw1v6n,
			"2001:db8::/32 src fd01::5 table 118 by fd96::1", "unreachable 2001:db8::/32 table 118", throw1v6w,
		}},
		{"dual, all destinations", clientOfFamilies("46", egressOf("a/a", "46", 1, "0.0.0.0/0", "::/0")), []string{
			tunnel1v4, tunnel1v6,
			throw1v4n, throw1v6n,
			"0.0.0.0/0 src 10.1.0.5 table 118 by 10.96.0.1", "unreachable 0.0.0.0/0 table 118", throw1v4w,
			"::/0 src fd01::5 table 118 by fd96::1", "unreachable ::/0 table 118", throw1v6w,
		}},
		{"two, the longer prefix wins by itself", clientOfFamilies("4", egressOf("a/a", "4", 1, "192.0.2.0/24"), egressOf("b/b", "4", 2, "192.0.2.128/25")), []string{
			tunnel1v4, strings.ReplaceAll(tunnel1v4, "0.1 ", "0.2 "),
			throw1v4n, strings.ReplaceAll(throw1v4n, "0.1/", "0.2/"), throw1v4w, strings.ReplaceAll(throw1v4w, "0.1/", "0.2/"),
			"192.0.2.0/24 src 10.1.0.5 table 118 by 10.96.0.1", "unreachable 192.0.2.0/24 table 118",
			"192.0.2.128/25 src 10.1.0.5 table 118 by 10.96.0.2", "unreachable 192.0.2.128/25 table 118",
		}},
		{"three, one prefix of two", clientOfFamilies("4", egressOf("c/c", "4", 1, "192.0.2.0/24"), egressOf("b/b", "", 2, "192.0.2.0/24"), egressOf("a/a", "4", 1, "198.51.100.0/24")), []string{
			tunnel1v4,
			throw1v4n, throw1v4w,
			// The first has it, though it has no routers now.
			"unreachable 192.0.2.0/24 table 118",
			"198.51.100.0/24 src 10.1.0.5 table 118 by 10.96.0.1", "unreachable 198.51.100.0/24 table 118",
			"conflict about 192.0.2.0/24: b/b, not c/c",
		}},
		{"one Egress twice", clientOfFamilies("4", egressOf("a/a", "4", 1, "192.0.2.0/24"), egressOf("a/a", "4", 1, "192.0.2.0/24")), []string{
			tunnel1v4, throw1v4n, throw1v4w, "192.0.2.0/24 src 10.1.0.5 table 118 by 10.96.0.1", "unreachable 192.0.2.0/24 table 118",
		}},
		{"no Service", clientOfFamilies("46", egressOf("a/a", "", 1, "192.0.2.0/24", "2001:db8::/32")), []string{
			"unreachable 192.0.2.0/24 table 118", "unreachable 2001:db8::/32 table 118",
		}},
		{"Service without a family of the client", clientOfFamilies("46", egressOf("a/a", "4", 1, "192.0.2.0/24", "2001:db8::/32")), []string{
			tunnel1v4, throw1v4n, throw1v4w, "192.0.2.0/24 src 10.1.0.5 table 118 by 10.96.0.1", "unreachable 192.0.2.0/24 table 118",
			"unreachable 2001:db8::/32 table 118",
		}},
		{"source port chosen by the kernel", clientOfFamilies("4", change(egressOf("a/a", "4", 1, "192.0.2.0/24"), func(e *Egress) { e.SourcePortAuto = true })), []string{
			strings.Replace(tunnel1v4, "sport 5555", "sport auto", 1), throw1v4n, throw1v4w,
			"192.0.2.0/24 src 10.1.0.5 table 118 by 10.96.0.1", "unreachable 192.0.2.0/24 table 118",
		}},
		{"host bits, link-local and repeated destinations", clientOfFamilies("4", Egress{
			Name: "a/a", Destinations: []netip.Prefix{netip.MustParsePrefix("192.0.2.7/24"), netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("169.254.169.254/32")},
		}), []string{"unreachable 192.0.2.0/24 table 118"}},
		{"in-cluster ranges", clientOfFamilies("46", change(egressOf("a/a", "46", 1, "0.0.0.0/0", "::/0", "100.64.3.0/24", "100.64.0.0/10"), func(e *Egress) {
			// Private ones are spared by rules.
			e.InCluster = prefixes.Valid([]string{"100.64.0.0/16", "10.0.0.0/8", "fd00::/8", "2001:db8:1::/48", "0.0.0.0/0"})
		})), []string{
			tunnel1v4, tunnel1v6,
			throw1v4n, "throw 100.64.0.0/16 table 117", "throw 2001:db8:1::/48 table 117", throw1v6n,
			"0.0.0.0/0 src 10.1.0.5 table 118 by 10.96.0.1", "unreachable 0.0.0.0/0 table 118", throw1v4w,
			"100.64.0.0/10 src 10.1.0.5 table 118 by 10.96.0.1", "unreachable 100.64.0.0/10 table 118", "throw 100.64.0.0/16 table 118",
			"::/0 src fd01::5 table 118 by fd96::1", "unreachable ::/0 table 118", "throw 2001:db8:1::/48 table 118", throw1v6w,
		}},
		{"in-cluster ranges inside private destinations", clientOfFamilies("46", change(egressOf("a/a", "", 1, "10.0.0.0/8", "10.100.3.0/24", "10.64.0.0/16", "fd00::/8"), func(e *Egress) {
			e.InCluster = prefixes.Valid([]string{"10.100.0.0/16", "10.64.0.0/16", "10.2.0.7/32", "172.20.0.0/16", "fd02::/64", "fc02::/64"})
		})), []string{
			"unreachable 10.0.0.0/8 table 117", "throw 10.2.0.7/32 table 117", "throw 10.64.0.0/16 table 117", "throw 10.100.0.0/16 table 117",
			"unreachable 10.100.3.0/24 table 117", "unreachable fd00::/8 table 117", "throw fd02::/64 table 117",
			"throw 10.2.0.7/32 table 118", "throw 10.64.0.0/16 table 118", "throw 10.100.0.0/16 table 118", "throw fd02::/64 table 118",
		}},
		{"a destination that is a peer", clientOfFamilies("4", egressOf("a/a", "4", 1, "10.96.0.1/32", "10.96.0.0/16")), []string{
			tunnel1v4, "10.96.0.0/16 src 10.1.0.5 table 117 by 10.96.0.1", "unreachable 10.96.0.0/16 table 117", throw1v4n, throw1v4w,
		}},
		{"originating only, less what another Egress has", clientOfFamilies("46",
			change(egressOf("a/a", "", 1, "192.0.2.0/24", "2001:db8::/126"), func(e *Egress) { e.OriginatingOnly = true }),
			egressOf("b/b", "", 2, "192.0.2.64/26", "2001:db8::1/128"),
			change(egressOf("c/c", "", 2, "192.0.2.96/27"), func(e *Egress) { e.OriginatingOnly = true }),
		), []string{
			"lose 192.0.2.0/24 src 10.1.0.5 table 118", "unreachable 192.0.2.0/24 table 118", "unreachable 192.0.2.64/26 table 118",
			"lose 192.0.2.96/27 src 10.1.0.5 table 118", "unreachable 192.0.2.96/27 table 118",
			"lose 2001:db8::/126 src fd01::5 table 118", "unreachable 2001:db8::/126 table 118", "unreachable 2001:db8::1/128 table 118",
			"mark from [192.0.2.0-192.0.2.63 192.0.2.96-192.0.2.255 2001:db8::-2001:db8:: 2001:db8::2-2001:db8::3]",
		}},
		{"originating only, with a router", clientOfFamilies("4", change(egressOf("a/a", "4", 1, "192.0.2.0/24"), func(e *Egress) { e.OriginatingOnly = true })), []string{
			tunnel1v4, throw1v4n, throw1v4w,
			"192.0.2.0/24 src 10.1.0.5 table 118 by 10.96.0.1", "lose 192.0.2.0/24 src 10.1.0.5 table 118", "unreachable 192.0.2.0/24 table 118",
			"mark from [192.0.2.0-192.0.2.255]",
		}},
		{"two without a name, of which only the kernel told", clientOfFamilies("4", egressOf("", "", 1, "192.0.2.0/24"),
			change(egressOf("", "", 1, "198.51.100.0/24"), func(e *Egress) { e.OriginatingOnly = true })), []string{
			"unreachable 192.0.2.0/24 table 118", "lose 198.51.100.0/24 src 10.1.0.5 table 118", "unreachable 198.51.100.0/24 table 118",
			"mark from [198.51.100.0-198.51.100.255]",
		}},
		{"originating only in a family that the client hasn't", clientOfFamilies("4",
			change(egressOf("a/a", "", 1, "2001:db8::/126"), func(e *Egress) { e.OriginatingOnly = true })), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if d := cmp.Diff(c.want, lines(StateOf(c.client))); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

func TestClientRules(t *testing.T) {
	marked := egressOf("a/a", "46", 1, "0.0.0.0/0", "::/0")
	marked.OriginatingOnly = true
	for _, c := range []struct {
		name   string
		client Client
		want   []string
	}{
		{"none", clientOfFamilies("46"), nil},
		{"IPv4", clientOfFamilies("4", egressOf("a/a", "46", 1, "0.0.0.0/0", "::/0")), []string{
			"1800: from all to 169.254.0.0/16 lookup 254 proto 30 (IPv4)",
			"1900: from all lookup 117 proto 30 (IPv4)",
			"2000: from all to 192.168.0.0/16 lookup 254 proto 30 (IPv4)",
			"2001: from all to 172.16.0.0/12 lookup 254 proto 30 (IPv4)",
			"2002: from all to 10.0.0.0/8 lookup 254 proto 30 (IPv4)",
			"2100: from all lookup 118 proto 30 (IPv4)",
		}},
		{"IPv6, originating only", clientOfFamilies("6", marked), []string{
			"1700: from all fwmark 0x100000/0x100000 lookup 254 proto 30 (IPv6)",
			"1800: from all to fe80::/10 lookup 254 proto 30 (IPv6)",
			"1900: from all lookup 117 proto 30 (IPv6)",
			"2000: from all to fc00::/7 lookup 254 proto 30 (IPv6)",
			"2100: from all lookup 118 proto 30 (IPv6)",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			for _, r := range StateOf(c.client).Rules {
				got = append(got, r.String())
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
	if n := len(StateOf(clientOfFamilies("46", marked)).Rules); n != 12 {
		t.Errorf("%d rules in two families", n)
	}
}

// Each number of Egresses in each pair of families: what is captured is unreachable as long as
// its tunnel isn't there, and nothing else is.
func TestClientMatrix(t *testing.T) {
	destinations := [][]string{
		{"0.0.0.0/0", "::/0", "172.20.0.0/16", "fd20::/64"},
		{"198.51.100.0/24", "2001:db8::/32"},
		{"198.51.100.128/25", "10.0.0.0/8", "2001:db8:ffff::/48"},
	}
	for _, families := range []string{"4", "6", "46"} {
		for _, peers := range []string{"", "4", "6", "46"} {
			for n := range 4 {
				var egresses []Egress
				for i := range n {
					egresses = append(egresses, egressOf(fmt.Sprintf("ns/%d", i), peers, i+1, destinations[i]...))
				}
				c := clientOfFamilies(families, egresses...)
				s := StateOf(c)
				links := map[netip.Addr]int{}
				for i, tunnel := range s.Tunnels {
					links[tunnel.Remote] = 10 + i
				}
				open, closed := s.By(links, nil), s.Closed(nil)
				if want := n * min(len(peers), 2); families == "46" && len(s.Tunnels) != want {
					t.Errorf("%s, %s, %d: %d tunnels", families, peers, n, len(s.Tunnels))
				}
				captured := 0
				for _, r := range open {
					if r.Type != dataplane.Unicast {
						continue
					}
					captured++
					if r.Link == 0 || r.Source != c.Address.IPv4 && r.Source != c.Address.IPv6 {
						t.Errorf("%s: no link, or another's address", r)
					}
					if !slices.ContainsFunc(closed, func(u dataplane.Route) bool {
						return u.Type == dataplane.Unreachable && u.Dst == r.Dst && u.Table == r.Table && u.Metric == dataplane.MetricUnreachable
					}) {
						t.Errorf("%s: nothing closes it", r)
					}
					if narrow := prefixes.Within(r.Dst, dataplane.PrivateRanges); narrow != (r.Table == dataplane.TableNarrow) {
						t.Errorf("%s: in the wrong table", r)
					}
				}
				if len(open)-len(closed) != captured {
					t.Errorf("%s, %s, %d: %d routes, %d without tunnels, %d captured", families, peers, n, len(open), len(closed), captured)
				}
				if one := len(links) > 0; one {
					// One tunnel that is missing closes its destinations only.
					lost := s.Tunnels[0].Remote
					delete(links, lost)
					for _, r := range s.Routes {
						has := slices.ContainsFunc(s.By(links, nil), func(o dataplane.Route) bool {
							return o.Table == r.Table && o.Dst == r.Dst && o.Metric == r.Metric && o.Type == r.Type
						})
						if has != (r.Peer != lost) {
							t.Errorf("%s by %s: there is %t without the tunnel to %s", r, r.Peer, has, lost)
						}
					}
				}
			}
		}
	}
}

// Routers answer to the port that they are sent to, from the same: what is on the way takes
// both directions for one connection.
func TestClientSendsFromThePortOfFoU(t *testing.T) {
	c := clientOfFamilies("4", egressOf("a/a", "4", 1, "192.0.2.0/24"))
	c.Port = 6000
	if got := StateOf(c).Tunnels[0]; got.SourcePort != 6000 || got.Port != 6000 {
		t.Errorf("got %s", got)
	}
}
