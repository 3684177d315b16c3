package podnet_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// fate is what becomes of a frame.
type fate int

const (
	passes  fate = iota
	dropped      // by the guard
	unheard      // by the kernel, with and without the guard: no hook of IP sees it
)

// guardCase is a frame that a pod sends. Without a frame it is that of the packet.
type guardCase struct {
	name string
	packet
	tags []tag
	kind uint16 // EtherType; 0 is the packet's
	fate fate
}

var (
	ownAddrs   = addressOf(1, true, true)
	otherAddrs = addressOf(2, true, true)
	outside4   = netip.MustParseAddr("203.0.113.1")
	outside6   = netip.MustParseAddr("2001:db8:9::1")
	linkLocal6 = netip.MustParseAddr("fe80::99")
)

// guardCases are frames of a pod that has ownAddrs.
func guardCases() []guardCase {
	addr := netip.MustParseAddr
	udp := func(src, dst netip.Addr) packet {
		return packet{src: src, dst: dst, proto: unix.IPPROTO_UDP, payload: []byte{16, 0, 16, 0, 0, 12, 0, 0, 'c', 'o', 'i', 'l'}}
	}
	own4, own6 := udp(ownAddrs.IPv4, otherAddrs.IPv4), udp(ownAddrs.IPv6, otherAddrs.IPv6)
	with := func(p packet, change func(*packet)) packet {
		change(&p)
		return p
	}
	from := func(a string) packet {
		if src := addr(a); src.Is4() {
			return udp(src, otherAddrs.IPv4)
		}
		return udp(addr(a), otherAddrs.IPv6)
	}
	forged4, forged6 := udp(addressOf(3, true, false).IPv4, otherAddrs.IPv4), udp(addressOf(3, false, true).IPv6, otherAddrs.IPv6)
	options := func(o ...byte) func(*packet) { return func(p *packet) { p.options = o } }
	header := func(kind byte, h ...byte) func(*packet) { // of IPv6; the first byte is what follows
		return func(p *packet) {
			p.payload = slices.Concat([]byte{p.proto}, h, p.payload)
			p.proto = kind
		}
	}
	fragment := func(f uint16) func(*packet) { return func(p *packet) { p.fragment = f } }
	inside := func(proto byte, inner packet) func(*packet) {
		return func(p *packet) { p.proto, p.payload = proto, inner.bytes(0xffff) }
	}
	// An error of ICMP about a packet that came from another pod.
	failure := func(kind, code byte) func(*packet) {
		return func(p *packet) {
			about := packet{src: p.dst, dst: p.src, proto: unix.IPPROTO_UDP, payload: make([]byte, 8)}
			p.proto = unix.IPPROTO_ICMP
			if p.src.Is6() {
				p.proto = unix.IPPROTO_ICMPV6
			}
			p.payload = append([]byte{kind, code, 0, 0, 0, 0, 5, 0}, about.bytes(0)...)
		}
	}
	routerAlert6 := header(unix.IPPROTO_HOPOPTS, 0, 5, 2, 0, 0, 1, 0)
	report := func(src string) packet { // of version 2 of MLD, with no record
		p := packet{src: addr(src), dst: addr("ff02::16"), proto: unix.IPPROTO_ICMPV6, payload: []byte{143, 0, 0, 0, 0, 0, 0, 0}}
		return with(p, routerAlert6)
	}
	homeAddress := header(unix.IPPROTO_DSTOPTS, slices.Concat([]byte{2, 1, 2, 0, 0, 0xc9, 16}, outside6.AsSlice())...)
	routing := header(unix.IPPROTO_ROUTING, slices.Concat([]byte{2, 0, 1, 0, 0, 0, 0}, outside6.AsSlice())...)
	unspecified6 := netip.IPv6Unspecified()
	return []guardCase{
		{name: "own, IPv4", packet: own4},
		{name: "own, IPv6", packet: own6},
		{name: "own, IPv4, to NodeLocal DNS", packet: udp(own4.src, addr("169.254.20.10"))},
		{name: "own, IPv4, first fragment", packet: with(own4, fragment(moreFragments))},
		{name: "own, IPv4, last fragment", packet: with(own4, fragment(100))},
		{name: "own, IPv6, first fragment", packet: with(own6, fragment(moreFragments))},
		{name: "own, IPv6, last fragment", packet: with(own6, fragment(100))},
		{name: "own, IPv4, fragmentation needed", packet: with(own4, failure(3, 4))},
		{name: "own, IPv4, port unreachable", packet: with(own4, failure(3, 3))},
		{name: "own, IPv6, packet too big", packet: with(own6, failure(2, 0))},
		{name: "own, IPv6, port unreachable", packet: with(own6, failure(1, 4))},
		{name: "own, IPv4, router alert", packet: with(own4, options(148, 4, 0, 0))},
		{name: "own, IPv6, hop-by-hop options", packet: with(own6, routerAlert6)},
		{name: "own, IPv4, priority tag", packet: own4, tags: []tag{{unix.ETH_P_8021Q, 0}}},
		{name: "own, IPv4, to all", packet: udp(own4.src, addr("255.255.255.255"))},
		{name: "own, IPv4, to a group", packet: udp(own4.src, addr("224.0.0.251"))},
		{name: "own, IPv6, to a group", packet: udp(own6.src, addr("ff02::fb"))},

		{name: "DHCP", packet: udp(netip.IPv4Unspecified(), addr("255.255.255.255"))},
		{name: "duplicate address detection", packet: neighbour(unspecified6, solicited(addr("fd64::4:4")), solicitation, 0, addr("fd64::4:4"))},
		{name: "MLD without an address", packet: report("::")},
		{name: "MLD", packet: report("fe80::99")},
		{name: "router solicitation", packet: packet{src: unspecified6, dst: addr("ff02::2"), proto: unix.IPPROTO_ICMPV6, payload: []byte{133, 0, 0, 0, 0, 0, 0, 0}}},
		{name: "neighbour solicitation", packet: neighbour(linkLocal6, solicited(podnet.Gateways.IPv6), solicitation, sourceMAC, podnet.Gateways.IPv6)},
		{name: "neighbour solicitation of the pod's address", packet: neighbour(own6.src, solicited(podnet.Gateways.IPv6), solicitation, sourceMAC, podnet.Gateways.IPv6)},
		{name: "neighbour advertisement", packet: neighbour(linkLocal6, addr("ff02::1"), advertisement, targetMAC, own6.src)},

		{name: "another pod, IPv4", packet: forged4, fate: dropped},
		{name: "another pod, IPv6", packet: forged6, fate: dropped},
		{name: "the one that it is sent to, IPv4", packet: udp(otherAddrs.IPv4, otherAddrs.IPv4), fate: dropped},
		{name: "the node, IPv4", packet: udp(nodeAddrs.IPv4, otherAddrs.IPv4), fate: dropped},
		{name: "the node, IPv6", packet: udp(nodeAddrs.IPv6, otherAddrs.IPv6), fate: dropped},
		{name: "outside, IPv4", packet: udp(outside4, otherAddrs.IPv4), fate: dropped},
		{name: "outside, IPv6", packet: udp(outside6, otherAddrs.IPv6), fate: dropped},
		{name: "the gateway, IPv4", packet: udp(podnet.Gateways.IPv4, otherAddrs.IPv4), fate: dropped},
		{name: "NodeLocal DNS", packet: from("169.254.20.10"), fate: dropped},
		{name: "link-local, IPv4", packet: from("169.254.7.7"), fate: dropped},
		{name: "loopback, IPv4", packet: from("127.0.0.1"), fate: dropped},
		{name: "the pool, IPv4, no pod's", packet: from("10.64.0.77"), fate: dropped},
		{name: "the pool, IPv6, no pod's", packet: from("fd64::77"), fate: dropped},
		{name: "a group, IPv4", packet: from("224.0.0.1"), fate: dropped},
		{name: "broadcast, IPv4", packet: from("255.255.255.255"), fate: dropped},
		{name: "network 0, IPv4", packet: from("0.0.0.1"), fate: dropped},
		{name: "class E, IPv4", packet: from("240.0.0.1"), fate: dropped},
		{name: "IPv4 in IPv6", packet: packet{src: netip.AddrFrom16(own4.src.As16()), dst: otherAddrs.IPv6, proto: unix.IPPROTO_UDP, payload: own6.payload}, fate: dropped},
		{name: "site-local, IPv6", packet: from("fec0::1"), fate: dropped},
		{name: "documentation, to the node, IPv6", packet: udp(outside6, nodeAddrs.IPv6), fate: dropped},
		{name: "forged, IPv4, to all", packet: udp(forged4.src, addr("255.255.255.255")), fate: dropped},
		{name: "forged, IPv4, to a group", packet: udp(forged4.src, addr("224.0.0.251")), fate: dropped},
		{name: "forged, IPv6, to a group", packet: udp(forged6.src, addr("ff02::fb")), fate: dropped},
		{name: "forged, IPv4, source route", packet: with(forged4, options(append(append([]byte{131, 7, 4}, ownAddrs.IPv4.AsSlice()...), 0)...)), fate: dropped},
		{name: "forged, IPv4, 40 bytes of options", packet: with(forged4, options(append([]byte{7, 39, 4}, make([]byte, 37)...)...)), fate: dropped},
		{name: "forged, IPv4, first fragment", packet: with(forged4, fragment(moreFragments)), fate: dropped},
		{name: "forged, IPv4, last fragment", packet: with(forged4, fragment(100)), fate: dropped},
		{name: "forged, IPv6, first fragment", packet: with(forged6, fragment(moreFragments)), fate: dropped},
		{name: "forged, IPv6, last fragment", packet: with(forged6, fragment(100)), fate: dropped},
		{name: "forged, IPv4, port unreachable", packet: with(forged4, failure(3, 3)), fate: dropped},
		{name: "forged, IPv6, packet too big", packet: with(forged6, failure(2, 0)), fate: dropped},
		{name: "forged, IPv6, hop-by-hop options", packet: with(forged6, routerAlert6), fate: dropped},
		{name: "forged, IPv6, destination options", packet: with(forged6, homeAddress), fate: dropped},
		{name: "forged, IPv6, routing header", packet: with(forged6, routing), fate: dropped},
		{name: "forged, IPv4, priority tag", packet: forged4, tags: []tag{{unix.ETH_P_8021Q, 0}}, fate: dropped},
		{name: "forged, IPv6, priority tag", packet: forged6, tags: []tag{{unix.ETH_P_8021Q, 0}}, fate: dropped},
		{name: "forged, IPv4, priority tag of 802.1ad", packet: forged4, tags: []tag{{unix.ETH_P_8021AD, 0}}, fate: dropped},
		{name: "forged, IPv4, two priority tags", packet: forged4, tags: []tag{{unix.ETH_P_8021AD, 0}, {unix.ETH_P_8021Q, 0}}, fate: dropped},
		{name: "forged neighbour solicitation", packet: neighbour(forged6.src, solicited(podnet.Gateways.IPv6), solicitation, sourceMAC, podnet.Gateways.IPv6), fate: dropped},
		{name: "forged neighbour advertisement", packet: neighbour(forged6.src, addr("ff02::1"), advertisement, targetMAC, forged6.src), fate: dropped},
		// The guard looks at the outer header: the inner one comes in by the tunnel's link, if the node has one.
		{name: "own, IPv4 in IPv4 of another", packet: with(own4, inside(unix.IPPROTO_IPIP, forged4))},
		{name: "own, IPv6 in IPv4 of another", packet: with(own4, inside(unix.IPPROTO_IPV6, forged6))},
		{name: "own, IPv4 in IPv6 of another", packet: with(own6, inside(unix.IPPROTO_IPIP, forged4))},
		{name: "own, home address of another", packet: with(own6, homeAddress)},
		{name: "own, source route by another", packet: with(own4, options(append(append([]byte{131, 7, 4}, outside4.AsSlice()...), 0)...))},

		{name: "loopback, IPv6", packet: from("::1"), fate: unheard},
		{name: "a group, IPv6", packet: from("ff02::1"), fate: unheard},
		{name: "a VLAN", packet: forged4, tags: []tag{{unix.ETH_P_8021Q, 5}}, fate: unheard},
		{name: "a VLAN of 802.1ad", packet: forged6, tags: []tag{{unix.ETH_P_8021AD, 5}}, fate: unheard},
		{name: "a VLAN in a VLAN", packet: forged4, tags: []tag{{unix.ETH_P_8021AD, 5}, {unix.ETH_P_8021Q, 6}}, fate: unheard},
		{name: "IPv4 as IPv6", packet: forged4, kind: unix.ETH_P_IPV6, fate: unheard},
		{name: "IPv6 as IPv4", packet: forged6, kind: unix.ETH_P_IP, fate: unheard},
		{name: "MPLS", packet: forged4, kind: unix.ETH_P_MPLS_UC, fate: unheard},
		{name: "PPPoE", packet: forged4, kind: unix.ETH_P_PPP_SES, fate: unheard},
		{name: "bridged Ethernet", packet: forged4, kind: unix.ETH_P_TEB, fate: unheard},
		{name: "reserved EtherType", packet: forged4, kind: 0xffff, fate: unheard},
	}
}

