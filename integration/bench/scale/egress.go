package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/coil-net/coil/integration/audit"
	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	// changesPerSecond is how many clients come or go.
	changesPerSecond = 20
	gateways         = "gateways"  // namespace of the Egress
	customers        = "customers" // namespace of its clients
	gateway          = "nat"
	// ownPod is what coil-egress-controller takes for its own.
	ownPod = "coil-egress-controller-0"
	// madeTimeout is how long all of a large cluster's clients may take.
	madeTimeout = 5 * time.Minute
)

// gatewayCluster is a large cluster with an Egress and its controller.
type gatewayCluster struct {
	rig        *rig.Rig
	dir        string
	controller *rig.Program
	options
}

// newGatewayCluster makes Nodes in racks, each with subnets of its own, as the ranges of an Egress's
// status tell, and starts coil-egress-controller.
func newGatewayCluster(ctx context.Context, o options) (c *gatewayCluster, err error) {
	c = &gatewayCluster{options: o}
	if c.rig, err = rig.New(ctx, rig.Options{NoController: true, Log: o.log}); err != nil {
		return nil, err
	}
	c.dir = c.rig.Dir()
	began := time.Now()
	err = each(ctx, o.nodes, func(ctx context.Context, i int) error {
		n := nodeObject(i)
		const perRack = 40
		rack, place := i/perRack, 1+i%perRack
		n.Status.Addresses[0].Address = netip.AddrFrom4([4]byte{172, byte(16 + rack>>10), byte(rack >> 2), byte(rack<<6 | place)}).String()
		n.Status.Addresses[1].Address = fmt.Sprintf("2001:db8:%x::%x", rack, place)
		_, err := c.rig.Core.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{})
		return err
	})
	fmt.Fprintf(o.log, "%d Nodes in %s\n", o.nodes, time.Since(began).Round(time.Second))
	if err == nil {
		err = errors.Join(
			c.rig.AddPool(ctx, "default", 5, rig.Dual("10.0.0.0/10", "fd00:10::/106")),
			c.rig.AddNamespace(ctx, gateways, ""), c.rig.AddNamespace(ctx, customers, ""),
		)
	}
	if err == nil {
		err = c.startController(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}

func (c *gatewayCluster) close() error {
	if c.controller != nil {
		c.controller.Stop()
	}
	return c.rig.Close()
}

// kubeconfig writes one with the rights of a ServiceAccount.
func (c *gatewayCluster) kubeconfig(account string) (string, error) {
	cfg, err := c.rig.API.UserConfig(audit.User(account), "system:serviceaccounts", "system:serviceaccounts:kube-system")
	if err != nil {
		return "", err
	}
	path := filepath.Join(c.dir, "scale-"+account+".kubeconfig")
	return path, writeKubeconfig(cfg, path)
}

// startController starts the program as it is deployed.
func (c *gatewayCluster) startController(ctx context.Context) error {
	const name = "coil-egress-controller"
	path, err := (&build.Builder{Log: c.log}).Own(ctx, "cmd/"+name)
	if err != nil {
		return err
	}
	kubeconfig, err := c.kubeconfig(name)
	if err != nil {
		return err
	}
	_, err = c.rig.Core.CoreV1().Pods(metav1.NamespaceSystem).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: ownPod},
		Spec:       corev1.PodSpec{HostNetwork: true, Containers: []corev1.Container{{Name: name, Image: "example.org/coil"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	c.controller = &rig.Program{
		Path: path, Args: []string{"--kubeconfig=" + kubeconfig, "--metrics-addr=", "--health-addr="},
		Env: []string{"COIL_POD_NAMESPACE=" + metav1.NamespaceSystem, "COIL_POD_NAME=" + ownPod}, Log: filepath.Join(c.dir, name+".log"),
	}
	return c.controller.Start()
}

// egress makes an Egress of both families.
func (c *gatewayCluster) egress(ctx context.Context, name string, peering v2.EgressPeering) (*v2.Egress, error) {
	return c.rig.Coil.CoilV2().Egresses(gateways).Create(ctx, &v2.Egress{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       v2.EgressSpec{Destinations: []string{"0.0.0.0/0", "::/0"}, Replicas: 2, Peering: peering},
	}, metav1.CreateOptions{})
}

// client makes client i, which runs at once; its name is the pattern of a Deployment's pods.
func (c *gatewayCluster) client(ctx context.Context, i int, node string) (clientPod, error) {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: clientName(i), Annotations: map[string]string{v2.AnnotationEgressPrefix + gateways: gateway},
		},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "app", Image: "example.org/app"}}},
	}
	p, err := c.rig.Core.CoreV1().Pods(customers).Create(ctx, p, metav1.CreateOptions{})
	if err != nil {
		return clientPod{}, err
	}
	made := clientPod{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID)}
	made.Addr4, made.Addr6 = addressesOf(i)
	p.Status = running(i)
	_, err = c.rig.Core.CoreV1().Pods(customers).UpdateStatus(ctx, p, metav1.UpdateOptions{})
	return made, err
}

