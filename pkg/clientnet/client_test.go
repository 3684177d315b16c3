package clientnet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/clientnet/clientnettest"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/store"
)

// pod is one whose Network is tested.
type pod struct {
	*clientnettest.Pod
	network *Network
}

func newPod(t *testing.T) *pod {
	p := &pod{Pod: clientnettest.NewPod(t)}
	p.network = New(dataplane.ProtocolNode, p.Links, nil)
	return p
}

// use makes the pod use Egresses: its guard is widened before and narrowed after.
func (p *pod) use(ctx context.Context, egresses ...client.Egress) (Outcome, error) {
	c := p.Client
	c.Egresses = egresses
	want := client.StateOf(c).Guard()
	have, err := p.network.Guard(ctx, p.At(), c)
	if err != nil {
		return Outcome{}, err
	}
	wide, err := client.WidenGuard(have, want)
	if err != nil {
		return Outcome{}, err
	}
	err = p.network.SetGuard(ctx, p.At(), c, wide)
	out, made := p.network.Client(ctx, p.At(), c)
	return out, errors.Join(err, made, p.network.SetGuard(ctx, p.At(), c, want))
}

// check does CHECK of what was made.
func (p *pod) check(made client.State) error {
	return errors.Join(p.network.Check(p.T.Context(), p.At(), p.Client, made), p.network.CheckGuard(p.T.Context(), p.At(), p.Client, made.Guard()))
}

func (p *pod) mustUse(egresses ...client.Egress) Outcome {
	p.T.Helper()
	out, err := p.use(p.T.Context(), egresses...)
	if err != nil {
		p.T.Fatal(err)
	}
	return out
}

func TestClient(t *testing.T) {
	p := newPod(t)
	everything := clientnettest.Gateway("net/a", 1, "0.0.0.0/0", "::/0", "172.20.0.0/16", "fd20::/64")
	everything.InCluster = []netip.Prefix{netip.MustParsePrefix("100.64.0.0/16"), netip.MustParsePrefix("2001:db8:1::/48")}
	out := p.mustUse(everything)
	if out.Rules.Added != 10 || out.Tunnels.Added != 2 || len(out.State.Tunnels) != 2 || out.State.Tunnels[0].MTU != 1400-28 {
		t.Errorf("made %+v", out)
	}
	ways := map[string]string{
		"8.8.8.8": "tunnel", "2001:db8:2::1": "tunnel", "172.20.0.1": "tunnel", "fd20::1": "tunnel",
		"10.7.0.1": "eth0", "192.168.9.9": "eth0", "172.21.0.1": "eth0", "fd21::1": "eth0", // private, but not asked for
		"100.64.9.9": "eth0", "2001:db8:1::1": "eth0", // in the cluster
		"10.96.0.1": "eth0", "fd96::1": "eth0", // the routers' Service
		"169.254.1.1": "eth0",
	}
	p.WantWays(ways)
	rules := p.NS.IP(t, "rule")
	for _, want := range []string{"1800:\tfrom all to 169.254.0.0/16 lookup main proto 30", "1900:\tfrom all lookup 117 proto 30",
		"2000:\tfrom all to 192.168.0.0/16 lookup main proto 30", "2001:\tfrom all to 172.16.0.0/12 lookup main proto 30",
		"2002:\tfrom all to 10.0.0.0/8 lookup main proto 30", "2100:\tfrom all lookup 118 proto 30"} {
		if !strings.Contains(rules, want) {
			t.Errorf("no rule %q in\n%s", want, rules)
		}
	}
	narrow, wide := p.NS.IP(t, "route", "show", "table", "117"), p.NS.IP(t, "-6", "route", "show", "table", "118")
	for text, wants := range map[string][]string{
		narrow: {"172.20.0.0/16 dev fou4_0a600001 proto 30", "unreachable 172.20.0.0/16 proto 30 metric 4294967295", "throw 100.64.0.0/16 proto 30", "throw 10.96.0.1 proto 30"},
		wide:   {"default dev fou6_", "unreachable default dev lo proto 30 metric 4294967295", "throw 2001:db8:1::/48 dev lo proto 30", "throw fd96::1 dev lo proto 30"},
	} {
		for _, want := range wants {
			if !strings.Contains(text, want) {
				t.Errorf("no route %q in\n%s", want, text)
			}
		}
	}
	for _, key := range []string{"all/rp_filter", "default/rp_filter", "eth0/rp_filter", "fou4_0a600001/rp_filter"} {
		if v, err := sysctl.Get(p.NS.NS, "net/ipv4/conf/"+key); err != nil || v != "0" {
			t.Errorf("%s is %q, %v", key, v, err)
		}
	}
	for _, f := range []string{"ipv4", "ipv6"} {
		if v, err := sysctl.Get(p.NS.NS, "net/"+f+"/fib_multipath_hash_policy"); err != nil || v != "1" {
			t.Errorf("hash policy of %s is %q, %v", f, v, err)
		}
	}
	if again := p.mustUse(everything); again.Rules.Changed() || again.Routes.Changed() || again.Tunnels.Changed() || again.Others != 0 {
		t.Errorf("the second time: %+v", again)
	}

	// Objects that others destroy come back, and nothing leaves meanwhile.
	p.NS.IP(t, "link", "del", "fou4_0a600001")
	p.WantWays(map[string]string{"8.8.8.8": "nowhere", "172.20.0.1": "nowhere", "2001:db8:2::1": "tunnel"})
	p.NS.IP(t, "rule", "del", "priority", "2001")
	p.NS.IP(t, "-6", "route", "del", "fd20::/64", "table", "117", "metric", "1024")
	p.WantWays(map[string]string{"fd20::1": "nowhere"})
	if _, err := sysctl.Set(p.NS.NS, sysctl.Setting{Key: "net/ipv4/conf/all/rp_filter", Value: "1"}); err != nil {
		t.Fatal(err)
	}
	out = p.mustUse(everything)
	if out.Rules.Added != 1 || out.Tunnels.Added != 1 || out.Routes.Added != 3 || out.Others == 0 {
		t.Errorf("restored %+v", out)
	}
	p.WantWays(ways)
}