// frame is what is sent; mark is how it is recognised.
func (c guardCase) frame(mark int, host net.HardwareAddr) []byte {
	kind := c.packet.kind()
	if c.kind != 0 {
		kind = c.kind
	}
	return ethernet(c.hardware(host), kind, c.bytes(uint16(mark)), c.tags...)
}

// observer counts frames of the forger on the host's end of a link, and what of them is left behind the
// guard.
type observer struct{ host *netnstest.NS }

func newObserver(t *testing.T, host *netnstest.NS, link string, marks int) observer {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "add table netdev observer\nadd chain netdev observer arrived { type filter hook ingress device %s priority 0; }\n", link)
	fmt.Fprintf(&b, "add rule netdev observer arrived ether saddr %s counter comment \"mark 0\"\n", forger)
	fmt.Fprint(&b, "add table inet observer\nadd chain inet observer left { type filter hook prerouting priority mangle; }\n")
	for i := 1; i <= marks; i++ {
		for _, field := range []string{"ip id", "ip6 flowlabel"} {
			fmt.Fprintf(&b, "add rule inet observer left iifname %s %s %d counter comment \"mark %d\"\n", link, field, i, i)
		}
	}
	_ = testkit.Must(host.Run("sh", "-ec", "nft -f - <<'.'\n"+b.String()+".\n"))(t)
	return observer{host}
}

