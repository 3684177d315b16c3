package native

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// Addresses of the server outside, and its port.
var (
	server4, server6 = netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("2001:db8:f::1")
	servers          = []netip.Addr{server4, server6}
)

const serverPort = 8000

// world has nodes whose pods use an Egress with floating addresses that are announced to neighbours, and a server outside, on the nodes' network.
type world struct {
	*rig.Rig
	t          *testing.T
	nodes      []*rig.Node
	forwarding map[*rig.Node]*rig.Program // coil-router of each
	controller *rig.Program               // coil-egress-controller
	egress     *rig.Egress
	server     *netlab.NS
	// addresses are the pairs that the Egress has.
	addresses []v2.EgressAddressStatus
}

// worlds counts them: each has addresses of its own.
var worlds atomic.Int32

// newWorld returns a world of some nodes, with a router on each, whose Egress has some addresses.
func newWorld(t *testing.T, nodes, addresses int, change func(*v2.EgressSpec)) *world {
	t.Helper()
	w, ctx, n := &world{Rig: shared.Rig(t), t: t, forwarding: map[*rig.Node]*rig.Program{}}, t.Context(), worlds.Add(1)
	if n == 1 {
		testkit.Check(t, w.AddPool(ctx, "default", 4, rig.Dual("10.0.0.0/16", "fd00::/112")))
	}
	namespace, pool := fmt.Sprint("internet-", n), fmt.Sprint("partners-", n)
	testkit.Check(t, w.AddNamespace(ctx, namespace, ""),
		w.AddPool(ctx, pool, 0, rig.Dual(fmt.Sprintf("10.255.%d.0/28", 100+n), fmt.Sprintf("fd00:255::1:%x00/124", n))),
		w.Announce(ctx, pool, v2.AnnounceNeighbor))
	w.newServer()
	w.controller = testkit.Must(w.NewEgressController(ctx))(t)
	testkit.Check(t, w.controller.Start())
	t.Cleanup(func() {
		w.controller.Kill()
		testkit.Check(t, w.TakeLease(context.WithoutCancel(ctx), rig.EgressLease))
	})
	for range nodes {
		w.addNode()
	}
	t.Cleanup(func() {
		if t.Failed() {
			w.tell()
		}
		for _, n := range w.nodes {
			w.forwarding[n].Kill()
			testkit.Check(t, n.Remove(context.WithoutCancel(ctx)))
		}
	})
	spec := v2.EgressSpec{
		Replicas: int32(nodes), Destinations: []string{"0.0.0.0/0", "::/0"}, Peering: v2.EgressPeeringDirect,
		Addresses: &v2.EgressAddresses{Use: v2.EgressAddressOfClient, Pool: pool, Count: new(int32(addresses))},
	}
	if change != nil {
		change(&spec)
	}
	w.egress = testkit.Must(w.NewEgress(ctx, namespace, "nat", spec))(t)
	t.Cleanup(func() {
		ctx, now := context.WithoutCancel(ctx), metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}
		testkit.Check(t, w.egress.Close(), w.Coil.CoilV2().Egresses(namespace).Delete(ctx, w.egress.Name, now),
			w.Coil.CoilV2().AddressClaims(namespace).DeleteCollection(ctx, now, metav1.ListOptions{}), w.Core.CoreV1().Pods(namespace).DeleteCollection(ctx, now, metav1.ListOptions{}))
	})
	for _, n := range w.nodes {
		testkit.Must(w.egress.AddRouter(ctx, n))(t)
	}
	w.awaitHeld()
	return w
}

// addNode adds a node that reaches the pods of the others.
func (w *world) addNode() {
	w.t.Helper()
	n := testkit.Must(w.AddNode(w.t.Context(), rig.NodeOptions{}))(w.t)
	w.nodes = append(w.nodes, n)
	w.forward(n)
}

// forward starts coil-router on a node.
func (w *world) forward(n *rig.Node) {
	w.t.Helper()
	testkit.Check(w.t, n.ForwardPods())
	w.forwarding[n] = testkit.Must(n.NewRouter(w.t.Context()))(w.t)
	testkit.Check(w.t, w.forwarding[n].Start())
}

// newServer makes the server outside. It answers each TCP connection with the address that it sees, and what it is sent.
func (w *world) newServer() {
	t, ctx := w.t, w.t.Context()
	w.server = testkit.Must(w.NewHost(ctx, 1))(t)
	t.Cleanup(func() {
		// The fabric's end of the link goes with the namespace, but only after a while.
		testkit.Must(w.RunRouter(context.WithoutCancel(ctx), "ip", "link", "del", "host1"))(t)
		testkit.Check(t, w.server.Close())
	})
	testkit.Check(t, w.server.IP(ctx, "addr add 203.0.113.1/32 dev lo", "addr add 2001:db8:f::1/128 dev lo nodad", "route add default via 10.255.0.1", "route add default via fd00:255::1"))
	testkit.Must(w.RunRouter(ctx, "sh", "-ec", "ip route replace 203.0.113.0/24 via 10.255.200.1; ip route replace 2001:db8:f::/64 via fd00:255::c8:1"))(t)
	l := testkit.Must(w.server.Listen(ctx, "tcp", fmt.Sprint(":", serverPort)))(t)
	t.Cleanup(func() { l.Close() })
	go netlab.Serve(l, func(conn net.Conn) {
		fmt.Fprintln(conn, conn.RemoteAddr())
		_, _ = io.Copy(conn, conn)
	})
}

