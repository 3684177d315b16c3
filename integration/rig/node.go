package rig

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/generated/cnirpc"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

const readyTimeout = 30 * time.Second

// NodeOptions say how a node is. The zero value is ready to use.
type NodeOptions struct {
	// Name defaults to node-1, node-2, …
	Name string
	// CoildFlags and CoildEnv are added to those of coild.
	CoildFlags, CoildEnv []string
	// DiskBytes is the size of the disk of coild's state, an ext4 filesystem of its
	// own; 0 is a folder.
	DiskBytes int64
	// Behind is a plugin of the CNI project, ptp or bridge, that attaches the node's pods in place of Coil, which is behind it.
	Behind string
	// InCluster has coild reach the API server as a pod does: by a token, and by the ClusterIP, which rules of the node translate. See Node.LoseAPI.
	InCluster bool
	// Down leaves it to the caller to start coild.
	Down bool
	// Segment puts the node into a layer-2 network that it shares with the router alone,
	// rather than with the other nodes.
	Segment bool
	// Families are those of the node's addresses, in the order of its InternalIPs; none
	// are both, IPv4 first.
	Families []Family
}

// Node is one node. Its coild can be started and stopped by one goroutine at a time;
// everything else may be called concurrently.
type Node struct {
	Name string
	// Addr4 and Addr6 are the InternalIPs; invalid in a family that the node doesn't have.
	Addr4, Addr6 netip.Addr
	// Coild is the daemon; start it with Node.Start to wait until it is ready.
	Coild *Program

	rig    *Rig
	opts   NodeOptions
	number int
	uid    types.UID
	ns     *netlab.NS // nil while the power is off
	api    *netlab.Proxy
	disk   *disk    // nil without DiskBytes
	before *chained // nil without Behind
	// inCluster is nil without InCluster.
	inCluster *inCluster

	rpc cnirpc.CNIClient
	cc  *grpc.ClientConn

	mu        sync.Mutex
	sandboxes []*Sandbox
}

// AddNode makes a Node object and a node, and starts its coild.
func (r *Rig) AddNode(ctx context.Context, o NodeOptions) (_ *Node, err error) {
	r.mu.Lock()
	r.created++
	if len(o.Families) == 0 {
		o.Families = []Family{IPv4, IPv6}
	}
	n := &Node{Name: o.Name, rig: r, opts: o, number: r.created}
	r.mu.Unlock()
	for _, u := range n.uplinks() {
		if a := u.own.Addr(); a.Is4() {
			n.Addr4 = a
		} else {
			n.Addr6 = a
		}
	}
	if n.Name == "" {
		n.Name = fmt.Sprintf("node-%d", n.number)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("add %s: %w", n.Name, err), n.close())
		}
	}()
	if o.Behind != "" {
		if n.before, err = n.newChained(ctx); err != nil {
			return nil, err
		}
	}
	if err := n.makeDisk(); err != nil {
		return nil, err
	}
	if o.InCluster {
		if n.inCluster, err = n.newInCluster(ctx); err != nil {
			return nil, err
		}
	}
	if err := n.compose(); err != nil {
		return nil, err
	}
	if err := n.PowerOn(ctx); err != nil {
		return nil, err
	}
	if err := n.CreateObject(ctx); err != nil {
		return nil, err
	}
	r.mu.Lock()
	r.nodes = append(r.nodes, n)
	r.mu.Unlock()
	if o.Down {
		return n, nil
	}
	return n, n.Start(ctx)
}

// makeDisk makes the node's folders.
func (n *Node) makeDisk() error {
	for _, dir := range []string{n.run(), n.StateDir(), n.CNIConfDir(), n.path("netns")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	if n.opts.DiskBytes > 0 {
		var err error
		if n.disk, err = newDisk(n.path("disk.img"), n.StateDir(), n.opts.DiskBytes); err != nil {
			return err
		}
	}
	conf, err := json.Marshal(map[string]any{
		"cniVersion": cniVersion, "name": networkName, "plugins": []any{map[string]any{"type": "coil", "socket": n.Socket()}},
	})
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(n.path("machine-id"), []byte(n.MachineID()+"\n"), 0o444),
		os.WriteFile(filepath.Join(n.CNIConfDir(), "10-coil.conflist.staged"), conf, 0o644),
	)
}

// MachineID is that of the node's machine, as its Node has it.
func (n *Node) MachineID() string { return "machine-of-" + n.Name }

