package egress

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// standIns are links in place of tunnels, for which this machine's kernel may have no module.
// Those to the peers in broken can't be made.
type standIns struct {
	tb     testing.TB
	ns     *netnstest.NS
	broken map[netip.Addr]bool
	// sinking, if not nil, is called when a sink is asked for.
	sinking func()
	// leaky lets no sink be made.
	leaky bool
}

func (s *standIns) Make(ctx context.Context, _ *netns.NS, h *rtnl.Handle, _ uint16, want []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, dataplane.Result, error) {
	links := map[netip.Addr]dataplane.TunnelLink{}
	var result dataplane.Result
	var errs []error
	for _, w := range want {
		if s.broken[w.Remote] {
			errs = append(errs, fmt.Errorf("tunnel %s is broken", w))
			continue
		}
		name := dataplane.TunnelName(w.Remote, 0)
		if _, err := h.IndexByName(name); err != nil {
			s.ns.IP(s.tb, "link", "add", name, "type", "veth", "peer", "name", "x"+name[4:])
			s.ns.IP(s.tb, "link", "set", "x"+name[4:], "up")
			s.ns.IP(s.tb, "link", "set", name, "up", "addrgenmode", "none")
			result.Added++
		}
		index, err := h.IndexByName(name)
		errs = append(errs, err)
		links[w.Remote] = dataplane.TunnelLink{Index: index, Name: name}
	}
	if _, err := s.MakeSinks(ctx, h, 0, familiesOf(want)...); err != nil {
		errs = append(errs, err)
	}
	return links, result, errors.Join(errs...)
}

// sinkNames are the names of FoU's sinks.
var sinkNames = map[dataplane.Family]string{dataplane.IPv4: dataplane.ReceiverIPv4, dataplane.IPv6: dataplane.ReceiverIPv6}

// MakeSinks implements Tunnels: at their other ends nobody takes anything.
func (s *standIns) MakeSinks(ctx context.Context, h *rtnl.Handle, mtu int, families ...dataplane.Family) (map[dataplane.Family]int, error) {
	sinks := map[dataplane.Family]int{}
	for _, f := range families {
		if s.leaky {
			return sinks, errors.New("no sink")
		}
		name := sinkNames[f]
		if _, err := h.IndexByName(name); err != nil {
			s.ns.IP(s.tb, "link", "add", name, "type", "veth", "peer", "name", "x"+name)
		}
		l, err := h.LinkByName(ctx, name)
		if err != nil {
			return sinks, err
		}
		if !l.Up {
			for _, end := range []string{"x" + name, name} {
				s.ns.IP(s.tb, "link", "set", end, "addrgenmode", "none", "arp", "off", "up")
			}
		}
		if mtu != 0 {
			s.ns.IP(s.tb, "link", "set", name, "mtu", fmt.Sprint(mtu))
		}
		sinks[f] = l.Index
	}
	return sinks, nil
}

func (s *standIns) Sink(ctx context.Context, h *rtnl.Handle, f dataplane.Family) (int, error) {
	if s.sinking != nil {
		s.sinking()
	}
	l, err := h.LinkByName(ctx, sinkNames[f])
	return l.Index, err
}

func (s *standIns) Prune(ctx context.Context, _ *netns.NS, h *rtnl.Handle, _ uint16, keep []dataplane.Tunnel, sinks ...dataplane.Family) (dataplane.Result, error) {
	var result dataplane.Result
	veths, err := h.Veths(ctx)
	for _, l := range veths {
		for f, name := range sinkNames {
			if l.Name == name && len(keep) == 0 && !slices.Contains(sinks, f) {
				err = errors.Join(err, h.Do(ctx, rtnl.DelLink(l.Index)))
			}
		}
		kept := slices.ContainsFunc(keep, func(k dataplane.Tunnel) bool { return dataplane.TunnelName(k.Remote, 0) == l.Name })
		if (strings.HasPrefix(l.Name, "fou4_") || strings.HasPrefix(l.Name, "fou6_")) && !kept {
			result.Deleted++
			err = errors.Join(err, h.Do(ctx, rtnl.DelLink(l.Index)))
		}
	}
	return result, err
}

// pod is one with eth0, and a way to everywhere by it.
type pod struct {
	t      *testing.T
	ns     *netnstest.NS
	handle *rtnl.Handle
	links  *standIns
	kernel *Kernel
	eth0   int
	client plan.Client
	// sandbox is the pod's in the process that has the kernel agent.
	sandbox *sandbox
	agent   *Kernel
}

