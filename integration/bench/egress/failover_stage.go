package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"

	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/integration/lab/pki"
	"github.com/coil-net/coil/integration/lab/proc"
	"github.com/coil-net/coil/integration/lab/vm"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// The machine's own namespace is the node of the clients, with a real kube-proxy; routers are on
// two other nodes behind a fabric, which never says that one of them is gone:
//
//	fixed ---+                    +-- router1
//	auto ----+- node -- fabric ---+-- router2
//	direct --+                    +-- server
var failoverNetwork = `
netns add fabric
netns add router2
netns add server
link set eth0 up
addr add ` + vm.LinkAddr.String() + ` dev eth0
route add default via ` + vm.HostAddr.String() + `
` + attached("router2", 14) + attached("server", 15) + `
link add uplink type veth peer name node netns fabric
addr add 10.0.16.2/24 dev uplink
addr add fd00:16::2/64 dev uplink nodad
link set uplink up
route add 10.0.13.0/24 via 10.0.16.1
route add 10.0.14.0/24 via 10.0.16.1
route add fd00:13::/64 via fd00:16::1
route add fd00:14::/64 via fd00:16::1
-n fabric addr add 10.0.16.1/24 dev node
-n fabric addr add fd00:16::1/64 dev node nodad
-n fabric link set node up
-n fabric route add 10.0.11.0/24 via 10.0.16.2
-n fabric route add 10.0.12.0/24 via 10.0.16.2
-n fabric route add 10.0.17.0/24 via 10.0.16.2
-n fabric route add fd00:11::/64 via fd00:16::2
-n fabric route add fd00:12::/64 via fd00:16::2
-n fabric route add fd00:17::/64 via fd00:16::2
-n fabric route add blackhole 10.0.13.0/24 metric 4096
-n fabric route add blackhole fd00:13::/64 metric 4096
-n fabric route add 192.0.2.0/24 via 10.0.15.2
-n fabric route add 2001:db8::/64 via fd00:15::2
` + serverAddrs()

// serverAddrs gives the server its addresses.
func serverAddrs() string {
	var b strings.Builder
	for _, family := range families {
		for n := range servers {
			fmt.Fprintf(&b, "-n server addr add %s dev lo\n", server(family, n))
		}
	}
	return b.String()
}

// routerA, router1, is made anew before each round.
var routerA = "netns add router1\n" + attached("router1", 13)

// network makes a client's namespace and connects it with that of the machine.
func (c egressClient) network() string {
	return fmt.Sprintf(`
netns add %[1]s
link add %[1]s type veth peer name eth0 netns %[1]s
addr add 10.0.%[2]d.1/24 dev %[1]s
addr add fd00:%[2]d::1/64 dev %[1]s nodad
link set %[1]s up
-n %[1]s addr add 10.0.%[2]d.2/24 dev eth0
-n %[1]s addr add fd00:%[2]d::2/64 dev eth0 nodad
-n %[1]s link set eth0 up
-n %[1]s link set lo up
-n %[1]s route add default via 10.0.%[2]d.1
-n %[1]s route add default via fd00:%[2]d::1
`, c.name, c.subnet)
}

// nth is the address of a namespace that is attached by the nth subnet.
func nth(n int) ipam.Address {
	return ipam.Address{IPv4: netip.AddrFrom4([4]byte{10, 0, byte(n), 2}), IPv6: netip.MustParseAddr(fmt.Sprintf("fd00:%d::2", n))}
}

// Names of Nodes.
const (
	nodeClients = "clients"
	nodeA       = "router1"
	nodeB       = "router2"
)

// routerEnds are the routers by their nodes.
var routerEnds = map[string]ipam.Address{nodeA: nth(13), nodeB: nth(14)}

// egressClient is a client of an Egress of its own that has its name.
type egressClient struct {
	name    string
	peering v2.EgressPeering
	// auto is spec.fouSourcePortAuto.
	auto   bool
	subnet int
}

// egressClients are in the order of the table.
var egressClients = []egressClient{
	{"fixed", v2.EgressPeeringService, false, 11},
	{"auto", v2.EgressPeeringService, true, 12},
	{"direct", v2.EgressPeeringDirect, false, 17},
}

func (c egressClient) addr() ipam.Address { return nth(c.subnet) }