// compose says how coild is run, and connects to it whenever it runs.
func (n *Node) compose() error {
	kubeconfig, err := n.rig.kubeconfig("coild")
	if err != nil {
		return err
	}
	n.Coild = &Program{ // Path, Args and Netns come with the power
		Env: append([]string{"COIL_NODE_NAME=" + n.Name, faultpoint.EnvHeld + "=" + n.HeldFile()}, n.opts.CoildEnv...),
		Log: n.path("coild.log"),
	}
	access := []string{"--kubeconfig=" + kubeconfig}
	if n.inCluster != nil {
		ip := clusterIP()
		access = nil
		n.Coild.Env = append(n.Coild.Env, "KUBERNETES_SERVICE_HOST="+ip.Addr().String(), fmt.Sprintf("KUBERNETES_SERVICE_PORT=%d", ip.Port()))
	}
	n.opts.CoildFlags = slices.Concat(access, []string{
		"--socket=" + n.Socket(), "--state-dir=" + n.StateDir(),
		"--boot-id-file=" + n.path("boot-id"), "--machine-id-file=" + n.path("machine-id"), "--cni-conf-dir=" + n.CNIConfDir(),
	}, n.opts.CoildFlags)
	n.cc, err = grpc.NewClient("unix://"+n.Socket(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.2, MaxDelay: 50 * time.Millisecond},
			MinConnectTimeout: time.Second,
		}))
	if err != nil {
		return err
	}
	n.rpc = cnirpc.NewCNIClient(n.cc)
	return nil
}

func (n *Node) path(elem ...string) string {
	return n.rig.path(append([]string{n.Name}, elem...)...)
}

// run is what is empty after a boot.
func (n *Node) run() string { return n.path("run") }

// Socket is where coild listens.
func (n *Node) Socket() string { return filepath.Join(n.run(), "coild.sock") }

// StateDir is coild's --state-dir.
func (n *Node) StateDir() string { return n.path("state") }

// Database is the record of addresses.
func (n *Node) Database() string { return filepath.Join(n.StateDir(), "coild.db") }

// DelQueueDir is where the plugin queues DELs.
func (n *Node) DelQueueDir() string { return filepath.Join(n.StateDir(), "del-queue") }

// CNIConfDir is where coild puts the network configuration in place.
func (n *Node) CNIConfDir() string { return n.path("cni") }

// UID is that of the Node object.
func (n *Node) UID() types.UID { return n.uid }

// NetnsPath leads to the node's network namespace, for nsenter --net.
func (n *Node) NetnsPath() string { return n.ns.Path() }

// Run runs a program in the node's network namespace and returns its output.
func (n *Node) Run(ctx context.Context, name string, args ...string) (string, error) {
	return n.ns.Run(ctx, name, args...)
}

// Exec runs a command in the node's network namespace.
func (n *Node) Exec(cmd *exec.Cmd) error { return n.ns.Exec(cmd) }

// CreateObject makes the Node object, with a UID that it never had.
func (n *Node) CreateObject(ctx context.Context) error {
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name},
		Status:     corev1.NodeStatus{NodeInfo: corev1.NodeSystemInfo{MachineID: n.MachineID()}},
	}
	for _, u := range n.uplinks() {
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: u.own.Addr().String()})
	}
	made, err := n.rig.Core.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create Node %s: %w", n.Name, err)
	}
	n.uid = made.UID
	return nil
}

// DeleteObject deletes the Node object.
func (n *Node) DeleteObject(ctx context.Context) error {
	return n.rig.Core.CoreV1().Nodes().Delete(ctx, n.Name, metav1.DeleteOptions{})
}

// NewBootID gives the node the ID of another boot.
func (n *Node) NewBootID() error {
	return os.WriteFile(n.path("boot-id"), []byte(randomHex(16)+"\n"), 0o644)
}

// PowerOn boots the node; coild isn't started.
func (n *Node) PowerOn(ctx context.Context) (err error) {
	if err := n.NewBootID(); err != nil {
		return err
	}
	if n.ns, err = netlab.New(); err != nil {
		return err
	}
	if err := n.rig.fabric.connect(ctx, n); err != nil {
		return err
	}
	server, err := url.Parse(n.rig.API.RESTConfig().Host)
	if err != nil {
		return err
	}
	if n.api, err = netlab.NewProxy(ctx, n.ns, server.Host, server.Host); err != nil {
		return err
	}
	n.Coild.Netns, n.Coild.Path, n.Coild.Args = n.ns.Path(), n.rig.bin.coild, slices.Clone(n.opts.CoildFlags)
	if n.inCluster != nil {
		n.inCluster.run(n.Coild)
		return n.inCluster.connect(ctx)
	}
	return nil
}

