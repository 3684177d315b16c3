package neighbours

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kernel/announce"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// fixture is a rig whose router, "outside", is a host on the nodes' link without routes to pods.
type fixture struct {
	*rig.Rig
	t *testing.T
}

// newFixture returns the rig with a pool of the nodes' subnet, and a namespace that uses it.
func newFixture(t *testing.T, pool string, bits int32, subnet v2.SubnetSet, by v2.PoolAnnounce) *fixture {
	t.Helper()
	f := &fixture{shared.Rig(t), t}
	testkit.Check(t, f.AddPool(t.Context(), pool, bits, subnet), f.Announce(t.Context(), pool, by), f.AddNamespace(t.Context(), pool, pool))
	return f
}

func (f *fixture) node(flags ...string) *rig.Node {
	f.t.Helper()
	n := testkit.Must(f.AddNode(f.t.Context(), rig.NodeOptions{CoildFlags: flags}))(f.t)
	f.t.Cleanup(func() {
		if f.t.Failed() {
			f.t.Logf("the end of the log of %s:\n%s", n.Name, n.Coild.Logs(60))
		}
	})
	return n
}

// pod is a pod with a network, and its addresses.
func (f *fixture) pod(n *rig.Node, namespace string) (*rig.Sandbox, []netip.Addr) {
	f.t.Helper()
	s := testkit.Must(n.NewSandbox(f.t.Context(), rig.SandboxOptions{Namespace: namespace}))(f.t)
	return s, testkit.Must(s.Add(f.t.Context()))(f.t).Addrs
}

func (f *fixture) outside(script string) string {
	f.t.Helper()
	return testkit.Must(f.RunRouter(f.t.Context(), "sh", "-ec", script))(f.t)
}

// reaches waits until the host outside, which has forgotten where the addresses are, reaches them or doesn't.
func (f *fixture) reaches(addrs []netip.Addr, want bool) {
	f.t.Helper()
	for _, a := range addrs {
		testkit.Eventually(f.t, 15*time.Second, fmt.Sprintf("%s is reached from outside: %t", a, want), func() error {
			_, err := f.RunRouter(f.t.Context(), "sh", "-c", fmt.Sprintf("ip neigh flush to %[1]s; ip neigh del %[1]s dev br0 2>/dev/null; exec ping -c 1 -W 2 %[1]s", a))
			if want {
				return err
			}
			if err == nil {
				return errors.New("it is")
			}
			return nil
		})
	}
}

// answers are the addresses for which a node answers.
func (f *fixture) answers(n *rig.Node) string {
	f.t.Helper()
	return rigtest.Sh(f.t, n, "ip -4 neigh show proxy; ip -6 neigh show proxy")
}

func mac(t *testing.T, n *rig.Node) string {
	t.Helper()
	// Files below /sys are about the links of another network namespace.
	_, after, _ := strings.Cut(rigtest.Sh(t, n, "ip -o link show dev eth0"), "link/ether ")
	address, _, _ := strings.Cut(after, " ")
	return address
}

