package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/integration/lab/vm"
	"github.com/coil-net/coil/integration/lab/vm/vmtest"
	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// Every change by the API server's objects reaches a pod whose packets go through tunnels, and none
// leaves by another way. coild is in the machine, the API server on the host.
func testCoild(t *testing.T, api *controlplane.API) {
	ctx := t.Context()
	l := newLab(t, rig.Options{API: api, NoController: true, Tags: coildTags})
	outside := netnstest.New(t)
	nodeNS := netnstest.Open(t, l.node.NetnsPath())
	nodeNS.IP(t, "link", "add", "r0", "type", "veth", "peer", "name", "p0", "netns", outside.Path)
	nodeNS.Configure(t, "link set r0 up", "addr add 172.31.0.1/30 dev r0", "addr add fd31::1/64 dev r0 nodad",
		"route add 10.96.0.0/16 via 172.31.0.2", "-6 route add fd00:10:96::/112 via fd31::2", "route add 192.0.2.0/24 via 172.31.0.2", "-6 route add 2001:db8::/32 via fd31::2")
	outside.Configure(t, "link set p0 up", "addr add 172.31.0.2/30 dev p0", "addr add fd31::2/64 dev p0 nodad", "route add default via 172.31.0.1", "-6 route add default via fd31::1")
	testkit.Check(t, outside.Lab().RPFilter(0, "p0"))

	destinations := func(all ...string) func(*v2.Egress) { return func(e *v2.Egress) { e.Spec.Destinations = all } }
	l.egress("gw", destinations("192.0.2.0/24", "2001:db8::/32"))
	service := func(n int) {
		l.Helper()
		err := l.Core.CoreV1().Services(metav1.NamespaceDefault).Delete(ctx, "gw", metav1.DeleteOptions{})
		_ = err // the first time there is none
		l.service("gw", gatewayOf(n).Peers.IPv4.String(), gatewayOf(n).Peers.IPv6.String())
	}
	service(1)
	s := l.sandbox(rig.SandboxOptions{Name: "client", Annotations: asks("gw")})
	ns := netnstest.Open(t, s.Path)
	n := &network{t: t, pod: ns, outside: outside, sniffer: sniff(t, ns)}
	result, err := s.Add(ctx)
	l.must(err)
	var client ipam.Address
	for _, a := range result.Addrs {
		if a.Is4() {
			client.IPv4 = a
		} else {
			client.IPv6 = a
		}
	}
	_, h := handleOf(t, ns)
	if n.eth0, err = h.IndexByName("eth0"); err != nil {
		t.Fatal(err)
	}
	router := ipam.Address{IPv4: netip.MustParseAddr("172.31.0.2"), IPv6: netip.MustParseAddr("fd31::2")}
	routerEnd(t, outside, client, router)
	n.flood()
	tunnel := []string{"192.0.2.1 tunnel", "2001:db8::1 tunnel"}
	l.await("ADD", s, tunnel...)
	n.reached("a router that the Service doesn't have", false)
	l.endpoints("gw", router)
	n.reached("after ADD", true)
	n.closed("ADD")
	l.awaitMetric("coil_egress_node_tunnels", func(n string) bool { return strings.Contains(n, "2") })

	l.egress("gw", func(e *v2.Egress) { e.Spec.FouSourcePortAuto = true })
	testkit.Eventually(t, within, "another source port", func() error { return hasLink(ns, "fou4_", "encap-sport auto") })
	n.reached("source port", true)
	n.closed("source port")
	service(2)
	testkit.Eventually(t, within, "another Service", func() error { return hasLink(ns, "fou4_0a600064", "remote 10.96.0.100") })
	l.await("another Service", s, tunnel...)
	n.reached("another Service", true)
	n.closed("another Service")
	l.egress("gw", destinations("0.0.0.0/0", "::/0"))
	l.await("all destinations", s, append(tunnel, "198.51.100.1 tunnel")...)
	l.egress("gw", func(e *v2.Egress) { e.Status.InClusterCIDRs = []string{"100.64.0.0/16"} })
	l.await("a pool was added", s, append(tunnel, "100.64.0.1 eth0")...)
	l.must(s.Check(ctx))
	// Whenever CHECK is to look: by the time it does, coild may have repaired what it was.
	destroy := "link set fou4_0a600064 down\nlink del coil_ipip6\nfou del port 5555\n"
	testkit.Eventually(t, within, "CHECK tells what is destroyed", func() error {
		_, _ = ns.Run("sh", "-c", "printf '"+destroy+"' | ip -force -batch -")
		err := s.Check(ctx)
		for _, says := range []string{"is down: link fou4_0a600064", "receiver coil_ipip6", "FoU port 5555 of IPv4 is not open"} {
			if err == nil || !strings.Contains(err.Error(), says) {
				return fmt.Errorf("%q isn't in: %v", says, err)
			}
		}
		return nil
	})
	l.await("restored", s, tunnel...)
	testkit.Eventually(t, within, "CHECK finds nothing wrong", func() error { return s.Check(ctx) })
	l.node.Coild.Kill()
	ns.IP(t, "link", "del", "fou4_0a600064")
	l.must(l.node.Start(ctx))
	l.await("restored at the start", s, tunnel...)
	n.reached("restored at the start", true)
	n.closed("before it is deleted")
	l.deleteEgress("gw")
	l.await("deleted", s, "192.0.2.1 nowhere", "2001:db8::1 nowhere", "100.64.0.1 eth0")
	l.egress("gw", destinations("192.0.2.0/24", "2001:db8::/32"))
	l.await("made again", s, append(tunnel, "198.51.100.1 eth0")...)
	n.reached("made again", true)
	n.closed("made again")
	l.annotate(s, "")
	l.await("annotation removed", s, "192.0.2.1 eth0", "2001:db8::1 eth0")
	l.annotate(s, "gw")
	l.await("annotation added", s, tunnel...)
	n.sniffer.take(func(sent) bool { return false })
	n.reached("annotation added", true)
	n.closed("annotation added")
	testKilledAtChange(l, n, s, service)
	l.must(s.Del(ctx))
	testKilledAtAdd(l)
	testTogether(l)
}