// Destinations whose tunnel is missing are unreachable, and the rest works.
func TestClientWithBrokenTunnel(t *testing.T) {
	p := newPod(t)
	a, b, c := clientnettest.Gateway("net/a", 1, "192.0.2.0/24"), clientnettest.Gateway("net/b", 2, "198.51.100.0/24"), clientnettest.Gateway("net/c", 0, "203.0.113.0/24", "2001:db8::/32")
	p.Links.Broken[b.Peers.IPv4] = true
	if _, err := p.use(t.Context(), a, b, c); err == nil || !strings.Contains(err.Error(), "is broken") {
		t.Errorf("error %v", err)
	}
	closed := map[string]string{"192.0.2.1": "tunnel", "198.51.100.1": "nowhere", "203.0.113.1": "nowhere", "2001:db8::1": "nowhere", "8.8.8.8": "eth0"}
	p.WantWays(closed)
	p.Links.Broken = map[netip.Addr]bool{a.Peers.IPv4: true}
	// A tunnel that isn't known to be there stays in use if it is.
	if _, err := p.use(t.Context(), a, b, c); err == nil {
		t.Error("no error")
	}
	closed["198.51.100.1"] = "tunnel"
	p.WantWays(closed)
}

// A range that was the cluster's goes by the tunnels, whether all of them are there or not.
func TestClientOfAFormerRange(t *testing.T) {
	p := newPod(t)
	all, broken := clientnettest.Gateway("net/a", 1, "0.0.0.0/0"), clientnettest.Gateway("net/b", 2, "198.51.100.0/24")
	all.InCluster = []netip.Prefix{netip.MustParsePrefix("100.64.0.0/16")}
	p.mustUse(all)
	p.WantWays(map[string]string{"100.64.9.9": "eth0", "8.8.8.8": "tunnel"})
	p.Links.Broken[broken.Peers.IPv4] = true
	all.InCluster = nil
	if _, err := p.use(t.Context(), all, broken); err == nil {
		t.Error("no error")
	}
	p.WantWays(map[string]string{"100.64.9.9": "tunnel", "8.8.8.8": "tunnel", "198.51.100.1": "nowhere"})
}

