// Package cluster runs whole Kubernetes clusters on one machine: a fabric, which is a bridge with
// etcd and the control plane beside it, unless that is elsewhere, and nodes, each a machine of its
// own with containerd, kubelet and kube-proxy. It owns a cluster's directory, which records every step before it is
// made, so that Down finds everything, whenever the lab was killed. Except for a directory and
// cgroups nothing is made outside of the machines' namespaces: no link, no mount, no rule.
//
// A test uses it so:
//
//	c, err := cluster.Up(ctx, cluster.Options{Name: "t1", Nodes: 3, Log: os.Stderr})
//	defer cluster.Down(ctx, "t1") // also when Up failed
//	client := kubernetes.NewForConfigOrDie(c.RESTConfig())
//	out, err := c.Exec(ctx, c.Nodes()[1], "ip", "route", "show", "table", "119")
//	err = c.PowerOff(ctx, c.Nodes()[1]) // at once, without goodbye
//	err = c.PowerOn(ctx, c.Nodes()[1])  // same disk, new boot ID
//	err = c.Stop(ctx, cluster.Fabric, "kube-apiserver")
//
// Nodes see the boot ID of the machine package's BootIDFile; its disk is under /var and /opt.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/machine"
)

// Fabric names the machine that connects the nodes and runs the control plane.
const Fabric = "fabric"

// DefaultName is the name of the cluster when none is given.
const DefaultName = "coil"

// DefaultStateDir holds all clusters. It is short, because sockets are in it (unix(7): 107 bytes).
const DefaultStateDir = "/var/lib/coil-lab"

// MaxNodes is the number of nodes that the fabric's addresses suffice for.
const MaxNodes = 200

var nameFormat = regexp.MustCompile(`^[a-z]([-a-z0-9]{0,18}[a-z0-9])?$`)

// Options of Up.
type Options struct {
	Name     string // default DefaultName
	StateDir string // default DefaultStateDir
	Nodes    int    // default 1; the first is the control plane's
	// Families in the order of preference; default IPv4 and IPv6.
	Families []Family
	// KubernetesVersion is as in build.Builder.
	KubernetesVersion string
	// ControlPlane is one elsewhere, whose flags are not this cluster's; nil starts one in the fabric.
	ControlPlane *Remote
	// Images are archives that every node imports, beside the lab's own images.
	Images []string
	// Store is a directory of MakeStore, whose images need no import.
	Store string
	// Kustomize are directories that kubectl applies, in this order.
	Kustomize []string
	// ReferenceCNI configures the reference plugins ptp and host-local with a subnet for each
	// node. Without it no node becomes ready before something else brings a CNI configuration.
	ReferenceCNI bool
	// IPTablesProxies is how many nodes, the last ones, have a kube-proxy in the mode iptables; the others use nftables.
	IPTablesProxies int
	// APIServerArgs and ControllerManagerArgs are further flags of these programs.
	APIServerArgs, ControllerManagerArgs []string
	// Log receives the progress; nil discards it.
	Log io.Writer
}

// defaults fills what is not set.
func (o *Options) defaults() {
	if o.Name == "" {
		o.Name = DefaultName
	}
	if o.StateDir == "" {
		o.StateDir = DefaultStateDir
	}
	if o.Nodes == 0 {
		o.Nodes = 1
	}
	if len(o.Families) == 0 {
		o.Families = []Family{IPv4, IPv6}
	}
	if o.Log == nil {
		o.Log = io.Discard
	}
}

// Validate reports everything that is wrong with the options.
func (o Options) Validate() error {
	errs := []error{o.ControlPlane.validate()}
	if !nameFormat.MatchString(o.Name) {
		errs = append(errs, fmt.Errorf("cluster name %q: want at most 20 lower case letters, digits and hyphens", o.Name))
	}
	if o.Nodes < 1 || o.Nodes > MaxNodes {
		errs = append(errs, fmt.Errorf("%d nodes: want 1 to %d", o.Nodes, MaxNodes))
	}
	if _, err := exec.LookPath("iptables"); o.IPTablesProxies > 0 && err != nil {
		errs = append(errs, fmt.Errorf("kube-proxy in the mode iptables: %w: install the package iptables", err))
	}
	if len(o.Families) > 2 || len(o.Families) == 2 && o.Families[0] == o.Families[1] {
		errs = append(errs, fmt.Errorf("address families %v: want each at most once", o.Families))
	}
	for _, path := range slices.Concat(o.Images, o.Kustomize) {
		if _, err := os.Stat(path); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Cluster is a running cluster.
type Cluster struct {
	dir   string
	log   io.Writer
	build *build.Builder
	rest  *rest.Config

	mu    sync.Mutex // guards state and its file
	state state
}

// Open returns the cluster that Up has made, also in another process. stateDir and name may be
// empty for the defaults.
func Open(stateDir, name string) (*Cluster, error) {
	o := Options{StateDir: stateDir, Name: name}
	o.defaults()
	c := newCluster(o)
	if err := c.load(); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("cluster %q doesn't exist: lab up --name %s", o.Name, o.Name)
		}
		return nil, err
	}
	return c, c.openREST()
}