// fault lets the next coild end at a point.
func (l *lab) fault(p faultpoint.Point) {
	l.node.Coild.Kill()
	l.node.Coild.Faults = fmt.Sprintf("%s=1", p)
}

// faulted waits until coild has ended at its point.
func (l *lab) faulted(p faultpoint.Point) {
	l.Helper()
	select {
	case <-l.node.Coild.Ended():
	case <-time.After(testkit.Timeout(within)):
		l.Fatalf("coild never passed %s", p)
	}
	l.node.Coild.Faults = ""
}

// shortly leaves points out that differ from others only in what needs no FoU, unless the
// long form is asked for.
func shortly(points []faultpoint.Point, short ...faultpoint.Point) []faultpoint.Point {
	if testkit.EgressForm.Long() {
		return points
	}
	return short
}

// coild is killed at each step of a running client's change to another Service: nothing leaves
// by another way, and the next coild completes it.
func testKilledAtChange(l *lab, n *network, s *rig.Sandbox, service func(int)) {
	l.Helper()
	for i, p := range shortly(faultpoint.EgressSetup, faultpoint.EgressTunnelled) {
		l.fault(p)
		service(1 + i%2)
		l.must(l.node.Coild.Start())
		l.faulted(p)
		n.closed("killed at " + string(p))
		l.must(l.node.Start(l.Context()))
		want := gatewayOf(1 + i%2).Peers.IPv4
		testkit.Eventually(l.T, within, "another Service after "+string(p), func() error {
			return errors.Join(hasLink(n.pod, dataplane.TunnelName(want, 0), "remote "+want.String()), s.Check(l.Context()))
		})
		if shown := n.pod.IP(l.T, "-o", "link", "show"); strings.Count(shown, "fou4_") != 1 || strings.Count(shown, "fou6_") != 1 {
			l.Errorf("killed at %s: links are\n%s", p, shown)
		}
		n.reached("killed at "+string(p), true)
		n.closed("after it was killed at " + string(p))
	}
}

