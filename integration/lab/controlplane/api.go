package controlplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/pki"
	"github.com/coil-net/coil/integration/lab/proc"
	"github.com/coil-net/coil/integration/lab/scratch"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	readyTimeout = 2 * time.Minute
	// A free port can be taken by somebody else before the program that it was meant for
	// listens on it; then everything starts again on other ports.
	startAttempts = 3
)

// Admin is the identity of RESTConfig and of the kubeconfigs that the lab prints.
var Admin = pki.Subject{User: "coil-lab-admin", Groups: []string{"system:masters"}}

// Options of an API server without nodes. The zero value is ready to use.
type Options struct {
	// Dir takes certificates, data and logs. Empty means a new temporary directory, which Stop
	// removes.
	Dir string
	// Data is a file of SaveData with the objects that the cluster begins with. The default is none: the cluster is new.
	Data string
	// KubernetesVersion is as in build.Builder.
	KubernetesVersion string
	// BindAddress of the API server; the default is 127.0.0.1.
	BindAddress netip.Addr
	// Advertise is where nodes reach the API server, at its port. With it, pods need ServiceAccounts.
	Advertise netip.Addr
	// Nodes is the unix socket of an HTTP proxy by which kube-apiserver reaches kubelets, with the method CONNECT. The default is none: it reaches them itself.
	Nodes string
	// ServiceCIDRs default to one IPv4 and one IPv6 range.
	ServiceCIDRs []netip.Prefix
	// APIServerArgs are further flags of kube-apiserver, such as --audit-policy-file.
	APIServerArgs []string
	// Log receives the progress of builds; nil discards it.
	Log io.Writer
}

// API is a running etcd and kube-apiserver.
type API struct {
	config  Config
	opts    Options
	build   *build.Builder
	bin     build.Binaries
	ca      *pki.Authority
	rest    *rest.Config
	scratch *scratch.Dir // nil when the caller gave the directory

	etcd, server *proc.Process
	controllers  []*proc.Process
}

// DefaultServiceCIDRs are the service ranges of a dual-stack cluster.
func DefaultServiceCIDRs() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}
}

// StartAPI starts etcd and kube-apiserver and returns when the API is ready. On an error nothing
// is left running.
func StartAPI(ctx context.Context, opts Options) (_ *API, err error) {
	if len(opts.ServiceCIDRs) == 0 {
		opts.ServiceCIDRs = DefaultServiceCIDRs()
	}
	if !opts.BindAddress.IsValid() {
		opts.BindAddress = netip.MustParseAddr("127.0.0.1")
	}
	a := &API{opts: opts, build: &build.Builder{KubernetesVersion: opts.KubernetesVersion, Log: opts.Log}}
	if a.bin, err = a.build.Programs(ctx, Etcd, APIServer); err != nil {
		return nil, err
	}
	if err := a.makeDir(); err != nil {
		return nil, err
	}
	for attempt := 1; ; attempt++ {
		err = a.start(ctx)
		if err == nil {
			return a, nil
		}
		a.kill()
		if attempt == startAttempts || !errors.Is(err, proc.ErrEnded) {
			return nil, errors.Join(err, a.removeDir())
		}
	}
}

// Attach returns an API that another process runs and that is reached at an address: dir is the
// directory of that one. Its certificate must name the address. Stop leaves it alone.
func Attach(dir string, at netip.AddrPort) (*API, error) {
	a := &API{config: Config{Dir: dir, Bind: at}, build: &build.Builder{}}
	var err error
	if a.ca, err = pki.Open(dir); err != nil {
		return nil, err
	}
	a.rest, err = restConfig(a.ca, a.config.URL(), Admin)
	return a, err
}

// Addr is where the API server listens.
func (a *API) Addr() netip.AddrPort { return a.config.Bind }

// EtcdURL is where etcd listens, without a certificate.
func (a *API) EtcdURL() string { return "http://" + a.config.Etcd.String() }