// A host on the link reaches pods after ADD, through a restart of coild, and not after DEL; pods of two nodes reach each other. A DEL that
// has returned has withdrawn the address.
func TestPods(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "lan", 2, rig.Dual("10.255.64.0/24", "fd00:255::1:0/120"), v2.AnnounceNeighbor)
	n1, n2 := f.node(), f.node()
	p1, a1 := f.pod(n1, "lan")
	p2, a2 := f.pod(n2, "lan")
	f.reaches(append(a1, a2...), true)
	for _, a := range a2 {
		ping := rigtest.Pings(t, func() (p *netlab.Pinger, err error) { return p1.Ping(a) })
		if sent, answered, err := ping.End(); err != nil || answered < sent {
			t.Errorf("%s from a pod of another node: %d of %d, %v", a, answered, sent, err)
		}
	}
	var pings []*netlab.Pinger
	for _, a := range a1 {
		pings = append(pings, rigtest.Pings(t, func() (*netlab.Pinger, error) { return f.PingOutside(a) }))
	}
	testkit.Check(t, n1.Restart(t.Context()))
	n1.Coild.Kill()
	testkit.Check(t, n1.Start(t.Context()))
	f.metric(n1, `coil_announce_addresses{family="IPv4"}`, "1")
	for _, p := range pings {
		if sent, answered, err := p.End(); err != nil || answered < sent {
			t.Errorf("%s through restarts: %d of %d, %v", p, answered, sent, err)
		}
	}
	f.metric(n1, `coil_repairs_total{kind="neighbour_proxy"}`, "0")
	testkit.Check(t, p1.Del(t.Context()))
	if out := f.answers(n1); out != "" {
		t.Errorf("after DEL the node answers for %s", out)
	}
	f.reaches(a1, false)
	f.reaches(a2, true)
	f.metric(n1, `coil_announce_addresses{family="IPv6"}`, "0")
	// The pod ends while coild is away: the entry goes when it is back.
	n2.Coild.Kill()
	testkit.Check(t, p2.Del(t.Context()), p2.Close())
	if out := f.answers(n2); !strings.Contains(out, a2[0].String()) {
		t.Errorf("the killed coild's entries are %q", out)
	}
	testkit.Check(t, n2.Start(t.Context()))
	f.reaches(a2, false)
	testkit.Check(t, p1.Close(), n1.AwaitClean(t.Context(), 20*time.Second), n2.AwaitClean(t.Context(), 20*time.Second))
}

// metric waits until a metric of coild has a value.
func (f *fixture) metric(n *rig.Node, name, want string) {
	f.t.Helper()
	testkit.Eventually(f.t, 10*time.Second, name+" is "+want, func() error {
		text, err := n.Get(f.t.Context(), "/metrics")
		if err != nil {
			return err
		}
		for line := range strings.Lines(text) {
			if rest, ok := strings.CutPrefix(line, name); ok {
				if strings.TrimSpace(rest) != want {
					return errors.New(line)
				}
				return nil
			}
		}
		return errors.New("there is none")
	})
}

// Running pods follow their pool, and so do kernel parameters. A pool with routes needs none of it.
func TestPoolChanges(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "changing", 2, rig.Dual("10.255.65.0/24", "fd00:255::1:100/120"), v2.AnnounceRoute)
	n := f.node()
	s, addrs := f.pod(n, "changing")
	parameters := func() string {
		return rigtest.Sh(t, n, "cd /proc/sys/net; cat ipv6/conf/all/proxy_ndp ipv4/neigh/eth0/proxy_delay ipv6/neigh/eth0/proxy_delay | xargs")
	}
	if got := f.answers(n) + parameters(); got != "0 80 80\n" {
		t.Errorf("without an announced pool there are %q", got)
	}
	f.reaches(addrs, false)
	testkit.Check(t, f.Announce(t.Context(), "changing", v2.AnnounceNeighbor))
	f.reaches(addrs, true)
	if got := parameters(); got != "1 0 0\n" {
		t.Errorf("parameters are %q", got)
	}
	testkit.Check(t, f.Announce(t.Context(), "changing", v2.AnnounceRoute))
	f.reaches(addrs, false)
	testkit.Check(t, s.Del(t.Context()), s.Close())
}