// addressesOf are those of client i.
func addressesOf(i int) (addr4, addr6 netip.Addr) {
	return netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), netip.MustParseAddr(fmt.Sprintf("fd00:10::%x", 1+i))
}

// running is the status of client i, which is ready.
func running(i int) corev1.PodStatus {
	addr4, addr6 := addressesOf(i)
	return corev1.PodStatus{
		Phase: corev1.PodRunning, PodIP: addr4.String(), PodIPs: []corev1.PodIP{{IP: addr4.String()}, {IP: addr6.String()}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()}},
	}
}

func clientName(i int) string { return fmt.Sprintf("report-generator-7c9f6d5b8f-%05d", i) }

// awaitClients waits until the EndpointSlices have clients in both families.
func (c *gatewayCluster) awaitClients(ctx context.Context, n int) error {
	have := 0
	err := wait.PollUntilContextTimeout(ctx, 200*time.Millisecond, testkit.Timeout(madeTimeout), true, func(ctx context.Context) (bool, error) {
		l, err := c.rig.Core.DiscoveryV1().EndpointSlices(gateways).List(ctx, metav1.ListOptions{LabelSelector: v2.LabelEgress + "=" + gateway})
		if err != nil {
			return false, err
		}
		have = 0
		for _, s := range l.Items {
			have += len(s.Endpoints)
		}
		return have == 2*n, nil
	})
	if err != nil {
		return fmt.Errorf("wait for %d clients, there are %d addresses: %w; the end of the controller's log:\n%s", n, have, err, c.controller.Logs(20))
	}
	return nil
}