// coild is killed at each step of the setup at ADD. Whether the runtime tries again or gives
// up, record, kernel and API server agree.
func testKilledAtAdd(l *lab) {
	l.Helper()
	ctx := l.Context()
	for i, p := range shortly(faultpoint.EgressSetup, faultpoint.EgressRuled, faultpoint.EgressMade) {
		s := l.sandbox(rig.SandboxOptions{Name: fmt.Sprintf("killed-%d", i), Annotations: asks("gw")})
		l.fault(p)
		l.must(l.node.Start(ctx))
		if _, err := s.Add(ctx); err == nil {
			l.Errorf("ADD succeeds though coild is killed at %s", p)
		}
		l.faulted(p)
		l.must(l.node.Start(ctx))
		if i%2 == 0 {
			_, err := s.Add(ctx) // once more, for the same sandbox
			l.must(err)
			l.await("ADD after coild was killed at "+string(p), s, "192.0.2.1 tunnel", "2001:db8::1 tunnel", "198.51.100.1 eth0")
			l.must(s.Check(ctx))
		}
		l.must(s.Del(ctx))
		l.must(s.Close())
		testkit.Eventually(l.T, within, "nothing is recorded any more", func() error {
			rows, err := clients(ctx, l.node)
			if err == nil && rows > 0 {
				err = fmt.Errorf("%d sandboxes", rows)
			}
			return err
		})
	}
	l.must(l.AwaitClean(ctx, within))
}

// coildTags are build tags of testCoild's programs, which are built on the host.
var coildTags = []string{"faultpoints"}

// Environment of the test in the machine: the directory and the address of the API server.
const (
	apiDirEnv  = "COIL_TEST_API_DIR"
	apiAddrEnv = "COIL_TEST_API_ADDR"
)

// TestCoild runs an API server here, where it starts in seconds, and testCoild in a machine.
func TestCoild(t *testing.T) {
	testkit.Need(t, testkit.VM)
	options := vm.Options{Kernel: "6.12", Memory: 3072, Network: true}
	if os.Getenv(apiDirEnv) == "" {
		testkit.Need(t, testkit.Netns)
		testkit.Need(t, testkit.APIServer)
		r := rigtest.NewWith(t, rig.Options{Tags: coildTags})
		options.Env = []string{build.Built + "=1", apiDirEnv + "=" + r.API.Dir(), apiAddrEnv + "=" + r.API.Addr().String()}
	}
	if vmtest.Reexec(t, options, append([]string{"virtio_net"}, modules...)...) {
		testCoild(t, hostAPI(t))
	}
}

// hostAPI is the API server of the host, at the same address as there.
func hostAPI(t *testing.T) *controlplane.API {
	t.Helper()
	machine.Configure(t, "link set "+vm.Link+" up", "addr add "+vm.LinkAddr.String()+" dev "+vm.Link, "route add default via "+vm.HostAddr.String())
	at := testkit.Must(netip.ParseAddrPort(os.Getenv(apiAddrEnv)))(t)
	p := testkit.Must(netlab.NewProxy(t.Context(), netlab.Machine(), at.String(), netip.AddrPortFrom(vm.HostAddr, at.Port()).String()))(t)
	t.Cleanup(func() { p.Close() })
	return testkit.Must(controlplane.Attach(os.Getenv(apiDirEnv), at))(t)
}

// hasLink wants a link whose description has a text.
func hasLink(ns *netnstest.NS, name, text string) error {
	out, err := ns.Run("ip", "-d", "-o", "link", "show")
	if err != nil {
		return err
	}
	for line := range strings.Lines(out) {
		if strings.Contains(line, name) && strings.Contains(line, text) {
			return nil
		}
	}
	return fmt.Errorf("no %s with %s in\n%s", name, text, out)
}
