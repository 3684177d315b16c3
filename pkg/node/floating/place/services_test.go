package place

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// ofServices is an order for an address of Services with some ports of TCP.
func ofServices(lasts time.Duration, ports ...uint16) floating.Order {
	o := floatingtest.Order(7, lasts)
	o.Pod, o.OfServices = "", true
	for _, p := range ports {
		o.Ports = append(o.Ports, floating.Port{Protocol: unix.IPPROTO_TCP, Port: p})
	}
	return o
}

// proxy is a Service proxy; see proxied.
const proxy = `table inet proxy {
	chain services {
		type nat hook prerouting priority -100
		ip daddr 192.0.2.7 tcp dport 80 dnat ip to 10.0.1.2:8080
		ip6 daddr 2001:db8::7 tcp dport 80 dnat ip6 to [fd00:1::2]:8080
		ip daddr 192.0.2.7 tcp dport 83 dnat ip to 10.0.1.2:8083
		ip6 daddr 2001:db8::7 tcp dport 83 dnat ip6 to [fd00:1::2]:8083
		ip daddr 192.0.2.7 tcp dport 82 dnat ip to 10.0.0.1:22
		ip6 daddr 2001:db8::7 tcp dport 82 dnat ip6 to [fd00::1]:22
	}
	chain masquerading {
		type nat hook postrouting priority 100
		ct status dnat masquerade
	}
	chain refusing {
		type filter hook input priority 0
		tcp dport 81 reject with tcp reset
	}
}`

// proxied gives the node what a Service proxy makes of nftables: port 80 leads to the pod, port 81 has no endpoints, and the endpoint of port 82 is a program
// of the node. The pod says "pod", and at port 83 of the Service goes on listening. The node itself listens at port 22 of each of its addresses, and says "node".
func (l *lab) proxied() {
	l.T.Helper()
	l.Rules(proxy)
	for _, server := range []struct {
		at    *netlab.NS
		port  int
		says  string
		stays bool
	}{{l.Pod.Lab(), 8080, "pod", false}, {l.Pod.Lab(), 8083, "pod", true}, {l.Node.Lab(), 22, "node", false}} {
		listener := testkit.Must(server.at.Listen(l.T.Context(), "tcp", fmt.Sprintf("[::]:%d", server.port)))(l.T)
		l.T.Cleanup(func() { _ = listener.Close() })
		go netlab.Serve(listener, func(c net.Conn) {
			_, _ = c.Write([]byte(server.says))
			if server.stays {
				_, _ = io.Copy(io.Discard, c)
			}
			_ = c.Close()
		})
	}
}

// hears returns what the host gets from a port of an address: what is said there, "refused", or "nothing".
func (l *lab) hears(a netip.Addr, port uint16) (string, error) {
	ctx, cancel := context.WithTimeout(l.T.Context(), testkit.Timeout(300*time.Millisecond))
	defer cancel()
	c, err := l.Host.Lab().Dial(ctx, "tcp", netip.AddrPortFrom(a, port).String())
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused", nil
	case ctx.Err() != nil, errors.Is(err, os.ErrDeadlineExceeded):
		return "nothing", nil
	case err != nil:
		return "", err
	}
	defer c.Close()
	said, err := io.ReadAll(c)
	return string(said), err
}