func newPod(t *testing.T) *pod {
	ns := netnstest.New(t)
	for _, args := range []string{
		"link add eth0 type veth peer name outside", "link set eth0 mtu 1400", "link set outside up", "link set eth0 up",
		"addr add 10.1.0.5/32 dev eth0", "addr add fd01::5/128 dev eth0 nodad",
		"route add 169.254.1.1 dev eth0", "route add default via 169.254.1.1 dev eth0", "-6 route add default dev eth0",
	} {
		ns.IP(t, strings.Fields(args)...)
	}
	h, err := rtnl.New(ns.NS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	p := &pod{t: t, ns: ns, handle: h, links: &standIns{tb: t, ns: ns, broken: map[netip.Addr]bool{}}}
	p.kernel = NewKernel(dataplane.ProtocolNode, p.links, Nft{}, nil)
	if p.eth0, err = h.IndexByName("eth0"); err != nil {
		t.Fatal(err)
	}
	p.client = plan.Client{
		Address: ipam.Address{IPv4: netip.MustParseAddr("10.1.0.5"), IPv6: netip.MustParseAddr("fd01::5")},
		Link:    "eth0", Port: 5555, Protocol: dataplane.ProtocolNode,
	}
	return p
}

func (p *pod) at() store.Netns { return store.Netns{Path: p.ns.Path, Inode: p.ns.Inode()} }

// use makes the pod use Egresses.
func (p *pod) use(ctx context.Context, egresses ...plan.ClientEgress) (Outcome, error) {
	m := New(Config{Port: p.client.Port, Protocol: p.client.Protocol, RecordAll: !p.client.Wired}, nil, p.kernel, nil, nil, reconcile.NewMetrics(nil))
	if p.agent != p.kernel {
		p.agent, p.sandbox = p.kernel, newSandbox(node.Sandbox{
			ID: store.ID{ContainerID: p.client.ContainerID, IfName: p.client.Link}, Netns: p.at(), Address: p.client.Address,
		})
	}
	s, w := p.sandbox, &wanted{client: true, fit: egresses}
	s.deciding.Lock()
	err := m.aim(ctx, s, w)
	s.deciding.Unlock()
	c := m.client(s, w)
	c.Stale, c.Idle = p.client.Stale, p.client.Idle
	out, made := p.kernel.Client(ctx, p.at(), c)
	return out, errors.Join(err, made, m.narrowTo(ctx, s, w))
}

// check does CHECK of what was made.
func (p *pod) check(made plan.ClientState) error {
	return errors.Join(p.kernel.Check(p.t.Context(), p.at(), p.client, made), p.kernel.CheckGuard(p.t.Context(), p.at(), p.client, made.ClientGuard()))
}

func (p *pod) mustUse(egresses ...plan.ClientEgress) Outcome {
	p.t.Helper()
	out, err := p.use(p.t.Context(), egresses...)
	if err != nil {
		p.t.Fatal(err)
	}
	return out
}

// way is where a packet to an address goes: "eth0", "tunnel", "nowhere".
func (p *pod) way(dst string) string {
	p.t.Helper()
	out, err := p.ns.Run("ip", "route", "get", dst)
	switch {
	case err != nil && (strings.Contains(err.Error(), "No route to host") || strings.Contains(err.Error(), "unreachable")):
		return "nowhere"
	case err != nil:
		p.t.Fatal(err)
	case strings.Contains(out, "unreachable"):
		return "nowhere"
	case strings.Contains(out, "dev eth0"):
		return "eth0"
	case strings.Contains(out, "dev fou"):
		for _, own := range p.client.Address.Addrs() {
			if strings.Contains(out, "src "+own.String()) {
				return "tunnel"
			}
		}
	}
	p.t.Fatalf("route to %s: %s", dst, out)
	return ""
}

// escapes says whether a packet to an address leaves by eth0.
func (p *pod) escapes(dst string) bool {
	p.t.Helper()
	r, err := p.handle.RouteTo(p.t.Context(), netip.MustParseAddr(dst), 0)
	if err != nil && !errors.Is(err, rtnl.ErrNotExist) {
		p.t.Fatal(err)
	}
	return err == nil && r.Link == p.eth0
}

func (p *pod) wantWays(ways map[string]string) {
	p.t.Helper()
	for dst, want := range ways {
		if got := p.way(dst); got != want {
			p.t.Errorf("%s goes by %s, want %s", dst, got, want)
		}
	}
}

func gateway(name string, peer int, destinations ...string) plan.ClientEgress {
	e := plan.ClientEgress{Name: name}
	for _, d := range destinations {
		e.Destinations = append(e.Destinations, netip.MustParsePrefix(d))
	}
	if peer > 0 {
		e.Peers = ipam.Address{
			IPv4: netip.AddrFrom4([4]byte{10, 96, 0, byte(peer)}), IPv6: netip.MustParseAddr(fmt.Sprintf("fd96::%d", peer)),
		}
	}
	return e
}

func TestClient(t *testing.T) {
	p := newPod(t)
	everything := gateway("net/a", 1, "0.0.0.0/0", "::/0", "172.20.0.0/16", "fd20::/64")
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
	p.wantWays(ways)
	rules := p.ns.IP(t, "rule")
	for _, want := range []string{"1800:\tfrom all to 169.254.0.0/16 lookup main proto 30", "1900:\tfrom all lookup 117 proto 30",
		"2000:\tfrom all to 192.168.0.0/16 lookup main proto 30", "2001:\tfrom all to 172.16.0.0/12 lookup main proto 30",
		"2002:\tfrom all to 10.0.0.0/8 lookup main proto 30", "2100:\tfrom all lookup 118 proto 30"} {
		if !strings.Contains(rules, want) {
			t.Errorf("no rule %q in\n%s", want, rules)
		}
	}
	narrow, wide := p.ns.IP(t, "route", "show", "table", "117"), p.ns.IP(t, "-6", "route", "show", "table", "118")
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
		if v, err := sysctl.Get(p.ns.NS, "net/ipv4/conf/"+key); err != nil || v != "0" {
			t.Errorf("%s is %q, %v", key, v, err)
		}
	}
	for _, f := range []string{"ipv4", "ipv6"} {
		if v, err := sysctl.Get(p.ns.NS, "net/"+f+"/fib_multipath_hash_policy"); err != nil || v != "1" {
			t.Errorf("hash policy of %s is %q, %v", f, v, err)
		}
	}
	if again := p.mustUse(everything); again.Rules.Changed() || again.Routes.Changed() || again.Tunnels.Changed() || again.Others != 0 {
		t.Errorf("the second time: %+v", again)
	}

	// What others destroy comes back, and nothing leaves meanwhile.
	p.ns.IP(t, "link", "del", "fou4_0a600001")
	p.wantWays(map[string]string{"8.8.8.8": "nowhere", "172.20.0.1": "nowhere", "2001:db8:2::1": "tunnel"})
	p.ns.IP(t, "rule", "del", "priority", "2001")
	p.ns.IP(t, "-6", "route", "del", "fd20::/64", "table", "117", "metric", "1024")
	p.wantWays(map[string]string{"fd20::1": "nowhere"})
	if _, err := sysctl.Set(p.ns.NS, sysctl.Setting{Key: "net/ipv4/conf/all/rp_filter", Value: "1"}); err != nil {
		t.Fatal(err)
	}
	out = p.mustUse(everything)
	if out.Rules.Added != 1 || out.Tunnels.Added != 1 || out.Routes.Added != 3 || out.Others == 0 {
		t.Errorf("restored %+v", out)
	}
	p.wantWays(ways)
}