// An error of whatever step lets no packet to a destination out, nor does any moment between two
// steps.
func TestClientChangesClosed(t *testing.T) {
	wide := clientnettest.Gateway("net/a", 1, "192.0.2.0/24", "2001:db8::/32", "172.20.0.0/16")
	moved := clientnettest.Gateway("net/a", 2, "192.0.2.0/24", "2001:db8::/32", "172.20.0.0/16")
	split := clientnettest.Gateway("net/a", 2, "192.0.2.0/25", "192.0.2.128/25", "2001:db8::/33", "2001:db8:8000::/33", "172.20.0.0/17", "172.20.128.0/17")
	other := clientnettest.Gateway("net/b", 3, "192.0.2.0/25", "2001:db8::/48", "172.16.0.0/12")
	marked := other
	marked.OriginatingOnly = true
	lost := clientnettest.Gateway("net/a", 0, "192.0.2.0/24", "2001:db8::/32", "172.20.0.0/16")
	sunk := lost
	sunk.OriginatingOnly = true
	spared := wide
	spared.InCluster = []netip.Prefix{netip.MustParsePrefix("100.64.0.0/16")}
	steps := [][]client.Egress{{wide}, {moved}, {split}, {split, other}, {wide, marked}, {lost, other}, {lost}, {sunk}, {wide}, {sunk, marked}, {spared}, {wide}}
	destinations := []string{"192.0.2.1", "192.0.2.200", "2001:db8::1", "2001:db8:ffff::1", "172.20.0.1", "172.20.200.1"}

	for i := range steps[1:] {
		t.Run(fmt.Sprintf("step %d", i+1), func(t *testing.T) {
			t.Parallel()
			p := newPod(t)
			if !p.Escapes("192.0.2.1") || !p.Escapes("2001:db8::1") {
				t.Fatal("a pod like any other has no way to the destinations")
			}
			for _, earlier := range steps[:i+1] {
				p.mustUse(earlier...)
			}
			if n := p.changesClosed(steps[i], steps[i+1], destinations, "show"); n < 5 {
				t.Errorf("only %d requests were looked at", n)
			}
		})
	}
}

// changesClosed changes what a pod uses, and lets each request fail in turn, but those of the kinds that
// change nothing. It wants that destinations never go by eth0, and returns how many requests it looked at.
func (p *pod) changesClosed(before, after []client.Egress, destinations []string, but ...string) (requests int) {
	p.T.Helper()
	closed := func(when string, of any) {
		for _, d := range destinations {
			if p.Escapes(d) {
				p.T.Errorf("%s goes by eth0 %s %v", d, when, of)
			}
		}
	}
	for fail := 1; ; fail++ {
		n := 0
		_, err := p.use(rtnl.WithTrace(p.T.Context(), func(r rtnl.Request) error {
			if slices.ContainsFunc(but, func(kind string) bool { return strings.Contains(r.String(), kind) }) {
				return nil
			}
			requests++
			n++
			closed("before", r)
			if n == fail {
				return errInjected
			}
			return nil
		}), after...)
		closed(fmt.Sprintf("after failure %d:", fail), err)
		if err == nil {
			return requests
		}
		if !errors.Is(err, errInjected) {
			p.T.Fatal(err)
		}
		p.mustUse(before...)
		if fail > 8 {
			fail += 2 // of many alike, some
		}
	}
}

var errInjected = errors.New("injected")

