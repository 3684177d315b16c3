package podnet_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// pingTimeout is less than the second after which ARP and NDP try again, so that
// a lost first packet fails the test.
const pingTimeout = 900 * time.Millisecond

// nodeAddrs are the addresses of the test's node.
var nodeAddrs = ipam.Address{IPv4: netip.MustParseAddr("192.0.2.1"), IPv6: netip.MustParseAddr("2001:db8::1")}

// node is a namespace that plays the host, with a Network that is set up in it.
type node struct {
	*podnet.Network
	host *netnstest.NS
}

func newNode(tb testing.TB, change ...func(*podnet.Options)) node {
	tb.Helper()
	host := netnstest.New(tb)
	// An uplink with the node's addresses.
	host.IP(tb, "link", "add", "uplink", "type", "veth", "peer", "uplink-peer")
	host.IP(tb, "link", "set", "uplink", "up")
	host.IP(tb, "address", "add", "192.0.2.1/24", "dev", "uplink")
	host.IP(tb, "address", "add", "2001:db8::1/64", "dev", "uplink", "nodad")
	// The kernel makes the route of an address of IPv6 in the background, also without DAD.
	testkit.Eventually(tb, 10*time.Second, "the uplink's address is in use", func() error {
		if out := host.IP(tb, "-6", "route", "show", "table", "local", "2001:db8::1"); !strings.Contains(out, "uplink") {
			return fmt.Errorf("its route is %q", out)
		}
		return nil
	})
	o := podnet.Options{
		PodTable:     dataplane.TablePods,
		RulePriority: dataplane.PriorityPods,
		Protocol:     dataplane.ProtocolNode,
		SourceGuard:  true,
		Netns:        host.Path,
		SysctlRecord: filepath.Join(tb.TempDir(), "sysctls.json"),
	}
	for _, c := range change {
		c(&o)
	}
	n, err := podnet.New(o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := n.Close(); err != nil {
			tb.Error(err)
		}
	})
	setUp(tb, n)
	return node{n, host}
}

// Remove removes the link of one attachment.
func (n node) Remove(ctx context.Context, id attachment.ID, hostIfIndex int) error {
	return n.RemoveAll(ctx, podnet.Target{ID: id, HostIfIndex: hostIfIndex})[0]
}

// setUp makes the node ready for pods.
func setUp(tb testing.TB, n *podnet.Network) {
	tb.Helper()
	_, forwardErr := n.Forward(ctxOf(tb))
	_, ruleErr := n.Rules(ctxOf(tb))
	if err := errors.Join(forwardErr, ruleErr); err != nil {
		tb.Fatal(err)
	}
}

func compatCalico(o *podnet.Options) { o.CompatCalico = true }

// ctxOf is the context of a test or benchmark.
func ctxOf(tb testing.TB) context.Context { return tb.Context() }

// families are the kinds of pods.
var families = []struct {
	name       string
	ipv4, ipv6 bool
}{
	{"IPv4", true, false},
	{"IPv6", false, true},
	{"dual", true, true},
}

// addressOf is the i-th address of the test's pool.
func addressOf(i int, ipv4, ipv6 bool) ipam.Address {
	var a ipam.Address
	if ipv4 {
		a.IPv4 = netip.AddrFrom4([4]byte{10, 64, byte(i >> 8), byte(i)})
	}
	if ipv6 {
		a.IPv6 = netip.AddrFrom16([16]byte{0xfd, 0x64, 14: byte(i >> 8), 15: byte(i)})
	}
	return a
}

// newPod returns the i-th pod of the test with a namespace of its own.
func newPod(tb testing.TB, i int, ipv4, ipv6 bool) (podnet.Pod, *netnstest.NS) {
	tb.Helper()
	ns := netnstest.New(tb)
	return podnet.Pod{
		ID:        attachment.ID{ContainerID: fmt.Sprintf("%064x", i), IfName: "eth0"},
		Netns:     ns.Path,
		Pool:      "default",
		Namespace: "test",
		Name:      fmt.Sprintf("pod-%d", i),
		Address:   addressOf(i, ipv4, ipv6),
		NodeAddrs: nodeAddrs,
	}, ns
}

// mustAttachOnly attaches a pod, and doesn't wait for the carrier.
func (n node) mustAttachOnly(tb testing.TB, p podnet.Pod) podnet.Attachment {
	tb.Helper()
	a, err := n.Attach(ctxOf(tb), p, nil)
	if err != nil {
		tb.Fatal(err)
	}
	return a
}

// mustAttach attaches a pod and waits until packets can pass.
func (n node) mustAttach(tb testing.TB, p podnet.Pod) podnet.Attachment {
	tb.Helper()
	a := n.mustAttachOnly(tb, p)
	settle(tb, n.host, a.HostIfName, podnet.Gateways.IPv6, p)
	pod, err := netns.Open(p.Netns)
	if err != nil {
		tb.Fatal(err)
	}
	defer pod.Close()
	settle(tb, &netnstest.NS{NS: pod, Path: p.Netns}, p.IfName, p.Address.IPv6, p)
	return a
}

// settle waits until the kernel has noticed that a link has a carrier, and
// accepts packets to an IPv6 address of it. It does both in the background.
func settle(tb testing.TB, ns *netnstest.NS, link string, addr netip.Addr, p podnet.Pod) {
	tb.Helper()
	testkit.Eventually(tb, 5*time.Second, "link "+link+" of "+p.Name, func() error {
		if out := ns.IP(tb, "link", "show", link); !strings.Contains(out, "state UP") {
			return errors.New(out)
		}
		local := fmt.Sprintf("local %s dev %s ", addr, link)
		if out := ns.IP(tb, "-6", "route", "show", "table", "local"); p.Address.IPv6.IsValid() && !strings.Contains(out, local) {
			return errors.New(out)
		}
		return nil
	})
}

// awaitUp waits until the kernel has noticed that a link has a carrier: what is sent before is lost.
func awaitUp(tb testing.TB, ns *netnstest.NS, link string) {
	tb.Helper()
	testkit.Eventually(tb, 5*time.Second, "link "+link+" is up", func() error {
		if out := ns.IP(tb, "link", "show", link); !strings.Contains(out, "state UP") {
			return errors.New(out)
		}
		return nil
	})
}

// state is all that podnet could leave in a namespace.
func state(tb testing.TB, ns *netnstest.NS) string {
	tb.Helper()
	var b strings.Builder
	for _, c := range []struct{ options, commands string }{
		{"-o -d", "link\naddress"}, {"-4", "rule\nroute show table all"}, {"-6", "rule\nroute show table all"},
	} {
		fmt.Fprintf(&b, "# ip %s\n%s\n", c.options, ns.Batch(tb, c.options, c.commands))
	}
	return b.String()
}

// recorder counts the requests of a context, and makes some of them fail.
type recorder struct {
	mu       sync.Mutex
	requests []string
	// fail returns the error of the n-th request, counted from 1.
	fail func(n int, request string) error
}

func (r *recorder) context(ctx context.Context) context.Context {
	return rtnl.WithTrace(ctx, func(req rtnl.Request) error {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.requests = append(r.requests, req.String())
		if r.fail == nil {
			return nil
		}
		return r.fail(len(r.requests), req.String())
	})
}

func (r *recorder) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.requests)
}

// mustPing expects an answer to the first ping.
func mustPing(tb testing.TB, from *netnstest.NS, to netip.Addr) {
	tb.Helper()
	if err := from.Ping(to, testkit.Timeout(pingTimeout)); err != nil {
		tb.Errorf("%v", err)
	}
}