// An address that another node gets is there as soon as its new pod: hosts that knew the old place are told.
func TestMovedAddress(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "single", 0, rig.Dual("10.255.66.0/32", "fd00:255::1:200/128"), v2.AnnounceNeighbor)
	flags := []string{"--cool-down=1s", "--block-min-age=1s"}
	n1, n2 := f.node(flags...), f.node(flags...)
	p1, addrs := f.pod(n1, "single")
	f.reaches(addrs, true)
	testkit.Check(t, p1.Del(t.Context()), p1.Close())
	testkit.Eventually(t, 30*time.Second, "the block is given back", func() error {
		blocks, err := n1.Blocks(t.Context())
		if err == nil && len(blocks) > 0 {
			err = fmt.Errorf("there is %s", blocks[0].Name)
		}
		return err
	})
	if mac(t, n1) == mac(t, n2) {
		t.Fatalf("both nodes have the MAC address %s", mac(t, n1))
	}
	for _, a := range addrs { // as a host that has sent to it all the time
		f.outside(fmt.Sprintf("ip neigh replace %s lladdr %s dev br0 nud reachable", a, mac(t, n1)))
	}
	p2, again := f.pod(n2, "single")
	if fmt.Sprint(again) != fmt.Sprint(addrs) {
		t.Fatalf("the second pod has %v, not %v", again, addrs)
	}
	for _, a := range addrs {
		testkit.Eventually(t, 10*time.Second, fmt.Sprintf("%s is known at its new place", a), func() error {
			if out := f.outside("ip neigh show " + a.String()); !strings.Contains(out, mac(t, n2)) {
				return errors.New(out)
			}
			return nil
		})
	}
	for _, a := range addrs {
		_, _, err := rigtest.Pings(t, func() (*netlab.Pinger, error) { return f.PingOutside(a) }).End()
		testkit.Check(t, err)
	}
	testkit.Check(t, p2.Del(t.Context()), p2.Close())
}

// A pool of which no link has the subnet is told of once, whatever its pods are, and its pods run.
func TestNoLink(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "remote", 3, rig.Dual("10.77.0.0/24", "fd00:77::/120"), v2.AnnounceNeighbor)
	n := f.node()
	for range 3 {
		f.pod(n, "remote")
	}
	f.metric(n, `coil_announce_homeless_addresses{family="IPv4"}`, "3")
	if out := f.answers(n); out != "" {
		t.Errorf("the node answers for %s", out)
	}
	testkit.Eventually(t, 10*time.Second, "one Event", func() error {
		events, err := f.Core.CoreV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{
			FieldSelector: "reason=NoLinkForAddress,involvedObject.kind=Node,involvedObject.name=" + n.Name,
		})
		if err != nil {
			return err
		}
		if len(events.Items) != 1 || events.Items[0].Type != corev1.EventTypeWarning || !strings.Contains(events.Items[0].Message, "AddressPool remote") || events.Items[0].Count > 1 {
			return fmt.Errorf("there are %+v", events.Items)
		}
		return nil
	})
}

// A node whose Node is deleted answers for nothing, however coild learns it: another machine may have its pods' addresses.
func TestNodeDeleted(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "orphaned", 2, rig.Dual("10.255.67.0/24", "fd00:255::1:300/120"), v2.AnnounceNeighbor)
	for name, do := range map[string]func(*rig.Node){
		"while coild runs": func(n *rig.Node) { testkit.Check(t, n.DeleteObject(t.Context())) },
		"while coild is down": func(n *rig.Node) {
			n.Coild.Kill()
			testkit.Check(t, n.DeleteObject(t.Context()), n.Coild.Start())
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fixture{f.Rig, t}
			n := f.node()
			_, addrs := f.pod(n, "orphaned")
			f.reaches(addrs, true)
			do(n)
			testkit.Eventually(t, 20*time.Second, "the node answers for nothing", func() error {
				if out := f.answers(n); out != "" {
					return errors.New(out)
				}
				return nil
			})
			f.reaches(addrs, false)
		})
	}
}

// Pods of a block that was lost with etcd's data are answered for as before, also by a coild that starts meanwhile and doesn't know how the
// block was announced; until they end.
func TestLostBlock(t *testing.T) {
	f := newFixture(t, "lost", 2, rig.Dual("10.255.69.0/24", "fd00:255::1:500/120"), v2.AnnounceNeighbor)
	n := f.node()
	s, addrs := f.pod(n, "lost")
	other, others := f.pod(n, "lost")
	f.reaches(append(addrs, others...), true)
	blocks := testkit.Must(n.Blocks(t.Context()))(t)
	testkit.Check(t, f.KillController(t.Context()))
	for _, b := range blocks {
		testkit.Check(t, f.DropBlock(t.Context(), b.Name))
	}
	testkit.Check(t, n.Restart(t.Context()))
	f.metric(n, `coil_announce_addresses{family="IPv4"}`, "2")
	f.reaches(append(addrs, others...), true)
	testkit.Check(t, other.Del(t.Context()))
	f.reaches(others, false)
	f.reaches(addrs, true)
	testkit.Check(t, f.Controller.Start())
	testkit.Eventually(t, 30*time.Second, "the block is there again, with its label", func() error {
		now, err := n.Blocks(t.Context())
		if err == nil && (len(now) != len(blocks) || now[0].Labels[v2.LabelAnnounce] != "Neighbor") {
			err = fmt.Errorf("there are %d blocks", len(now))
		}
		return err
	})
	f.reaches(addrs, true)
	testkit.Check(t, s.Del(t.Context()), s.Close(), other.Close())
}