// What a tunnel is missing for is unreachable, and the rest works.
func TestClientWithBrokenTunnel(t *testing.T) {
	p := newPod(t)
	a, b, c := gateway("net/a", 1, "192.0.2.0/24"), gateway("net/b", 2, "198.51.100.0/24"), gateway("net/c", 0, "203.0.113.0/24", "2001:db8::/32")
	p.links.broken[b.Peers.IPv4] = true
	if _, err := p.use(t.Context(), a, b, c); err == nil || !strings.Contains(err.Error(), "is broken") {
		t.Errorf("error %v", err)
	}
	closed := map[string]string{"192.0.2.1": "tunnel", "198.51.100.1": "nowhere", "203.0.113.1": "nowhere", "2001:db8::1": "nowhere", "8.8.8.8": "eth0"}
	p.wantWays(closed)
	p.links.broken = map[netip.Addr]bool{a.Peers.IPv4: true}
	// A tunnel that isn't known to be there stays in use if it is.
	if _, err := p.use(t.Context(), a, b, c); err == nil {
		t.Error("no error")
	}
	closed["198.51.100.1"] = "tunnel"
	p.wantWays(closed)
}

// A range that was the cluster's goes by the tunnels, whether all of them are there or not.
func TestClientOfAFormerRange(t *testing.T) {
	p := newPod(t)
	all, broken := gateway("net/a", 1, "0.0.0.0/0"), gateway("net/b", 2, "198.51.100.0/24")
	all.InCluster = []netip.Prefix{netip.MustParsePrefix("100.64.0.0/16")}
	p.mustUse(all)
	p.wantWays(map[string]string{"100.64.9.9": "eth0", "8.8.8.8": "tunnel"})
	p.links.broken[broken.Peers.IPv4] = true
	all.InCluster = nil
	if _, err := p.use(t.Context(), all, broken); err == nil {
		t.Error("no error")
	}
	p.wantWays(map[string]string{"100.64.9.9": "tunnel", "8.8.8.8": "tunnel", "198.51.100.1": "nowhere"})
}