// awaitHeld waits until all routers are ready and each address is on a node.
func (w *world) awaitHeld() {
	w.t.Helper()
	testkit.Eventually(w.t, 30*time.Second, "each address is on a node", func() error {
		for _, r := range w.egress.Routers() {
			if !r.Ready() {
				return errors.Join(fmt.Errorf("router %s isn't ready: %s", r.Name, r.Program.Logs(3)), w.egress.Trouble())
			}
		}
		e, err := w.Coil.CoilV2().Egresses(w.egress.Namespace).Get(w.t.Context(), w.egress.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if !meta.IsStatusConditionTrue(e.Status.Conditions, v2.EgressAddressesReady) {
			return errors.Join(fmt.Errorf("%+v", e.Status), w.egress.Trouble())
		}
		w.addresses = e.Status.Addresses
		return nil
	})
}

// choose makes an EgressPolicy for the pods of namespace default with the label app of a value.
func (w *world) choose(name, app string) {
	w.t.Helper()
	p := &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
	p.Spec.Pods = &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}
	p.Spec.Egress = &v2.EgressReference{Namespace: w.egress.Namespace, Name: w.egress.Name}
	policies := w.Coil.CoilV2().EgressPolicies(metav1.NamespaceDefault)
	testkit.Must(policies.Create(w.t.Context(), p, metav1.CreateOptions{}))(w.t)
	w.t.Cleanup(func() {
		testkit.Check(w.t, policies.Delete(context.WithoutCancel(w.t.Context()), name, metav1.DeleteOptions{}))
	})
}

// sources are the addresses by which the pods of a policy leave, once it has them.
func (w *world) sources(policy string) (addrs []netip.Addr) {
	w.t.Helper()
	testkit.Eventually(w.t, 20*time.Second, "policy "+policy+" has an address", func() error {
		p, err := w.Coil.CoilV2().EgressPolicies(metav1.NamespaceDefault).Get(w.t.Context(), policy, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if p.Status.Resolved == nil || p.Status.Resolved.Address == nil {
			return fmt.Errorf("%+v", p.Status)
		}
		a := p.Status.Resolved.Address
		addrs = []netip.Addr{netip.MustParseAddr(a.IPv4), netip.MustParseAddr(a.IPv6)}
		return nil
	})
	return addrs
}

// newPod adds a pod of namespace default with the label app of a value.
func (w *world) newPod(n *rig.Node, app string) *pod {
	w.t.Helper()
	p := &pod{Sandbox: testkit.Must(n.NewSandbox(w.t.Context(), rig.SandboxOptions{Labels: map[string]string{"app": app}}))(w.t)}
	w.attach(p)
	return p
}

// attach adds a pod to the network, as kubelet does.
func (w *world) attach(p *pod) {
	w.t.Helper()
	testkit.Eventually(w.t, 20*time.Second, "the pod is added", func() error {
		result, err := p.Add(w.t.Context())
		p.addrs = result.Addrs
		return err
	})
	testkit.Check(w.t, p.Report(w.t.Context(), p.addrs, true))
}

// pod is one with its addresses.
type pod struct {
	*rig.Sandbox
	addrs []netip.Addr
}

// seen is the address that the server sees of a TCP connection of the pod.
func (p *pod) seen(ctx context.Context, to netip.Addr) (netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(2*time.Second))
	defer cancel()
	conn, err := p.Dial(ctx, "tcp", netip.AddrPortFrom(to, serverPort).String())
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	var text string
	if err := conn.SetDeadline(time.Now().Add(testkit.Timeout(2 * time.Second))); err != nil {
		return netip.Addr{}, err
	}
	if _, err := fmt.Fscanln(conn, &text); err != nil {
		return netip.Addr{}, err
	}
	a, err := netip.ParseAddrPort(text)
	return a.Addr().Unmap(), err
}

// tell logs what the programs said.
func (w *world) tell() {
	for _, n := range w.nodes {
		w.t.Logf("the end of the log of %s:\n%s", n.Name, n.Coild.Logs(30))
	}
	if w.egress != nil {
		for _, r := range w.egress.Routers() {
			w.t.Logf("the end of the log of %s:\n%s", r.Name, r.Program.Logs(30))
		}
	}
	w.t.Logf("the end of the log of coil-egress-controller:\n%s", w.controller.Logs(30))
}

// family returns the address of the family of another one.
func family(addrs []netip.Addr, like netip.Addr) netip.Addr {
	i := slices.IndexFunc(addrs, func(a netip.Addr) bool { return a.Is4() == like.Is4() })
	return addrs[i]
}
