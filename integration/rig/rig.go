// Package rig runs Coil on this machine without kubelet and container runtime:
// etcd, kube-apiserver, coil-ipam-controller, and nodes that are network
// namespaces with a coild each. It plays the runtime's part, keeps account of what
// it was answered, and compares that with record, kernel and API server.
//
// It owns what it starts, and nothing of it outlives the process: namespaces live
// by open files, programs die with their parent. The machine's own network
// namespace is never changed. It must not know what is tested or measured; it needs
// root, but no testing.TB.
//
//	r, err := rig.New(ctx, rig.Options{})
//	defer r.Close()
//	err = r.AddPool(ctx, "default", 5, rig.Dual("10.0.0.0/16", "fd00::/112"))
//	n, err := r.AddNode(ctx, rig.NodeOptions{}) // coild is ready
//	s, err := n.NewSandbox(ctx, rig.SandboxOptions{})
//	result, err := s.Add(ctx)
//	err = r.AwaitClean(ctx, 10*time.Second)
package rig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/integration/lab/scratch"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

const scratchPrefix = "coil-rig-"

// Options of a rig. The zero value is ready to use.
type Options struct {
	// KubernetesVersion is as in build.Builder.
	KubernetesVersion string
	// Tags are build tags of coild and coil-ipam-controller, such as faultpoints.
	Tags []string
	// NoController leaves it to the caller to start coil-ipam-controller.
	NoController bool
	// ControllerFlags and ControllerEnv are added to those of coil-ipam-controller.
	ControllerFlags, ControllerEnv []string
	// APIServerArgs are further flags of kube-apiserver.
	APIServerArgs []string
	// API is one that another rig has started, in which everything is installed; nil starts one.
	API *controlplane.API
	// Log receives the progress of builds; nil discards it.
	Log io.Writer
}

// Rig is a running one.
type Rig struct {
	// API has the API server; API.StopServer and API.StartServer make an outage.
	API *controlplane.API
	// Core and Coil are cluster-admin's clients, without rate limit.
	Core kubernetes.Interface
	Coil versioned.Interface
	// Controller is coil-ipam-controller.
	Controller *Program
	// Ledger has what the nodes answered.
	Ledger *Ledger

	opts    Options
	scratch *scratch.Dir
	bin     struct{ coild, coil, controller string }
	fabric  *fabric

	kubeconfigs sync.Mutex // while one is written

	mu      sync.Mutex
	nodes   []*Node
	created int // nodes so far
	pods    int // sandboxes so far
}

// New starts the API server and the controller. On an error nothing is left.
func New(ctx context.Context, o Options) (_ *Rig, err error) {
	if err := unmountAbandoned(); err != nil {
		return nil, err
	}
	r := &Rig{opts: o, Ledger: newLedger()}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	if r.scratch, err = scratch.New(scratchPrefix); err != nil {
		return nil, err
	}
	builds, ctxBuild := errgroup.WithContext(ctx)
	builds.Go(func() error { return r.build(ctxBuild) })
	builds.Go(func() (err error) {
		if r.API = o.API; r.API == nil {
			r.API, err = startInstalled(ctxBuild, controlplane.Options{KubernetesVersion: o.KubernetesVersion, APIServerArgs: o.APIServerArgs, Log: o.Log})
		}
		return err
	})
	if err := builds.Wait(); err != nil {
		return nil, err
	}
	cfg := r.API.RESTConfig()
	if r.Core, err = kubernetes.NewForConfig(cfg); err != nil {
		return nil, err
	}
	if r.Coil, err = versioned.NewForConfig(cfg); err != nil {
		return nil, err
	}
	if o.API == nil {
		if err := errors.Join(r.makeKeyring(ctx), r.awaitDefinitions(ctx)); err != nil {
			return nil, err
		}
	}
	if r.fabric, err = newFabric(ctx); err != nil {
		return nil, err
	}
	if r.Controller, err = r.newController("controller"); err != nil {
		return nil, err
	}
	if !o.NoController {
		return r, r.Controller.Start()
	}
	return r, nil
}

// build compiles what runs.
func (r *Rig) build(ctx context.Context) (err error) {
	b := &build.Builder{Log: r.opts.Log}
	if r.bin.coil, err = b.Own(ctx, "cmd/coil"); err != nil {
		return err
	}
	if r.bin.coild, err = b.Own(ctx, "cmd/coild", r.opts.Tags...); err != nil {
		return err
	}
	r.bin.controller, err = b.Own(ctx, "cmd/coil-ipam-controller", r.opts.Tags...)
	return err
}

// kubeconfig writes a kubeconfig with the rights of a ServiceAccount of kube-system,
// unless there is one, and returns its path.
func (r *Rig) kubeconfig(account string) (string, error) {
	return r.kubeconfigIn(metav1.NamespaceSystem, account)
}