var counted = regexp.MustCompile(`counter packets (\d+) bytes \d+ comment "mark (\d+)"`)

// counts returns how often each mark was seen; 0 are all frames that arrived.
func (o observer) counts() (map[int]int, error) {
	out, err := o.host.Run("nft", "list", "ruleset")
	if err != nil {
		return nil, err
	}
	seen := map[int]int{}
	for _, m := range counted.FindAllStringSubmatch(out, -1) {
		packets, _ := strconv.Atoi(m[1])
		mark, _ := strconv.Atoi(m[2])
		seen[mark] += packets
	}
	return seen, nil
}

// The guard drops each frame that is from another than the pod and would be heard, however it is made,
// and no other; without the guard all of them are heard.
func TestGuardedFrames(t *testing.T) {
	cases := guardCases()
	for _, guard := range []bool{false, true} {
		t.Run(fmt.Sprintf("guard %t", guard), func(t *testing.T) {
			n := newGuarded(t, func(o *podnet.Options) { o.SourceGuard = guard })
			p1, pod1 := newPod(t, 1, true, true)
			p2, _ := newPod(t, 2, true, true)
			p3, _ := newPod(t, 3, true, true)
			a := n.mustAttach(t, p1)
			n.mustAttach(t, p2)
			n.mustAttach(t, p3)
			_ = testkit.Must(n.Guard(t.Context()))(t)
			o := newObserver(t, n.host, a.HostIfName, len(cases))
			mac := testkit.Must(net.ParseMAC(a.HostMAC))(t)
			drops := uint64(0)
			want := map[string]int{}
			var frames [][]byte
			for i, c := range cases {
				frames = append(frames, c.frame(i+1, mac))
				want[c.name] = 1
				if c.fate == unheard || guard && c.fate == dropped {
					want[c.name] = 0
				}
				if guard && c.fate == dropped {
					drops++
				}
			}
			inject(t, pod1, frames...)
			testkit.Eventually(t, 5*time.Second, "each frame arrives and has its fate", func() error {
				seen, err := o.counts()
				if err != nil {
					return err
				}
				if seen[0] != len(cases) {
					return fmt.Errorf("%d of %d frames arrived", seen[0], len(cases))
				}
				got := map[string]int{}
				for i, c := range cases {
					got[c.name] = seen[i+1]
				}
				if diff := cmp.Diff(want, got); diff != "" {
					return errors.New("behind the guard (-want +got)\n" + diff)
				}
				counters, err := n.Dropped(context.WithoutCancel(t.Context()))
				sum := uint64(0)
				for _, packets := range counters[ruleset.Forged] {
					sum += packets
				}
				if err == nil && sum != drops {
					err = fmt.Errorf("%d packets were dropped, want %d", sum, drops)
				}
				return err
			})
		})
	}
}