// measureClients has clients of an Egress come and go, and measures what that writes into etcd and
// what it costs coilds.
func measureClients(ctx context.Context, o options, rep *report) (err error) {
	c, err := newGatewayCluster(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	if _, err := c.egress(ctx, gateway, v2.EgressPeeringService); err != nil {
		return err
	}
	const busy = "busy" // the node that has clients
	began := time.Now()
	here := make([]clientPod, o.here)
	if err := each(ctx, o.clients, func(ctx context.Context, i int) error {
		node := fmt.Sprintf("worker-%05d.example.internal", i%o.nodes)
		if i < o.here {
			node = busy
		}
		p, err := c.client(ctx, i, node)
		if i < o.here {
			here[i] = p
		}
		return err
	}); err != nil {
		return fmt.Errorf("make clients: %w", err)
	}
	fmt.Fprintf(o.log, "%d clients in %s\n", o.clients, time.Since(began).Round(time.Second))
	if err := c.awaitClients(ctx, o.clients); err != nil {
		return err
	}
	e, err := c.rig.Coil.CoilV2().Egresses(gateways).Get(ctx, gateway, metav1.GetOptions{})
	if err != nil {
		return err
	}
	status, err := json.Marshal(e.Status)
	if err != nil {
		return err
	}
	rep.Figures.Note(fmt.Sprintf("Egress of %d clients, %d nodes in racks: status", o.clients, o.nodes), "KB", float64(len(status))/1000)
	nodes, err := c.startNodes(ctx, busy, here)
	if err != nil {
		return err
	}
	defer nodes.busy.Stop()
	pids := []int{nodes.idle.Coild.PID(), nodes.busy.PID()}
	if err := pass(o.quiet)(ctx); err != nil { // what follows a start isn't measured
		return err
	}
	rest, err := usage(ctx, pids, pass(o.window))
	if err != nil {
		return err
	}
	l, err := watchEtcd(ctx, c.rig.API, "", kindOfKey)
	if err != nil {
		return err
	}
	defer l.close()
	var rate float64
	load, err := usage(ctx, pids, func(ctx context.Context) (err error) {
		rate, err = c.change(ctx, o.window)
		return err
	})
	if err != nil {
		return err
	}
	counts, err := l.counts()
	if err != nil {
		return err
	}
	c.tellClients(rep, rate, counts)
	rep.Figures.Note("a coild without these clients, at rest", "% of a processor", 100*rest[0])
	rep.Figures.AtMost("a coild without these clients: what the changes add", "% of a processor", 100*(load[0]-rest[0]), 0.1)
	rep.Figures.Note(fmt.Sprintf("coild's part for %d clients, at rest", o.here), "% of a processor", 100*rest[1])
	rep.Figures.AtMost(fmt.Sprintf("coild's part for %d clients: what the changes add", o.here), "% of a processor", 100*(load[1]-rest[1]), 1)
	return nil
}

// Kinds of keys.
const (
	kindIPv4, kindIPv6 = "IPv4", "IPv6" // slices of clients
	kindEgress         = "Egress"
	kindOther          = "other"
)

// kindOfKey is the kind of a key that changes of clients write.
func kindOfKey(key string) string {
	switch {
	case strings.HasPrefix(key, registry+"endpointslices/"+gateways+"/"+gateway+"-clients-ipv4-"):
		return kindIPv4
	case strings.HasPrefix(key, registry+"endpointslices/"+gateways+"/"+gateway+"-clients-ipv6-"):
		return kindIPv6
	case strings.HasPrefix(key, registry+"coil.cybozu.com/egresses/"+gateways+"/"):
		return kindEgress
	}
	return kindOther
}

// tellClients tells what was written while clients changed. The status of the Egress counts in each family.
func (c *gatewayCluster) tellClients(rep *report, rate float64, counts map[string]writes) {
	what := fmt.Sprintf("%d changes/s of %d clients", changesPerSecond, c.clients)
	rep.Figures.AtLeast(what+": changes that were made", "/s", rate, 0.95*changesPerSecond)
	seconds := c.window.Seconds()
	status := counts[kindEgress]
	for _, family := range []string{kindIPv4, kindIPv6} {
		slices := counts[family]
		rep.Figures.Note(what+": writes of EndpointSlices, "+family, "/s", float64(slices.Count)/seconds)
		rep.Figures.AtMost(what+": EndpointSlices and the Egress into etcd, "+family, "MB/s", float64(slices.Bytes+status.Bytes)/1e6/seconds, 0.3)
	}
	rep.Figures.Note(what+": writes of the Egress", "/s", float64(status.Count)/seconds)
	rep.Figures.Note(what+": the Egress into etcd", "MB/s", float64(status.Bytes)/1e6/seconds)
	rep.Figures.Note(what+": the rest into etcd, above all the pods", "MB/s", float64(counts[kindOther].Bytes)/1e6/seconds)
}

// change has a client come or go every 50 ms, and returns how many did per second. The first,
// which a node has, never goes.
func (c *gatewayCluster) change(ctx context.Context, window time.Duration) (float64, error) {
	n := int(window.Seconds() * changesPerSecond)
	there := make([]int, 0, c.clients)
	for i := c.here; i < c.clients; i++ {
		there = append(there, i)
	}
	next := c.clients
	began := time.Now()
	tick := time.NewTicker(time.Second / changesPerSecond)
	defer tick.Stop()
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(parallel)
	for i := range n {
		if i%2 == 0 {
			come := next
			next++
			group.Go(func() error {
				_, err := c.client(groupCtx, come, fmt.Sprintf("worker-%05d.example.internal", come%c.nodes))
				return err
			})
		} else {
			at := rand.IntN(len(there))
			goes := there[at]
			there[at] = there[len(there)-1]
			there = there[:len(there)-1]
			group.Go(func() error {
				return c.rig.Core.CoreV1().Pods(customers).Delete(groupCtx, clientName(goes), metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
			})
		}
		select {
		case <-groupCtx.Done():
			return 0, group.Wait()
		case <-tick.C:
		}
	}
	err := group.Wait()
	return float64(n) / time.Since(began).Seconds(), err
}

// clientNodes are a coild without clients of the Egress, and what has some.
type clientNodes struct {
	idle *rig.Node
	busy *rig.Program
}

// startNodes starts both, and waits until all clients are made.
func (c *gatewayCluster) startNodes(ctx context.Context, name string, pods []clientPod) (n clientNodes, err error) {
	if n.idle, err = c.rig.AddNode(ctx, rig.NodeOptions{}); err != nil {
		return n, err
	}
	kubeconfig, err := c.kubeconfig(account)
	if err != nil {
		return n, err
	}
	if _, err := c.rig.Core.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
		return n, err
	}
	config, err := json.Marshal(clientNode{Name: name, Kubeconfig: kubeconfig, Pods: pods})
	if err != nil {
		return n, err
	}
	self, err := os.Executable()
	if err != nil {
		return n, err
	}
	n.busy = &rig.Program{Path: self, Env: []string{clientNodeEnv + "=" + string(config)}, Log: filepath.Join(c.dir, name+".log")}
	if err := n.busy.Start(); err != nil {
		return n, err
	}
	err = wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, testkit.Timeout(madeTimeout), true, func(context.Context) (bool, error) {
		if !n.busy.Running() {
			return false, errors.New("it ended")
		}
		return n.busy.CountLogs(clientsMade) > 0, nil
	})
	if err != nil {
		err = fmt.Errorf("wait for the clients of a node: %w; the end of its log:\n%s", err, n.busy.Logs(20))
		n.busy.Kill()
	}
	return n, err
}
