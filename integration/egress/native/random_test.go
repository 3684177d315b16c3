package native

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// seedEnv is the environment variable with the seed of the random changes.
const seedEnv = "COIL_RANDOM_SEED"

// minutesEnv is the environment variable with the length of the run in minutes.
const minutesEnv = "COIL_RANDOM_MINUTES"

// While policies, pods, routers, nodes and programs change at random, no packet of a pod leaves with a source that no policy allows it: not with
// the pod's own, a node's, a router's, nor that of another tenant. In the end each pod is served. Then an element of a router's map is
// broken on purpose, and that is seen.
func TestRandomChanges(t *testing.T) {
	minutes := testkit.FloatingForm.Times(0, 30)
	if text := os.Getenv(minutesEnv); text != "" {
		minutes = testkit.Must(strconv.Atoi(text))(t)
	}
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv(seedEnv); text != "" {
		seed = testkit.Must(strconv.ParseUint(text, 10, 64))(t)
	}
	t.Logf("%s=%d", seedEnv, seed)
	w, o := newWorld(t, 3, 8, nil), newOracle()
	c := &changes{world: w, Rand: rand.New(rand.NewPCG(seed, 0)), oracle: o, tenants: []string{"tenant-a", "tenant-b", "tenant-c"}, done: map[string]int{}}
	w.listen(o)
	ctx, end := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	go func() { defer close(ended); o.run(ctx, w.Coil) }()
	t.Cleanup(func() { end(); <-ended })
	capture := testkit.Must(netlab.Open(w.RouterNetnsPath()))(t)
	outside := testkit.Must(capture.NewCapture("", func(p netlab.Packet) bool {
		if !p.Out && (p.Protocol == unix.IPPROTO_TCP || p.Protocol == unix.IPPROTO_UDP) {
			o.see(p)
		}
		return false
	}))(t)
	t.Cleanup(func() {
		if missed := testkit.Must(outside.Close())(t); missed > 0 {
			t.Errorf("the capture missed %d packets", missed)
		}
		testkit.Check(t, capture.Close())
	})
	for _, tenant := range c.tenants {
		testkit.Check(t, w.AddNamespace(t.Context(), tenant, ""))
	}
	t.Cleanup(c.leave)
	for range 2 * len(c.tenants) {
		c.createPolicy()
	}
	for _, n := range w.nodes {
		for _, tenant := range c.tenants {
			c.addPod(n, tenant)
		}
	}
	c.run(time.Duration(minutes) * time.Minute)
	c.served()
	c.progress()
	t.Run("Caught", c.caught)
}

// run makes changes. In the short form these are each quiet kind and one fault, once each, in random order. In the long form they are all kinds, until
// the time is over: a quiet change before each fault, and quiet changes after it for longer than the oracle's grace, so that packets are judged strictly.
func (c *changes) run(lasts time.Duration) {
	over := time.Now().Add(lasts)
	quiet, faults := c.quiet(), c.faults()
	if lasts == 0 {
		some := append(quiet, pick(c.Rand, faults...))
		for _, i := range c.Perm(len(some)) {
			c.make(some[i])
		}
		c.t.Logf("changes: %v", c.done)
		return
	}
	for len(c.done) < len(quiet)+len(faults) || time.Now().Before(over) {
		for n, i := range c.Perm(len(faults)) {
			c.make(quiet[n%len(quiet)])
			c.make(faults[i])
			if testkit.FloatingForm.Long() {
				for until := time.Now().Add(2 * c.oracle.grace); time.Now().Before(until); c.make(pick(c.Rand, quiet...)) {
					c.lasts(time.Duration(c.IntN(2000)) * time.Millisecond)
				}
			}
		}
	}
	c.t.Logf("changes: %v", c.done)
}

// make makes a change, if there is something to change.
func (c *changes) make(x change) {
	if x.do() {
		c.done[x.name]++
	}
	if text := c.oracle.found(); text != "" {
		c.t.Fatalf("after %q: %s", x.name, text)
	}
}

// served waits until datagrams of each pod arrive that may send.
func (c *changes) served() {
	arrived := func() map[string]int {
		c.oracle.mu.Lock()
		defer c.oracle.mu.Unlock()
		now := map[string]int{}
		for _, p := range c.clients {
			for _, to := range servers {
				if h := p.history[to]; h[len(h)-1].source.IsValid() {
					now[fmt.Sprintf("%s %v %v to %s by %s of %s", p.name, p.labels, p.subject.addrs, to, h[len(h)-1].source, h[len(h)-1].why)] = p.arrived[to]
				}
			}
		}
		return now
	}
	before := arrived()
	defer func() {
		if c.t.Failed() {
			c.show()
		}
	}()
	testkit.Eventually(c.t, 30*time.Second, "each pod is served", func() error {
		for name, n := range arrived() {
			if n <= before[name] {
				return fmt.Errorf("%s: no datagram arrives", name)
			}
		}
		return nil
	})
	// What came until now has been judged when the slack is over.
	c.lasts(slack + 200*time.Millisecond)
	if text := c.oracle.found(); text != "" {
		c.t.Fatal(text)
	}
}