// sourcePort tells of the source port of tunnels.
func (c egressClient) sourcePort() string {
	if c.auto {
		return "auto"
	}
	return "fixed"
}

// egress is what the client uses.
func (c egressClient) egress() *v2.Egress {
	return &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: c.name}, Spec: v2.EgressSpec{
		Destinations: []string{"192.0.2.0/24", "2001:db8::/64"}, FouSourcePortAuto: c.auto, Peering: c.peering,
	}}
}

// failover is the stage on which routers lose their power.
type failover struct {
	core     kubernetes.Interface
	proxy    *proc.Process
	proxyLog string
	// clients are those of the peerings that are measured, and services the Services of their Egresses.
	clients  []egressClient
	services map[string]*corev1.Service
	variants []variant
}

// has says whether a peering is measured.
func (f *failover) has(p v2.EgressPeering) bool {
	return slices.ContainsFunc(f.clients, func(c egressClient) bool { return c.peering == p })
}

// failoverOf returns a stage that isn't made yet, with the clients of some peerings.
func failoverOf(peerings []string) *failover {
	f := &failover{services: map[string]*corev1.Service{}}
	for _, c := range egressClients {
		if slices.Contains(peerings, string(c.peering)) {
			f.clients = append(f.clients, c)
			for _, family := range families {
				f.variants = append(f.variants, variant{c, family})
			}
		}
	}
	return f
}

// newFailover makes everything but router1 and the client that is direct.
func (o *options) newFailover(ctx context.Context, kubeProxy string) (_ *failover, err error) {
	f := failoverOf(o.peerings)
	if err := netlab.Lines(ctx, failoverNetwork); err != nil {
		return nil, err
	}
	// Otherwise sockets of clients that are direct may send nowhere after a change of routers.
	if err := netlab.Machine().AgeRoutes(ctx, "uplink"); err != nil {
		return nil, err
	}
	if err := errors.Join(forwards(netlab.Machine()), inNamed("fabric", forwards)); err != nil {
		return nil, err
	}
	at := netip.AddrPortFrom(vm.HostAddr, o.apiPort)
	api, err := controlplane.Attach(o.apiDir, at)
	if err != nil {
		return nil, err
	}
	if f.core, err = kubernetes.NewForConfig(api.RESTConfig()); err != nil {
		return nil, err
	}
	for _, n := range []string{nodeClients, nodeB} {
		if err := f.addNode(ctx, n); err != nil {
			return nil, err
		}
	}
	if err := f.startProxy(o.apiDir, at, kubeProxy); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.proxy.Kill()
		}
	}()
	for _, c := range f.clients {
		if err := f.addEgress(ctx, c); err != nil {
			return nil, err
		}
	}
	return f, f.makeRouter(ctx, nodeB)
}

// forwards makes a namespace forward.
func forwards(ns *netlab.NS) error { return errors.Join(ns.Forward(), ns.RPFilter(0)) }

// startProxy starts kube-proxy as the lab's clusters have it.
func (f *failover) startProxy(apiDir string, at netip.AddrPort, program string) error {
	ca, err := pki.Open(apiDir)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "coil-bench-")
	if err != nil {
		return err
	}
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := ca.WriteKubeconfig(kubeconfig, "https://"+at.String(), "lab", pki.Subject{User: "system:kube-proxy"}); err != nil {
		return err
	}
	f.proxyLog = filepath.Join(dir, "kube-proxy.log")
	f.proxy, err = proc.Start(proc.Command{Path: program, Log: f.proxyLog, Args: []string{
		"--kubeconfig=" + kubeconfig, "--proxy-mode=nftables", "--hostname-override=" + nodeClients,
		"--conntrack-max-per-core=0", "--conntrack-min=0", "--conntrack-tcp-timeout-established=0s", "--conntrack-tcp-timeout-close-wait=0s",
	}})
	return err
}