// coild is killed while pods come and go: at the end the node answers for those that there are, and for no others.
func TestKilledWhilePodsComeAndGo(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "busy", 3, rig.Dual("10.255.68.0/24", "fd00:255::1:400/120"), v2.AnnounceNeighbor)
	n := f.node("--cool-down=1s")
	ctx, stop := context.WithCancel(t.Context())
	var workers errgroup.Group
	for range 3 {
		workers.Go(func() error {
			for ctx.Err() == nil {
				s, err := n.NewSandbox(t.Context(), rig.SandboxOptions{Namespace: "busy"})
				if err != nil {
					return err
				}
				_, _ = s.Add(t.Context()) // may meet a coild that is killed: the runtime deletes, then
				if err := untilDone(t.Context(), s.Del); err != nil {
					return err
				}
				if err := s.Close(); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for range 8 {
		time.Sleep(time.Duration(200+rand.IntN(600)) * time.Millisecond) // the load of a while
		n.Coild.Kill()
		testkit.Check(t, n.Start(t.Context()))
	}
	stop()
	testkit.Check(t, workers.Wait())
	var live []netip.Addr
	for range 3 {
		_, addrs := f.pod(n, "busy")
		live = append(live, addrs...)
	}
	f.reaches(live, true)
	testkit.Check(t, n.AwaitClean(t.Context(), 30*time.Second))
	if out := f.answers(n); strings.Count(out, "\n") != len(live) {
		t.Errorf("for pods with %v the node answers for\n%s", live, out)
	}
}

// untilDone repeats a DEL as a runtime does.
func untilDone(ctx context.Context, del func(context.Context) error) error {
	deadline := time.Now().Add(testkit.Timeout(30 * time.Second))
	for {
		err := del(ctx)
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// Another host that says that a pod's address is at it is told by an Event of the pod, which keeps the address.
func TestRival(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "rivals", 2, rig.Dual("10.255.63.0/24", "fd00:255::1:600/120"), v2.AnnounceNeighbor)
	n := f.node()
	s, addrs := f.pod(n, "rivals")
	f.reaches(addrs, true)
	host := testkit.Must(f.NewHost(t.Context(), 91))(t)
	defer host.Close()
	link := testkit.Must(netns.In(host.NS, func() (*net.Interface, error) { return net.InterfaceByName("eth0") }))(t)
	for _, a := range addrs {
		testkit.Eventually(t, 20*time.Second, "an Event tells of "+a.String(), func() error {
			// A node that has just begun to answer may not listen yet.
			if err := announce.Send(host.NS, []announce.Announcement{{Link: link.Index, MAC: link.HardwareAddr, Addr: a}}); err != nil {
				return err
			}
			events, err := f.Core.CoreV1().Events("rivals").List(t.Context(), metav1.ListOptions{
				FieldSelector: "reason=Conflicting,involvedObject.kind=Pod,involvedObject.name=" + s.Name,
			})
			if err != nil {
				return err
			}
			for _, e := range events.Items {
				if strings.Contains(e.Message, a.String()) && strings.Contains(e.Message, link.HardwareAddr.String()) {
					return nil
				}
			}
			return fmt.Errorf("there are %+v", events.Items)
		})
	}
	if out := f.answers(n); strings.Count(out, "\n") != len(addrs) {
		t.Errorf("the node answers for\n%s", out)
	}
	f.reaches(addrs, true)
	testkit.Check(t, s.Del(t.Context()), s.Close())
}