// An address of Services leads to the node: to ports of Services, and to nothing else that runs there. The node answers pings.
func TestAddressOfServices(t *testing.T) {
	l := newLab(t)
	l.proxied()
	p := l.start()
	ctx := t.Context()
	type heard map[uint16]string
	await := func(what string, want heard) {
		t.Helper()
		for _, a := range ofServices(0).Addrs() {
			for port, said := range want {
				testkit.Eventually(t, 5*time.Second, fmt.Sprintf("%s: from port %d of %s the host hears %s", what, port, a, said), func() error {
					if got, err := l.hears(a, port); err != nil || got != said {
						return fmt.Errorf("it hears %q, %w", got, err)
					}
					return nil
				})
			}
		}
	}
	pings := func(what string, want bool) {
		t.Helper()
		for _, a := range ofServices(0).Addrs() {
			if err := l.Host.Ping(a, testkit.Timeout(300*time.Millisecond)); (err == nil) != want {
				t.Errorf("%s: a ping to %s: %v, want an answer: %t", what, a, err, want)
			}
		}
	}
	testkit.Check(t, p.Answer(ctx, ofServices(time.Hour, 80, 81)))
	await("two ports", heard{80: "pod", 81: "refused", 22: "nothing"})
	pings("held", true)
	for _, own := range []string{"10.0.0.1", "fd00::1"} {
		if got, err := l.hears(netip.MustParseAddr(own), 22); err != nil || got != "node" {
			t.Errorf("from the node's own address %s the host hears %q, %v", own, got, err)
		}
	}
	const local = "local 192.0.2.7 dev lo proto 32 scope host; local 2001:db8::7 dev lo proto 32 metric 1024 pref medium"
	if got := l.floatingRoutes("local"); got != local {
		t.Errorf("table local: %s", got)
	}
	if got := l.Routes("116"); got != "" {
		t.Errorf("table 116: %s", got)
	}
	if got := l.Routes("119"); strings.Count(got, "dev lo proto 32") != 2 {
		t.Errorf("told to routing daemons: %s", got)
	}
	testkit.Check(t, p.Answer(ctx, ofServices(time.Hour, 22, 82)))
	await("other ports", heard{80: "nothing", 81: "nothing", 82: "node"})
	await("no Service proxy translates a port", heard{22: "nothing"})
	counts := testkit.Must(p.cfg.Tables.Counts(ctx))(t)
	for _, a := range ofServices(0).Addrs() {
		if c := counts[a]; c.NoProxy == 0 || c.Received <= c.NoProxy {
			t.Errorf("of %s is counted %+v", a, c)
		}
	}
	if got := testkit.Must(l.Node.Run("nft", "list", "counter", "ip", "coil_floating", "no_service_ipv4"))(t); strings.Contains(got, "packets 0 ") {
		t.Errorf("packets for ports of no Service aren't counted: %s", got)
	}
	testkit.Check(t, p.Answer(ctx, ofServices(time.Hour, 80)))
	await("the first port again", heard{80: "pod"})
	testkit.Check(t, p.Answer(ctx, ofServices(0, 80)))
	await("the time is over", heard{80: "nothing"})
	pings("the time is over", false)
	testkit.Check(t, p.Answer(ctx, ofServices(time.Hour, 80)))
	await("held again", heard{80: "pod"})
	testkit.Check(t, l.Node.Lab().IP(ctx, "route del local 192.0.2.7 dev lo table local"), p.Sync(ctx))
	if got := l.floatingRoutes("local"); got != local {
		t.Errorf("repaired, table local is: %s", got)
	}
	testkit.Check(t, p.Stop(ctx, ofServices(0).Address))
	p.Wait()
	if got := l.floatingRoutes("local") + l.Routes("119") + testkit.Must(l.Node.Run("nft", "list", "tables", "ip"))(t); got != "" {
		t.Errorf("there is still %s", got)
	}
}