// Stop ends both programs and removes a temporary directory. It can be called more than once.
func (a *API) Stop() error {
	a.kill()
	return a.removeDir()
}

// RESTConfig returns cluster-admin's configuration, without client-side rate limiting.
func (a *API) RESTConfig() *rest.Config { return rest.CopyConfig(a.rest) }

// Kubeconfig returns the path of cluster-admin's kubeconfig.
func (a *API) Kubeconfig() string { return a.config.path("kubeconfig") }

// Dir returns the directory with the logs: etcd.log and kube-apiserver.log.
func (a *API) Dir() string { return a.config.Dir }

// PIDs are the processes of etcd and kube-apiserver.
func (a *API) PIDs() (etcd, server int) { return a.etcd.PID(), a.server.PID() }

// UserConfig returns a configuration that authenticates with a client certificate of its own.
func (a *API) UserConfig(user string, groups ...string) (*rest.Config, error) {
	return restConfig(a.ca, a.config.URL(), pki.Subject{User: user, Groups: groups})
}

// Kubectl runs kubectl as cluster-admin and returns its standard output; its standard error is
// in the error.
func (a *API) Kubectl(ctx context.Context, args ...string) ([]byte, error) {
	bin, err := a.build.Programs(ctx, Kubectl)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, bin[Kubectl], args...)
	// The cache in the home directory would keep a folder of each server that ever was.
	cmd.Env = append(os.Environ(), "KUBECONFIG="+a.Kubeconfig(), "KUBECACHEDIR="+a.config.path("kubectl-cache"))
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return out, fmt.Errorf("kubectl %q: %w\n%s", args, err, exit.Stderr)
	}
	return out, err
}

// StopServer kills kube-apiserver; etcd keeps the data.
func (a *API) StopServer() {
	if a.server != nil {
		a.server.Kill()
	}
}

// StartServer starts kube-apiserver again on the same address and returns when it is ready.
func (a *API) StartServer(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(readyTimeout))
	defer cancel()
	extra := []string{"--shutdown-delay-duration=0s"}
	if !a.opts.Advertise.IsValid() {
		// Pods that are made by hand have no ServiceAccounts.
		extra = append(extra, "--disable-admission-plugins=ServiceAccount")
	}
	if a.opts.Nodes != "" {
		file, err := a.config.selectEgress(a.opts.Nodes)
		if err != nil {
			return err
		}
		extra = append(extra, "--egress-selector-config-file="+file)
	}
	extra = append(extra, a.opts.APIServerArgs...)
	var err error
	a.server, err = proc.Start(proc.Command{
		Path: a.bin[APIServer],
		Args: a.config.APIServerArgs(extra...),
		Env:  append(os.Environ(), proc.Thrifty()...),
		Log:  a.config.path(APIServer + ".log"),
	})
	if err != nil {
		return err
	}
	return a.server.WaitFor(ctx, func(ctx context.Context) error { return Ready(ctx, a.rest) })
}

// StartControllerManager starts kube-controller-manager, with further flags. It ends with the
// API server; what it does is to be awaited.
func (a *API) StartControllerManager(ctx context.Context, extra ...string) error {
	return a.startController(ctx, ControllerManager, a.config.ControllerManagerArgs(append([]string{"--secure-port=0"}, extra...)...))
}

// StartScheduler starts kube-scheduler, which ends with the API server.
func (a *API) StartScheduler(ctx context.Context) error {
	return a.startController(ctx, Scheduler, append(a.config.SchedulerArgs(), "--secure-port=0"))
}

func (a *API) startController(ctx context.Context, name string, args []string) error {
	bin, err := a.build.Programs(ctx, name)
	if err != nil {
		return err
	}
	p, err := proc.Start(proc.Command{Path: bin[name], Args: args, Env: append(os.Environ(), proc.Thrifty()...), Log: a.config.path(name + ".log")})
	if err == nil {
		a.controllers = append(a.controllers, p)
	}
	return err
}

