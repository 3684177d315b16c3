package rig

import (
	"context"
	"path/filepath"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/pkg/kube"
)

// newController prepares a coil-ipam-controller, which isn't started yet.
func (r *Rig) newController(name string, flags ...string) (*Program, error) {
	kubeconfig, err := r.kubeconfig("coil-ipam-controller")
	if err != nil {
		return nil, err
	}
	return &Program{
		Path: r.bin.controller,
		Args: append([]string{
			"--kubeconfig=" + kubeconfig, "--metrics-addr=", "--health-addr=",
			"--leader-election-retry-period=300ms",
			// Nobody starts it again if it loses its Lease, and an outage that a test makes is long on a slow machine.
			"--leader-election-renew-deadline=10m", "--leader-election-lease-duration=11m",
		}, append(flags, r.opts.ControllerFlags...)...),
		Env: append([]string{"COIL_POD_NAME=" + name}, r.opts.ControllerEnv...),
		Log: r.path(name + ".log"),
	}, nil
}

// KillController kills coil-ipam-controller and takes its Lease away, so that the
// next one need not wait for its end.
func (r *Rig) KillController(ctx context.Context) error {
	r.Controller.Kill()
	return r.TakeLease(ctx, IPAMLease)
}

// SecondController prepares another coil-ipam-controller, which leads too: its Lease is
// in a namespace of its own.
func (r *Rig) SecondController(ctx context.Context) (*Program, error) {
	const name, account = "second-controller", "coil-ipam-controller"
	if err := r.AddNamespace(ctx, name, ""); err != nil {
		return nil, err
	}
	_, err := r.Core.RbacV1().Roles(name).Create(ctx, &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Name: account},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"*"}}},
	}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, err
	}
	_, err = r.Core.RbacV1().RoleBindings(name).Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: account},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: account},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: metav1.NamespaceSystem, Name: account}},
	}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, err
	}
	return r.newController(name, "--leader-election-namespace="+name)
}

// AllowServices installs the rights of coil-lb-controller.
func (r *Rig) AllowServices(ctx context.Context) error {
	root, err := build.Root()
	if err != nil {
		return err
	}
	_, err = r.API.Kubectl(ctx, "apply", "-f", filepath.Join(root, "manifests", "services", "rbac.yaml"))
	return err
}

// As returns clients, without rate limit, with the rights of a ServiceAccount of kube-system. What they write is written in its name.
func (r *Rig) As(account string) (core kubernetes.Interface, coil versioned.Interface, err error) {
	user, groups := userOf(metav1.NamespaceSystem, account)
	cfg, err := r.API.UserConfig(user, groups...)
	if err != nil {
		return nil, nil, err
	}
	cfg.UserAgent = account
	if core, err = kubernetes.NewForConfig(kube.Protobuf(cfg)); err == nil {
		coil, err = versioned.NewForConfig(cfg)
	}
	return core, coil, err
}

// NewLBController installs the rights of coil-lb-controller, and prepares it with a default pool. It isn't started yet.
func (r *Rig) NewLBController(ctx context.Context, pool string) (*Program, error) {
	const name = "coil-lb-controller"
	path, err := (&build.Builder{Log: r.opts.Log}).Own(ctx, "cmd/"+name, r.opts.Tags...)
	if err != nil {
		return nil, err
	}
	if err := r.AllowServices(ctx); err != nil {
		return nil, err
	}
	kubeconfig, err := r.kubeconfig(name)
	if err != nil {
		return nil, err
	}
	return &Program{
		Path: path, Log: r.path(name + ".log"), Env: []string{"COIL_POD_NAMESPACE=" + metav1.NamespaceSystem, "COIL_POD_NAME=" + name},
		Args: []string{
			"--kubeconfig=" + kubeconfig, "--metrics-addr=", "--health-addr=", "--default-pool=" + pool, "--leader-election-retry-period=300ms",
			"--leader-election-renew-deadline=10m", "--leader-election-lease-duration=11m",
		},
	}, nil
}