// The program ends and begins again while the node has an address of Services. Its ports stay the only ones. If the order is adopted, nothing changes for clients, however
// late it is given again.
func TestServicesStayInTheNextLife(t *testing.T) {
	for name, adopted := range map[string]bool{"adopted": true, "not adopted": false} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			l.proxied()
			o := ofServices(time.Hour, 80)
			hears := func(what string, want map[uint16]string) {
				t.Helper()
				for _, a := range o.Addrs() {
					for port, want := range want {
						if got, err := l.hears(a, port); err != nil || got != want {
							t.Errorf("%s: from port %d of %s the host hears %q, %v, want %q", what, port, a, got, err, want)
						}
					}
				}
			}
			testkit.Check(t, l.start().Answer(t.Context(), o))
			for _, a := range o.Addrs() {
				testkit.Eventually(t, 5*time.Second, fmt.Sprintf("the host reaches %s", a), func() error {
					if got, err := l.hears(a, 80); err != nil || got != "pod" {
						return fmt.Errorf("it hears %q, %w", got, err)
					}
					return nil
				})
			}
			p := l.start()
			if adopted {
				p.Adopt([]floating.Order{o})
			}
			testkit.Check(t, p.Sync(t.Context()))
			hears("at once", map[uint16]string{80: "pod", 22: "nothing"})
			testkit.Eventually(t, 5*time.Second, "the time of the earlier life is over", func() error {
				if p.earlier() {
					return nil
				}
				return errors.New("not yet")
			})
			testkit.Check(t, p.Sync(t.Context()))
			if !adopted {
				if got := l.floatingRoutes("local"); got != "" {
					t.Errorf("table local: %s", got)
				}
				return
			}
			hears("later", map[uint16]string{80: "pod", 22: "nothing"})
			testkit.Check(t, p.Answer(t.Context(), o))
			hears("given again", map[uint16]string{80: "pod", 22: "nothing"})
			testkit.Check(t, p.Stop(t.Context(), o.Address))
			p.Wait()
			if got := l.floatingRoutes("local"); got != "" {
				t.Errorf("table local: %s", got)
			}
		})
	}
}

// The node doesn't reset a connection of which the kernel knows nothing: its packets are translated by nobody, but no Service proxy is missing.
func TestUnknownConnectionsAreNotReset(t *testing.T) {
	l := newLab(t)
	l.proxied()
	testkit.Check(t, l.Node.Lab().Sysctl("netfilter/nf_conntrack_tcp_loose=0"))
	p := l.start()
	testkit.Check(t, p.Answer(t.Context(), ofServices(time.Hour, 80, 83)))
	tracked := testkit.Must(conntrack.New(l.Node.NS))(t)
	defer tracked.Close()
	for _, a := range ofServices(0).Addrs() {
		testkit.Eventually(t, 5*time.Second, fmt.Sprintf("the host reaches %s", a), func() error {
			if got, err := l.hears(a, 80); err != nil || got != "pod" {
				return fmt.Errorf("it hears %q, %w", got, err)
			}
			return nil
		})
		before := testkit.Must(p.cfg.Tables.Counts(t.Context()))(t)[a].NoProxy
		c := testkit.Must(l.Host.Lab().Dial(t.Context(), "tcp", netip.AddrPortFrom(a, 83).String()))(t)
		defer c.Close()
		said := make([]byte, len("pod"))
		testkit.Must(io.ReadFull(c, said))(t)
		testkit.Must(tracked.Forget(t.Context(), a))(t)
		for range 2 { // the first write may succeed before its reset comes
			testkit.Must(c.Write([]byte("a")))(t)
			testkit.Check(t, c.SetReadDeadline(time.Now().Add(testkit.Timeout(200*time.Millisecond))))
			if _, err := c.Read(said); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("by %s: reading ends with %v", a, err)
			}
		}
		if after := testkit.Must(p.cfg.Tables.Counts(t.Context()))(t)[a].NoProxy; after != before {
			t.Errorf("%d packets to %s are counted as not translated", after-before, a)
		}
	}
}