// Ready returns nil when the API server that config leads to says so.
func Ready(ctx context.Context, config *rest.Config) error {
	client, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return err
	}
	return client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
}

// start makes one attempt on ports that are free now.
func (a *API) start(ctx context.Context) error {
	var err error
	if a.config, err = a.newConfig(); err != nil {
		return err
	}
	if err := a.config.Validate(); err != nil {
		return err
	}
	if a.ca, err = pki.Open(a.config.Dir); err != nil {
		return err
	}
	if err := a.config.Issue(a.ca); err != nil {
		return err
	}
	if err := a.ca.WriteKubeconfig(a.Kubeconfig(), a.config.URL(), "coil-lab-api", Admin); err != nil {
		return err
	}
	if a.rest, err = restConfig(a.ca, a.config.URL(), Admin); err != nil {
		return err
	}
	a.etcd, err = proc.Start(proc.Command{
		Path: a.bin[Etcd],
		Args: a.config.EtcdArgs(),
		Env:  append(os.Environ(), proc.Thrifty()...),
		Log:  a.config.path(Etcd + ".log"),
	})
	if err != nil {
		return err
	}
	etcdCtx, cancel := context.WithTimeout(ctx, testkit.Timeout(readyTimeout))
	defer cancel()
	if err := a.etcd.WaitFor(etcdCtx, func(ctx context.Context) error { return etcdReady(ctx, a.config.Etcd) }); err != nil {
		return err
	}
	if a.opts.Data != "" {
		if err := a.loadData(ctx); err != nil {
			return err
		}
	}
	return a.StartServer(ctx)
}

func (a *API) newConfig() (Config, error) {
	loopback := netip.MustParseAddr("127.0.0.1")
	ports, err := freePorts(loopback, loopback, a.opts.BindAddress)
	if err != nil {
		return Config{}, err
	}
	return Config{
		Dir: a.opts.Dir, Etcd: ports[0], EtcdPeer: ports[1], Bind: ports[2], Advertise: a.opts.Advertise,
		ServiceCIDRs: a.opts.ServiceCIDRs,
	}, nil
}

func (a *API) kill() {
	for _, p := range append(a.controllers, a.server, a.etcd) {
		if p != nil {
			p.Kill()
		}
	}
	a.server, a.etcd, a.controllers = nil, nil, nil
}

// makeDir creates the directory.
func (a *API) makeDir() (err error) {
	if a.opts.Dir == "" {
		if a.scratch, err = scratch.New("coil-lab-api-"); err != nil {
			return err
		}
		a.opts.Dir = a.scratch.Path()
		return nil
	}
	if a.opts.Dir, err = filepath.Abs(a.opts.Dir); err != nil {
		return err
	}
	return os.MkdirAll(a.opts.Dir, 0o700)
}

func (a *API) removeDir() error {
	if a.scratch == nil {
		return nil
	}
	return a.scratch.Remove()
}

// freePorts returns one TCP port for each address, none of them twice.
func freePorts(addrs ...netip.Addr) ([]netip.AddrPort, error) {
	var ports []netip.AddrPort
	for _, addr := range addrs {
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
		if err != nil {
			return nil, fmt.Errorf("find a free port of %s: %w", addr, err)
		}
		defer l.Close() // all stay taken until all are found
		ports = append(ports, l.Addr().(*net.TCPAddr).AddrPort())
	}
	return ports, nil
}

func etcdReady(ctx context.Context, addr netip.AddrPort) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr.String()+"/health", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("etcd is not healthy: %s", resp.Status)
	}
	return nil
}

// restConfig returns an unthrottled client configuration for s.
func restConfig(ca *pki.Authority, server string, s pki.Subject) (*rest.Config, error) {
	kubeconfig, err := ca.Kubeconfig(server, "coil-lab", s)
	if err != nil {
		return nil, err
	}
	c, err := clientcmd.NewDefaultClientConfig(*kubeconfig, nil).ClientConfig()
	if err != nil {
		return nil, err
	}
	c.QPS = -1
	return c, nil
}