// An error of whatever step lets no packet to a destination out, nor does any moment between two
// steps.
func TestClientChangesClosed(t *testing.T) {
	wide := gateway("net/a", 1, "192.0.2.0/24", "2001:db8::/32", "172.20.0.0/16")
	moved := gateway("net/a", 2, "192.0.2.0/24", "2001:db8::/32", "172.20.0.0/16")
	split := gateway("net/a", 2, "192.0.2.0/25", "192.0.2.128/25", "2001:db8::/33", "2001:db8:8000::/33", "172.20.0.0/17", "172.20.128.0/17")
	other := gateway("net/b", 3, "192.0.2.0/25", "2001:db8::/48", "172.16.0.0/12")
	marked := other
	marked.OriginatingOnly = true
	lost := gateway("net/a", 0, "192.0.2.0/24", "2001:db8::/32", "172.20.0.0/16")
	sunk := lost
	sunk.OriginatingOnly = true
	spared := wide
	spared.InCluster = []netip.Prefix{netip.MustParsePrefix("100.64.0.0/16")}
	steps := [][]plan.ClientEgress{{wide}, {moved}, {split}, {split, other}, {wide, marked}, {lost, other}, {lost}, {sunk}, {wide}, {sunk, marked}, {spared}, {wide}}
	destinations := []string{"192.0.2.1", "192.0.2.200", "2001:db8::1", "2001:db8:ffff::1", "172.20.0.1", "172.20.200.1"}

	for i := range steps[1:] {
		t.Run(fmt.Sprintf("step %d", i+1), func(t *testing.T) {
			t.Parallel()
			p := newPod(t)
			if !p.escapes("192.0.2.1") || !p.escapes("2001:db8::1") {
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
func (p *pod) changesClosed(before, after []plan.ClientEgress, destinations []string, but ...string) (requests int) {
	p.t.Helper()
	closed := func(when string, of any) {
		for _, d := range destinations {
			if p.escapes(d) {
				p.t.Errorf("%s goes by eth0 %s %v", d, when, of)
			}
		}
	}
	for fail := 1; ; fail++ {
		n := 0
		_, err := p.use(rtnl.WithTrace(p.t.Context(), &rtnl.Trace{Send: func(r rtnl.Request) error {
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
		}}), after...)
		closed(fmt.Sprintf("after failure %d:", fail), err)
		if err == nil {
			return requests
		}
		if !errors.Is(err, errInjected) {
			p.t.Fatal(err)
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
		p.ns.IP(t, strings.Fields(args)...)
	}
	state := func() string {
		var all []string
		for _, args := range []string{"rule", "-6 rule", "route show table 117", "route show table 118", "-6 route show table 118", "-o link show"} {
			out, err := p.ns.Run("ip", strings.Fields(args)...)
			if err != nil && !strings.Contains(err.Error(), "table does not exist") {
				t.Fatal(err)
			}
			all = append(all, out)
		}
		rules, err := p.ns.Run("nft", "list", "ruleset")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(append(all, rules), "\n")
	}
	before := state()
	e := gateway("net/a", 1, "0.0.0.0/0", "::/0")
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
		out, err := p.kernel.Router(t.Context(), p.at(), "eth0")
		if err != nil || (out.Others > 0) != want {
			t.Errorf("%+v, %v", out, err)
		}
	}
	for key, want := range map[string]string{
		"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1", "net/ipv4/conf/all/rp_filter": "0", "net/ipv4/conf/default/rp_filter": "0",
		"net/ipv4/conf/eth0/rp_filter": "0", "net/ipv4/fib_multipath_hash_policy": "1", "net/ipv6/fib_multipath_hash_policy": "1",
	} {
		if v, err := sysctl.Get(p.ns.NS, key); err != nil || v != want {
			t.Errorf("%s is %q, %v", key, v, err)
		}
	}
}

func TestGone(t *testing.T) {
	p := newPod(t)
	other, gone := p.at(), p.at()
	other.Inode++
	gone.Path += "-gone"
	for _, at := range []store.Netns{other, gone} {
		if exists, err := p.kernel.Exists(at); exists || err != nil {
			t.Errorf("%+v exists: %t, %v", at, exists, err)
		}
		if _, err := p.kernel.Client(t.Context(), at, p.client); !errors.Is(err, ErrGone) {
			t.Errorf("client in %+v: %v", at, err)
		}
		if _, err := p.kernel.Router(t.Context(), at, "eth0"); !errors.Is(err, ErrGone) {
			t.Errorf("router in %+v: %v", at, err)
		}
	}
	if exists, err := p.kernel.Exists(p.at()); !exists || err != nil {
		t.Errorf("%+v exists: %t, %v", p.at(), exists, err)
	}
}
