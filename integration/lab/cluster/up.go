package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/integration/lab/machine"
	"github.com/coil-net/coil/integration/lab/pki"
	"github.com/coil-net/coil/integration/lab/preflight"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	machineTimeout = 20 * time.Second
	apiTimeout     = 60 * time.Second
	apiPort        = 6443
)

// labinit is the package of what machines start.
const labinit = "integration/lab/machine/labinit"

// programs of a cluster, beside labinit.
var programs = []string{
	controlplane.Etcd, controlplane.APIServer, controlplane.ControllerManager, controlplane.Scheduler, controlplane.Kubectl,
	"kubelet", "kube-proxy", "containerd", "containerd-shim-runc-v2", "ctr", "loopback", "ptp", "host-local",
}

// Up starts a cluster. It returns when all nodes have registered and the directories of
// Options.Kustomize are applied; WaitReady waits for the nodes to be ready. On an error what has
// been started stays for inspection, until Down.
func Up(ctx context.Context, opts Options) (*Cluster, error) {
	opts.defaults()
	if err := errors.Join(opts.Validate(), preflight.Check(preflight.Cluster)); err != nil {
		return nil, err
	}
	c := newCluster(opts)
	unlock, err := lock(ctx, c.dir, c.log)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(c.up(ctx, opts), unlock()); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *Cluster) up(ctx context.Context, opts Options) error {
	if err := c.create(ctx, opts); err != nil {
		return err
	}
	if err := c.startFabric(ctx, opts); err != nil {
		return err
	}
	group, groupCtx := errgroup.WithContext(ctx)
	for _, name := range c.Nodes() {
		group.Go(func() error { return c.bringUp(groupCtx, name, opts) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if err := errors.Join(c.labelControlPlane(ctx), c.waitServiceAccount(ctx)); err != nil {
		return err
	}
	for _, dir := range opts.Kustomize {
		if err := c.Apply(ctx, dir); err != nil {
			return err
		}
	}
	return nil
}

// Build builds all programs that clusters of a release run, so that Up doesn't have to.
func Build(ctx context.Context, kubernetesVersion string, log io.Writer) error {
	b := &build.Builder{KubernetesVersion: kubernetesVersion, Log: log}
	_, err := b.Programs(ctx, programs...)
	for _, pkg := range []string{labinit, pause} {
		_, ownErr := b.Own(ctx, pkg)
		err = errors.Join(err, ownErr)
	}
	return err
}

// create builds the programs and makes the cluster's directory.
func (c *Cluster) create(ctx context.Context, opts Options) error {
	if _, err := os.Stat(c.dir); err == nil {
		return fmt.Errorf("cluster %q exists: lab down --name %s", c.Name(), c.Name())
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	bin, err := c.build.Programs(ctx, programs...)
	if err != nil {
		return err
	}
	init, err := c.build.Own(ctx, labinit)
	if err != nil {
		return err
	}
	if err := os.Mkdir(c.dir, 0o711); err != nil {
		return err
	}
	if opts.Store == "" {
		if err := c.writeOwnImages(ctx); err != nil {
			return err
		}
	}
	return c.record(func(s *state) {
		*s = state{
			Families: opts.Families, KubernetesVersion: opts.KubernetesVersion, ReferenceCNI: opts.ReferenceCNI,
			ControlPlane: opts.ControlPlane, Programs: bin, Labinit: init,
		}
		for i := range opts.Nodes {
			mode := "nftables"
			if i >= opts.Nodes-opts.IPTablesProxies {
				mode = "iptables"
			}
			s.Nodes = append(s.Nodes, node{Name: nodeName(c.Name(), i), Index: i, MachineID: newMachineID(), ProxyMode: mode})
		}
	})
}

// startFabric starts the machine with the control plane and waits for the API.
func (c *Cluster) startFabric(ctx context.Context, opts Options) error {
	ca, err := pki.Open(c.pkiDir())
	if err != nil {
		return err
	}
	cfg := c.controlPlane()
	if c.remote() == nil {
		fmt.Fprintf(c.log, "starting the control plane\n")
		if err := errors.Join(cfg.Validate(), cfg.Issue(ca)); err != nil {
			return err
		}
	}
	// Clients of the host come in through this socket; the fabric has no link to the host.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer l.Close()
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	defer f.Close()
	err = ca.WriteKubeconfig(c.Kubeconfig(), "https://"+l.Addr().String(), "coil-lab-"+c.Name(), controlplane.Admin)
	if err != nil {
		return err
	}
	if err := c.openREST(); err != nil {
		return err
	}
	err = c.startMachine(ctx, Fabric, machine.Options{
		Spec:      c.fabricSpec(cfg, opts),
		Listeners: []*os.File{f},
		Prepare: func(ctx context.Context, i machine.Init) error {
			if err := c.record(func(s *state) { s.Fabric = &i }); err != nil {
				return err
			}
			return c.wireFabric(ctx, i)
		},
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(apiTimeout))
	defer cancel()
	err = testkit.Poll(ctx, pollPause, func() error { return controlplane.Ready(ctx, c.rest) })
	if err != nil {
		return fmt.Errorf("wait for the API server: %w; see lab logs --name %s %s", err, c.Name(), Fabric)
	}
	if c.remote() != nil {
		return nil
	}
	return errors.Join(
		c.Start(ctx, Fabric, controlplane.ControllerManager),
		c.Start(ctx, Fabric, controlplane.Scheduler),
	)
}

func (c *Cluster) pkiDir() string {
	if r := c.remote(); r != nil {
		return r.Dir
	}
	return string(c.Machine(Fabric)) + "/control-plane"
}

// controlPlane returns the configuration of the control plane: of one elsewhere, where it is.
func (c *Cluster) controlPlane() controlplane.Config {
	if r := c.remote(); r != nil {
		return controlplane.Config{Dir: r.Dir, Bind: r.Addr}
	}
	loopback := netip.MustParseAddr("127.0.0.1")
	cfg := controlplane.Config{
		Dir:       c.pkiDir(),
		Etcd:      netip.AddrPortFrom(loopback, 2379),
		EtcdPeer:  netip.AddrPortFrom(loopback, 2380),
		Bind:      netip.AddrPortFrom(c.families()[0].bridge().Addr(), apiPort),
		Advertise: c.families()[0].bridge().Addr(),
	}
	for _, f := range c.families() {
		cfg.ServiceCIDRs = append(cfg.ServiceCIDRs, plans[f].service)
	}
	return cfg
}

func (c *Cluster) fabricSpec(cfg controlplane.Config, opts Options) machine.Spec {
	bin := c.programs()
	etcd, api := cfg.Etcd.String(), cfg.Bind.String()
	s := machine.Spec{Hostname: c.Name() + "-" + Fabric, Forward: []string{api}}
	if c.remote() == nil {
		s.Components = []machine.Component{
			{Name: controlplane.Etcd, Path: bin[controlplane.Etcd], Args: cfg.EtcdArgs()},
			{
				Name: controlplane.APIServer, Path: bin[controlplane.APIServer],
				Args: cfg.APIServerArgs(opts.APIServerArgs...), After: etcd,
			},
			// Both give up when they come before the API server has made its RBAC rules.
			{
				Name: controlplane.ControllerManager, Path: bin[controlplane.ControllerManager],
				Args: cfg.ControllerManagerArgs(opts.ControllerManagerArgs...), After: api, Manual: true,
			},
			{
				Name: controlplane.Scheduler, Path: bin[controlplane.Scheduler],
				Args: cfg.SchedulerArgs(), After: api, Manual: true,
			},
		}
	}
	return s
}

// bringUp makes one node and waits until it has its images and has registered.
func (c *Cluster) bringUp(ctx context.Context, name string, opts Options) error {
	n, err := c.node(name)
	if err != nil {
		return err
	}
	if err := c.installNode(n); err != nil {
		return fmt.Errorf("install %s: %w", name, err)
	}
	archives := slices.Concat(c.ownImageFiles(), opts.Images)
	if opts.Store != "" {
		archives = opts.Images
		if err := copyStore(ctx, opts.Store, c.Machine(name).Disk("/var/lib/containerd")); err != nil {
			return err
		}
	}
	if err := c.powerOn(ctx, n); err != nil {
		return err
	}
	for _, archive := range archives {
		if err := c.ImportImage(ctx, archive, name); err != nil {
			return err
		}
	}
	if err := c.waitRegistered(ctx, name); err != nil {
		return err
	}
	fmt.Fprintf(c.log, "%s has registered\n", name)
	return nil
}

// startMachine fills in what is the same for every machine and starts it.
func (c *Cluster) startMachine(ctx context.Context, name string, o machine.Options) error {
	c.mu.Lock()
	o.Program = c.state.Labinit
	c.mu.Unlock()
	o.Dir, o.Cgroup = c.Machine(name), c.cgroup(name)
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(machineTimeout))
	defer cancel()
	if _, err := machine.Start(ctx, o); err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	return nil
}

// Apply applies a kustomization.
func (c *Cluster) Apply(ctx context.Context, dir string) error {
	fmt.Fprintf(c.log, "applying %s\n", dir)
	out, err := c.Kubectl(ctx, "apply", "-k", dir)
	if err != nil {
		return err
	}
	fmt.Fprintf(c.log, "%s objects applied\n", countLines(out))
	return nil
}

func countLines(b []byte) string { return fmt.Sprint(strings.Count(string(b), "\n")) }