// Nobody gives the order again soon for an address that the node announces as others do. What other programs delete of it comes back, and packets pass again.
func TestServicesPassAgain(t *testing.T) {
	for name, loss := range map[string]string{
		"all tables":          "nft flush ruleset",
		"the table of IPv4":   "nft delete table ip coil_floating",
		"the table of IPv6":   "nft delete table ip6 coil_floating",
		"a chain":             "nft flush chain ip coil_floating input",
		"a port":              "nft flush set ip coil_floating ports_ipv4",
		"the route to itself": "ip route del local 192.0.2.7 dev lo table local",
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			p, o := l.start(), ofServices(time.Hour, 80)
			testkit.Check(t, p.Answer(t.Context(), o))
			l.proxied()
			rules := func() string { // but those of the Service proxy, and for how long the node answers
				text := ""
				for _, family := range []string{"ip", "ip6", "arp"} {
					text += testkit.Must(l.Node.Run("nft", "-s", "list", "table", family, "coil_floating"))(t)
				}
				return regexp.MustCompile(` (timeout|expires) \d+m\S+`).ReplaceAllString(text, "") + l.floatingRoutes("local") + l.floatingRoutes("119")
			}
			before := rules()
			testkit.Must(l.Node.Run("sh", "-c", loss))(t)
			if name == "all tables" {
				testkit.Must(l.Node.Run("nft", proxy))(t)
			}
			testkit.Check(t, p.Sync(t.Context()))
			if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(rules(), "\n")); diff != "" {
				t.Errorf("(-before +after):\n%s", diff)
			}
			for _, a := range o.Addrs() {
				testkit.Eventually(t, 5*time.Second, fmt.Sprintf("the host reaches %s", a), func() error {
					if got, err := l.hears(a, 80); err != nil || got != "pod" {
						return fmt.Errorf("it hears %q, %w", got, err)
					}
					return nil
				})
			}
		})
	}
}

// A look at the kernel gives no address more time, also if the node has addresses of one family alone.
func TestLookWritesNothing(t *testing.T) {
	for name, lacks := range map[string]func(*floating.Order){
		"both families": func(*floating.Order) {},
		"IPv4":          func(o *floating.Order) { o.IPv6 = netip.Addr{} },
		"IPv6":          func(o *floating.Order) { o.IPv4 = netip.Addr{} },
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			p, o := l.start(), ofServices(time.Hour, 80)
			lacks(&o)
			testkit.Check(t, p.Answer(t.Context(), o))
			// The time that an element was given, not what is left of it.
			given := func() string {
				all := regexp.MustCompile(`timeout 59m\S+`).FindAllString(testkit.Must(l.Node.Run("nft", "list", "ruleset"))(t), -1)
				return strings.Join(all, ", ")
			}
			before := given()
			if before == "" {
				t.Fatal("no element has a time")
			}
			testkit.Check(t, p.Sync(t.Context()))
			if after := given(); after != before {
				t.Errorf("times were %s, and are %s", before, after)
			}
		})
	}
}

// floatingRoutes are the routes of floating addresses in a table.
func (l *lab) floatingRoutes(table string) string {
	var all []string
	for r := range strings.SplitSeq(l.Routes(table), "; ") {
		if strings.Contains(r, "proto 32") {
			all = append(all, r)
		}
	}
	return strings.Join(all, "; ")
}

// An address becomes one of Services, or a pod's, without a gap in what the node answers for.
func TestAddressChangesItsKind(t *testing.T) {
	l := newLab(t)
	l.proxied()
	p := l.start()
	testkit.Check(t, p.Answer(t.Context(), floatingtest.Order(7, time.Hour)))
	l.Await(floatingtest.Order(7, 0), true)
	testkit.Check(t, p.Answer(t.Context(), ofServices(time.Hour, 80)))
	for _, a := range ofServices(0).Addrs() {
		if got, err := l.hears(a, 80); err != nil || got != "pod" {
			t.Errorf("from %s the host hears %q, %v", a, got, err)
		}
	}
	if got := l.Routes("116"); got != "" {
		t.Errorf("table 116: %s", got)
	}
	testkit.Check(t, p.Answer(t.Context(), floatingtest.Order(7, time.Hour)))
	l.Await(floatingtest.Order(7, 0), true)
	if got := l.floatingRoutes("local"); got != "" {
		t.Errorf("table local: %s", got)
	}
}