// addEgress makes the Service of an Egress, as coil-egress-controller does, and its client, unless that
// is direct.
func (f *failover) addEgress(ctx context.Context, c egressClient) error {
	e := c.egress()
	s := egress.RouterService(e, port)
	s.OwnerReferences = nil // nobody has made the Egress
	s, err := f.core.CoreV1().Services(s.Namespace).Create(ctx, s, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	f.services[c.name] = s
	if c.peering == v2.EgressPeeringDirect {
		return nil
	}
	if err := errors.Join(netlab.Lines(ctx, c.network()), inNamed(c.name, forwards)); err != nil {
		return err
	}
	used := client.EgressOf(e, s)
	// With fouSourcePortAuto conntrack can't match the answers with a connection to the Service: they have the
	// address of the router. coild knows the routers from EndpointSlices.
	for _, a := range routerEnds {
		for _, addr := range a.Addrs() {
			used.Routers = append(used.Routers, client.Router{Addr: addr, State: client.RouterLive})
		}
	}
	return makeClient(ctx, c.name, c.addr(), used)
}

// makeRouter makes the namespace of a node's name a router of all clients.
func (f *failover) makeRouter(ctx context.Context, node string) error {
	if err := inNamed(node, forwards); err != nil {
		return err
	}
	c, err := newRouter(ctx, node, routerEnds[node])
	if err != nil {
		return err
	}
	var clients []ipam.Address
	for _, c := range f.clients {
		clients = append(clients, c.addr())
	}
	_, err = c.sync(ctx, c.state(clients))
	return err
}

// addNode makes a Node as a kubelet registers it, with its Lease.
func (f *failover) addNode(ctx context.Context, name string) error {
	nodes := f.core.CoreV1().Nodes()
	if _, err := nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
		return err
	}
	now := metav1.Now()
	var status corev1.NodeStatus
	status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.16.2"}, {Type: corev1.NodeInternalIP, Address: "fd00:16::2"}}
	for _, c := range []corev1.NodeConditionType{corev1.NodeReady, corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure} {
		is := corev1.ConditionFalse
		if c == corev1.NodeReady {
			is = corev1.ConditionTrue
		}
		status.Conditions = append(status.Conditions, corev1.NodeCondition{
			Type: c, Status: is, Reason: "Kubelet", LastHeartbeatTime: now, LastTransitionTime: now,
		})
	}
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		n, err := nodes.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		n.Status = status
		_, err = nodes.UpdateStatus(ctx, n, metav1.UpdateOptions{})
		return err
	})
	return errors.Join(err, f.heartbeat(ctx, name))
}

// heartbeat renews the Lease of a Node, as its kubelet does every ten seconds.
func (f *failover) heartbeat(ctx context.Context, node string) error {
	leases := f.core.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	l, err := leases.Get(ctx, node, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		l, err = leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: node}}, metav1.CreateOptions{})
	}
	if err != nil {
		return err
	}
	l.Spec = coordinationv1.LeaseSpec{HolderIdentity: &node, LeaseDurationSeconds: new(int32(40)), RenewTime: new(metav1.NewMicroTime(time.Now()))}
	_, err = leases.Update(ctx, l, metav1.UpdateOptions{})
	return err
}

// setRouters makes the pods of all Egresses on a node be ready, or not.
func (f *failover) setRouters(ctx context.Context, node string, ready bool) error {
	is := corev1.ConditionFalse
	if ready {
		is = corev1.ConditionTrue
	}
	a := routerEnds[node]
	status := corev1.PodStatus{
		Phase: corev1.PodRunning, PodIP: a.IPv4.String(), PodIPs: []corev1.PodIP{{IP: a.IPv4.String()}, {IP: a.IPv6.String()}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: is, LastTransitionTime: metav1.Now()}},
	}
	pods := f.core.CoreV1().Pods(metav1.NamespaceDefault)
	var errs []error
	for _, c := range f.clients {
		errs = append(errs, retry.RetryOnConflict(retry.DefaultBackoff, func() error {
			p, err := pods.Get(ctx, c.name+"-"+node, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				p, err = pods.Create(ctx, &corev1.Pod{
					ObjectMeta: metav1.ObjectMeta{Name: c.name + "-" + node, Labels: plan.RouterLabels(c.name)},
					Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "egress", Image: "egress"}}},
				}, metav1.CreateOptions{})
			}
			if err != nil {
				return err
			}
			p.Status = status
			_, err = pods.UpdateStatus(ctx, p, metav1.UpdateOptions{})
			return err
		}))
	}
	return errors.Join(errs...)
}