// show logs the way of each pod, and where packets get lost: at links, at neighbours, at sockets, or by rules.
func (c *changes) show() {
	const way = "ip -6 rule; ip -6 route show table all | grep -v -e fe80 -e multicast; ip -s -d link; ip neigh; grep -E '^(Ip6?|Icmp6|Udp6?)' /proc/net/snmp6; cat /proc/net/udp6"
	for _, p := range c.clients {
		out, err := p.Run(c.t.Context(), "sh", "-c", way+"; ip route get 203.0.113.1; ip -6 route get 2001:db8:f::1")
		c.t.Logf("pod %s on %s: arrived %v of %v, %v\n%s", p.name, p.Node.Name, p.arrived, p.sent, err, out)
	}
	for _, r := range c.egress.Routers() {
		out, err := r.Run(c.t.Context(), "sh", "-c", way+"; nft list table inet coil")
		c.t.Logf("router %s on %s: %v\n%s", r.Name, r.Node.Name, err, out)
	}
	for _, n := range c.nodes {
		out, err := n.Run(c.t.Context(), "sh", "-c", way+"; nft list counters")
		c.t.Logf("node %s: %v\n%s", n.Name, err, out)
	}
}

// progress wants that datagrams arrived most of the time.
func (c *changes) progress() {
	c.oracle.mu.Lock()
	defer c.oracle.mu.Unlock()
	sent, arrived := 0, 0
	for _, s := range c.oracle.subjects {
		for _, to := range servers {
			sent += s.sent[to]
			arrived += min(s.arrived[to], s.sent[to])
		}
	}
	c.t.Logf("%d packets were judged, of %d pods; %d of %d datagrams arrived", c.oracle.judged, len(c.oracle.subjects), arrived, sent)
	if arrived*2 < sent {
		c.t.Errorf("only %d of %d datagrams arrived", arrived, sent)
	}
}

// caught has one policy of each of two tenants, whose addresses are at the same node, and gives a pod of one the other's address
// there, again and again: the router heals it.
func (c *changes) caught(t *testing.T) {
	for _, p := range c.policies {
		testkit.Check(t, c.Coil.CoilV2().EgressPolicies(p.Namespace).Delete(t.Context(), p.Name, metav1.DeleteOptions{}))
	}
	c.policies = nil
	router, mine, other := c.twoAddresses()
	victim := c.clients[0]
	others := c.tenants[0]
	if others == victim.Namespace {
		others = c.tenants[1]
	}
	for namespace, address := range map[string]netip.Addr{victim.Namespace: mine, others: other} {
		c.policyFor(namespace, address)
	}
	testkit.Eventually(t, 20*time.Second, "the pod leaves by "+mine.String(), func() error {
		_, err := router.Run(t.Context(), "nft", fmt.Sprintf("get element inet coil sources_ipv4 { %s : %s }", family(victim.pod.addrs, server4), mine))
		return err
	})
	c.served()
	broken := time.Now()
	testkit.Eventually(t, 10*time.Second, "the packets are seen that have another tenant's address", func() error {
		_, err := router.Run(t.Context(), "nft", fmt.Sprintf("delete element inet coil sources_ipv4 { %[1]s }; add element inet coil sources_ipv4 { %[1]s : %[2]s }", family(victim.pod.addrs, server4), other))
		if c.oracle.found() == "" {
			return fmt.Errorf("none is seen: %w", err)
		}
		return nil
	})
	t.Logf("seen after %s: %s", time.Since(broken).Round(time.Millisecond), c.oracle.found())
}

// twoAddresses are two of the Egress's addresses whose node is the same, and the router there.
func (c *changes) twoAddresses() (r *rig.Router, a, b netip.Addr) {
	testkit.Eventually(c.t, 20*time.Second, "two addresses are at one node", func() error {
		c.awaitHeld()
		first := map[string]string{}
		for _, x := range c.addresses {
			if before, ok := first[x.Router]; ok {
				for _, router := range c.egress.Routers() {
					if router.Name == x.Router {
						r, a, b = router, netip.MustParseAddr(before), netip.MustParseAddr(x.IPv4)
						return nil
					}
				}
			}
			first[x.Router] = x.IPv4
		}
		return fmt.Errorf("%+v", c.addresses)
	})
	return r, a, b
}

// leave takes pods and policies away.
func (c *changes) leave() {
	ctx := context.WithoutCancel(c.t.Context())
	for _, p := range c.clients {
		testkit.Check(c.t, p.silence())
	}
	now := metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}
	for _, tenant := range c.tenants {
		testkit.Check(c.t, c.Coil.CoilV2().EgressPolicies(tenant).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}),
			c.Core.CoreV1().Pods(tenant).DeleteCollection(ctx, now, metav1.ListOptions{}))
	}
}