// kubeconfigIn is kubeconfig for a ServiceAccount of a namespace.
func (r *Rig) kubeconfigIn(namespace, account string) (string, error) {
	user, groups := userOf(namespace, account)
	return r.kubeconfigOf(namespace+"."+account, user, groups...)
}

// userOf is what the API server knows a ServiceAccount as.
func userOf(namespace, account string) (user string, groups []string) {
	return "system:serviceaccount:" + namespace + ":" + account, []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace}
}

// kubeconfigOf is kubeconfig for any user; name is that of the file.
func (r *Rig) kubeconfigOf(name, user string, groups ...string) (string, error) {
	r.kubeconfigs.Lock()
	defer r.kubeconfigs.Unlock()
	path := r.path(name + ".kubeconfig")
	if exists(path) {
		return path, nil
	}
	cfg, err := r.API.UserConfig(user, groups...)
	if err != nil {
		return "", err
	}
	return path, writeKubeconfig(cfg, path)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func writeKubeconfig(cfg *rest.Config, path string) error {
	const name = "rig"
	k := clientcmdapi.NewConfig()
	k.Clusters[name] = &clientcmdapi.Cluster{Server: cfg.Host, CertificateAuthorityData: cfg.CAData}
	k.AuthInfos[name] = &clientcmdapi.AuthInfo{ClientCertificateData: cfg.CertData, ClientKeyData: cfg.KeyData}
	k.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	k.CurrentContext = name
	if err := clientcmd.WriteToFile(*k, path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// DropBlock removes a block whatever holds it.
func (r *Rig) DropBlock(ctx context.Context, name string) error {
	blocks := r.Coil.CoilV2().AddressBlocks()
	_, err := blocks.Patch(ctx, name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
	if err == nil {
		err = blocks.Delete(ctx, name, metav1.DeleteOptions{})
	}
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func (r *Rig) path(elem ...string) string { return r.scratch.Path(elem...) }

// Dir is the folder of everything that the rig writes; Close removes it.
func (r *Rig) Dir() string { return r.scratch.Path() }

// Close removes everything. It can be called more than once.
func (r *Rig) Close() error {
	var errs []error
	for _, n := range r.Nodes() {
		errs = append(errs, n.close())
	}
	if r.Controller != nil {
		r.Controller.Kill()
	}
	if r.fabric != nil {
		errs = append(errs, r.fabric.Close())
		r.fabric = nil
	}
	if r.API != nil {
		errs = append(errs, r.API.Stop())
	}
	if r.scratch != nil {
		errs = append(errs, r.scratch.Remove())
	}
	return errors.Join(errs...)
}

// Nodes are those that were added and not removed.
func (r *Rig) Nodes() []*Node {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]*Node(nil), r.nodes...)
}

// V4 is a subnet of one family.
func V4(cidr string) v2.SubnetSet { return v2.SubnetSet{IPv4: &cidr} }

// V6 is a subnet of one family.
func V6(cidr string) v2.SubnetSet { return v2.SubnetSet{IPv6: &cidr} }

// Dual is a subnet of both families.
func Dual(cidr4, cidr6 string) v2.SubnetSet { return v2.SubnetSet{IPv4: &cidr4, IPv6: &cidr6} }

// AddPool makes an AddressPool of blocks of 2^bits addresses.
func (r *Rig) AddPool(ctx context.Context, name string, bits int32, subnets ...v2.SubnetSet) error {
	p := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.AddressPoolSpec{BlockSizeBits: bits, Subnets: subnets}}
	if _, err := r.Coil.CoilV2().AddressPools().Create(ctx, p, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create AddressPool %s: %w", name, err)
	}
	return nil
}

// Announce changes how the addresses of a pool are announced.
func (r *Rig) Announce(ctx context.Context, pool string, by v2.PoolAnnounce) error {
	patch := fmt.Appendf(nil, `{"spec":{"announce":%q}}`, by)
	_, err := r.Coil.CoilV2().AddressPools().Patch(ctx, pool, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// AddNamespace makes a Namespace that uses a pool; an empty one is the default pool.
func (r *Rig) AddNamespace(ctx context.Context, name, pool string) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if pool != "" {
		ns.Annotations = map[string]string{v2.AnnotationPool: pool}
	}
	if _, err := r.Core.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create Namespace %s: %w", name, err)
	}
	return nil
}

// unmountAbandoned unmounts what a killed process has left in its folder, which can
// then be removed.
func unmountAbandoned() error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	prefix := filepath.Join(os.TempDir(), scratchPrefix)
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		if len(fields) < 5 || !strings.HasPrefix(fields[4], prefix) {
			continue
		}
		dir, _, _ := strings.Cut(fields[4][len(prefix):], "/")
		lock, err := os.Open(prefix + dir + "/lock")
		if err != nil {
			continue
		}
		if unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			err = unix.Unmount(fields[4], unix.MNT_DETACH)
		}
		if err := errors.Join(err, lock.Close()); err != nil {
			return fmt.Errorf("unmount %s: %w", fields[4], err)
		}
	}
	return nil
}