func newCluster(o Options) *Cluster {
	return &Cluster{
		dir:   filepath.Join(o.StateDir, o.Name),
		log:   o.Log,
		build: &build.Builder{KubernetesVersion: o.KubernetesVersion, Log: o.Log},
	}
}

func (c *Cluster) openREST() error {
	cfg, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil // Up was killed early; Down still has to work
		}
		return err
	}
	cfg.QPS = -1
	c.rest = cfg
	return nil
}

// Name returns the cluster's name.
func (c *Cluster) Name() string { return filepath.Base(c.dir) }

// Dir returns the cluster's directory.
func (c *Cluster) Dir() string { return c.dir }

// Kubeconfig returns the path of cluster-admin's kubeconfig.
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.dir, "kubeconfig") }

// RESTConfig returns cluster-admin's configuration, without client-side rate limiting.
func (c *Cluster) RESTConfig() *rest.Config { return rest.CopyConfig(c.rest) }

// Nodes returns the names of the nodes, that of the control plane first.
func (c *Cluster) Nodes() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var names []string
	for _, n := range c.state.Nodes {
		names = append(names, n.Name)
	}
	return names
}

// Addrs returns the addresses of a node in the fabric, the primary family's first.
func (c *Cluster) Addrs(node string) ([]netip.Addr, error) {
	n, err := c.node(node)
	if err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	for _, f := range c.families() {
		addrs = append(addrs, f.node(n.Index).Addr())
	}
	return addrs, nil
}

// NetNS returns a path to the network namespace of a machine that is on. It is valid until the
// machine is switched off.
func (c *Cluster) NetNS(name string) (string, error) {
	i, err := c.init(name)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("/proc/%d/ns/net", i.PID), nil
}

// Machine returns the directory of a machine, with its disk, logs and control socket.
func (c *Cluster) Machine(name string) machine.Dir { return machine.Dir(filepath.Join(c.dir, name)) }

// Command prepares a command inside a machine, a node or Fabric, as seen by a root shell there.
// When ctx ends before the command, it is killed.
func (c *Cluster) Command(ctx context.Context, name string, args ...string) (*exec.Cmd, error) {
	i, err := c.init(name)
	if err != nil {
		return nil, err
	}
	return c.enter(ctx, i, args...)
}

// Exec runs a command inside a machine and returns its standard output; its standard error is in
// the error.
func (c *Cluster) Exec(ctx context.Context, name string, args ...string) ([]byte, error) {
	cmd, err := c.Command(ctx, name, args...)
	if err != nil {
		return nil, err
	}
	return output(cmd, fmt.Sprintf("%s: %s", name, strings.Join(args, " ")))
}

// Kubectl runs kubectl as cluster-admin and returns its standard output; its standard error is in
// the error.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) ([]byte, error) {
	cmd, err := c.KubectlCommand(ctx, args...)
	if err != nil {
		return nil, err
	}
	return output(cmd, "kubectl "+strings.Join(args, " "))
}

// KubectlCommand prepares a call of kubectl as cluster-admin.
func (c *Cluster) KubectlCommand(ctx context.Context, args ...string) (*exec.Cmd, error) {
	bin := c.programs()["kubectl"]
	if bin == "" {
		return nil, fmt.Errorf("cluster %q has no kubectl: lab up didn't get that far", c.Name())
	}
	cmd := exec.CommandContext(ctx, bin, args...)
	// The cache in the home directory would keep a folder of each cluster that ever was.
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig(), "KUBECACHEDIR="+filepath.Join(c.dir, "kubectl-cache"))
	return cmd, nil
}

// Stop kills a component of a machine, such as "kubelet" of a node or "kube-apiserver" of Fabric;
// it stays down until Start.
func (c *Cluster) Stop(ctx context.Context, name, component string) error {
	return c.control(ctx, name, machine.OpKill, component)
}

// Start starts a stopped component; it doesn't wait until that is ready.
func (c *Cluster) Start(ctx context.Context, name, component string) error {
	return c.control(ctx, name, machine.OpStart, component)
}

func (c *Cluster) control(ctx context.Context, name, op, component string) error {
	if _, err := c.init(name); err != nil {
		return err
	}
	if err := c.Machine(name).Control(ctx, op, component); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// output runs cmd and returns its standard output, or an error with its standard error.
func output(cmd *exec.Cmd, what string) ([]byte, error) {
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return out, fmt.Errorf("%s: %w: %s", what, err, strings.TrimSpace(string(exit.Stderr)))
	}
	if err != nil {
		return out, fmt.Errorf("%s: %w", what, err)
	}
	return out, nil
}