// Nothing is left when no Egress is used any more, and what others have stays.
func TestClientCleared(t *testing.T) {
	p := newPod(t)
	for _, args := range []string{
		"rule add priority 1900 table 77", "rule add to 192.0.2.0/24 priority 2050 table main protocol 44",
		"route add 192.0.2.0/24 dev eth0 table 118 metric 7 proto 44", "link add fou9_other type veth peer name other",
	} {
		p.NS.IP(t, strings.Fields(args)...)
	}
	state := func() string {
		var all []string
		for _, args := range []string{"rule", "-6 rule", "route show table 117", "route show table 118", "-6 route show table 118", "-o link show"} {
			out, err := p.NS.Run("ip", strings.Fields(args)...)
			if err != nil && !strings.Contains(err.Error(), "table does not exist") {
				t.Fatal(err)
			}
			all = append(all, out)
		}
		rules, err := p.NS.Run("nft", "list", "ruleset")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(append(all, rules), "\n")
	}
	before := state()
	e := clientnettest.Gateway("net/a", 1, "0.0.0.0/0", "::/0")
	e.OriginatingOnly = true
	p.mustUse(e)
	if during := state(); !strings.Contains(during, "1700:\tfrom all fwmark 0x100000/0x100000 lookup main") || !strings.Contains(during, "table inet coil") {
		t.Errorf("no marks in\n%s", during)
	}
	p.mustUse()
	if after := state(); after != before {
		t.Errorf("there was\n%s\nand is\n%s", before, after)
	}
	p.mustUse()
}

func TestRouter(t *testing.T) {
	p := newPod(t)
	for _, want := range []bool{true, false} {
		out, err := p.network.Router(t.Context(), p.At(), "eth0", false)
		if err != nil || (out.Others > 0) != want {
			t.Errorf("%+v, %v", out, err)
		}
	}
	for key, want := range map[string]string{
		"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1", "net/ipv4/conf/all/rp_filter": "0", "net/ipv4/conf/default/rp_filter": "0",
		"net/ipv4/conf/eth0/rp_filter": "0", "net/ipv4/fib_multipath_hash_policy": "1", "net/ipv6/fib_multipath_hash_policy": "1",
	} {
		if v, err := sysctl.Get(p.NS.NS, key); err != nil || v != want {
			t.Errorf("%s is %q, %v", key, v, err)
		}
	}
	// A router with floating addresses takes packets of connections of which another router has seen the other direction. That is
	// no repair: the parameter may not be there before connections are tracked.
	if _, err := p.NS.Run("nft", "add table inet t; add chain inet t c { type filter hook forward priority 0; }; add rule inet t c ct state invalid drop"); err != nil {
		t.Fatal(err)
	}
	for _, floating := range []bool{false, true} {
		out, err := p.network.Router(t.Context(), p.At(), "eth0", floating)
		v, errGet := sysctl.Get(p.NS.NS, "net/netfilter/nf_conntrack_tcp_be_liberal")
		if want := map[bool]string{false: "0", true: "1"}[floating]; err != nil || errGet != nil || out.Others > 0 || v != want {
			t.Errorf("floating %t: it is %q, %+v, %v, %v", floating, v, out, err, errGet)
		}
	}
}

func TestGone(t *testing.T) {
	p := newPod(t)
	other, gone := p.At(), p.At()
	other.Inode++
	gone.Path += "-gone"
	for _, at := range []store.Netns{other, gone} {
		if exists, err := p.network.Exists(at); exists || err != nil {
			t.Errorf("%+v exists: %t, %v", at, exists, err)
		}
		if _, err := p.network.Client(t.Context(), at, p.Client); !errors.Is(err, ErrGone) {
			t.Errorf("client in %+v: %v", at, err)
		}
		if _, err := p.network.Router(t.Context(), at, "eth0", false); !errors.Is(err, ErrGone) {
			t.Errorf("router in %+v: %v", at, err)
		}
	}
	if exists, err := p.network.Exists(p.At()); !exists || err != nil {
		t.Errorf("%+v exists: %t, %v", p.At(), exists, err)
	}
}