// PowerCut ends the node at once: its programs, pods and kernel state are gone, its
// disk and its Node object stay. Data that was written but not synced to the disk stays
// too.
func (n *Node) PowerCut(ctx context.Context) error {
	n.Coild.Kill()
	errs := []error{n.api.Close()}
	if n.inCluster != nil {
		errs = append(errs, n.inCluster.close())
	}
	for _, s := range n.Sandboxes() {
		n.rig.Ledger.lost(s)
		errs = append(errs, s.RemoveNetns())
	}
	// The fabric's end of the link goes with the namespace, but only after a while.
	_, err := n.rig.fabric.Run(ctx, "ip", "link", "del", fmt.Sprintf("port%d", n.number))
	errs = append(errs, err, n.ns.Close(), os.RemoveAll(n.run()), os.MkdirAll(n.run(), 0o700))
	n.ns, n.api = nil, nil
	return errors.Join(errs...)
}

// CutAPI cuts the node off the API server, or connects it again.
func (n *Node) CutAPI(cut bool) {
	n.api.Cut(cut)
	if n.inCluster != nil {
		n.inCluster.proxy.Cut(cut)
	}
}

// Start starts coild and waits until it serves ADD.
func (n *Node) Start(ctx context.Context) error {
	if err := n.Coild.Start(); err != nil {
		return err
	}
	return n.AwaitReady(ctx, readyTimeout)
}

// AwaitReady waits until STATUS says that ADD is served. It gives up when coild ends.
func (n *Node) AwaitReady(ctx context.Context, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(within))
	defer cancel()
	poll := time.NewTicker(5 * time.Millisecond)
	defer poll.Stop()
	for {
		_, err := n.rpc.Status(ctx, &cnirpc.CNIArgs{})
		if err == nil {
			return nil
		}
		select {
		case <-n.Coild.Ended():
			return fmt.Errorf("coild of %s ended before it was ready; the end of its log:\n%s", n.Name, n.Coild.Logs(20))
		case <-ctx.Done():
			return fmt.Errorf("coild of %s is not ready within %s: %w; the end of its log:\n%s", n.Name, within, err, n.Coild.Logs(20))
		case <-poll.C:
		}
	}
}

// Restart stops coild by SIGTERM, starts it and waits until it serves ADD.
func (n *Node) Restart(ctx context.Context) error {
	n.Coild.Stop()
	return n.Start(ctx)
}

// Get asks coild for a path, such as /metrics.
func (n *Node) Get(ctx context.Context, path string) (string, error) {
	client := &http.Client{Transport: &http.Transport{DialContext: n.Dial, DisableKeepAlives: true}}
	return netlab.Get(ctx, client, "http://127.0.0.1:9384"+path)
}

// Dial connects from the node, as kubelet does for a probe.
func (n *Node) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return n.ns.Dial(ctx, network, address)
}

// Blocks returns the AddressBlocks of the node.
func (n *Node) Blocks(ctx context.Context) ([]v2.AddressBlock, error) {
	list, err := n.rig.Coil.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{LabelSelector: v2.LabelNode + "=" + n.Name})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// Sandboxes are those that weren't closed.
func (n *Node) Sandboxes() []*Sandbox {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.sandboxes)
}

// Remove removes the node with its objects in the API, for a test that comes after.
func (n *Node) Remove(ctx context.Context) error {
	for _, s := range n.Sandboxes() {
		n.rig.Ledger.lost(s)
	}
	errs := []error{n.close()}
	n.rig.mu.Lock()
	n.rig.nodes = slices.DeleteFunc(n.rig.nodes, func(o *Node) bool { return o == n })
	n.rig.mu.Unlock()
	if err := n.DeleteObject(ctx); err != nil && !apierrors.IsNotFound(err) {
		errs = append(errs, err)
	}
	mine := metav1.ListOptions{LabelSelector: v2.LabelNode + "=" + n.Name}
	errs = append(errs, n.rig.Coil.CoilV2().BlockRequests().DeleteCollection(ctx, metav1.DeleteOptions{}, mine))
	blocks, err := n.rig.Coil.CoilV2().AddressBlocks().List(ctx, mine)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, b := range blocks.Items {
		errs = append(errs, n.rig.DropBlock(ctx, b.Name))
	}
	return errors.Join(errs...)
}

// close removes everything but the Node object. The rig ends with it.
func (n *Node) close() error {
	var errs []error
	if n.Coild != nil {
		n.Coild.Kill()
	}
	for _, s := range n.Sandboxes() {
		errs = append(errs, s.RemoveNetns())
	}
	if n.cc != nil {
		errs = append(errs, n.cc.Close())
		n.cc = nil
	}
	if n.api != nil {
		errs = append(errs, n.api.Close())
		n.api = nil
	}
	if n.inCluster != nil {
		errs = append(errs, n.inCluster.close())
	}
	if n.ns != nil {
		errs = append(errs, n.ns.Close())
		n.ns = nil
	}
	if n.disk != nil {
		errs = append(errs, n.disk.unmount())
	}
	return errors.Join(errs...)
}

func randomHex(bytes int) string {
	b := make([]byte, bytes)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}
