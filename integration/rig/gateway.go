package rig

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/coil-net/coil/integration/lab/build"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// Gateway is a machine outside of the cluster, which has a coil-lb-agent with the capabilities that its unit of systemd gives it.
type Gateway struct {
	*Program
	Name string
	// Keepalived is the machine's keepalived, which isn't started yet.
	Keepalived *Program
	// NS is the machine's network namespace.
	NS *netlab.NS

	rig *Rig
	api *netlab.Proxy
}

// NewGateway makes a LoadBalancerGateway, and a machine without links whose coil-lb-agent isn't started yet.
func (r *Rig) NewGateway(ctx context.Context, name string, spec v2.LoadBalancerGatewaySpec) (_ *Gateway, err error) {
	g := &Gateway{Name: name, rig: r}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.Close())
		}
	}()
	o := &v2.LoadBalancerGateway{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}
	if _, err := r.Coil.CoilV2().LoadBalancerGateways().Create(ctx, o, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	path, err := (&build.Builder{Log: r.opts.Log}).Own(ctx, "cmd/coil-lb-agent", r.opts.Tags...)
	if err != nil {
		return nil, err
	}
	root, err := build.Root()
	if err != nil {
		return nil, err
	}
	for _, file := range []string{"gateway-rbac.yaml", "gateway-own.yaml"} {
		if _, err := r.API.Kubectl(ctx, "apply", "-f", filepath.Join(root, "manifests", "services", file)); err != nil {
			return nil, err
		}
	}
	kubeconfig, err := r.kubeconfigOf(name, "coil.cybozu.com:lb-gateway:"+name, "coil.cybozu.com:lb-gateways")
	if err != nil {
		return nil, err
	}
	server, err := url.Parse(r.API.RESTConfig().Host)
	if err != nil {
		return nil, err
	}
	if g.NS, err = netlab.New(); err != nil {
		return nil, err
	}
	if g.api, err = netlab.NewProxy(ctx, g.NS, server.Host, server.Host); err != nil {
		return nil, err
	}
	daemon := g.daemon
	if err := errors.Join(os.MkdirAll(daemon(), 0o755), os.WriteFile(daemon("keepalived.conf"), []byte("include coil/*.conf\n"), 0o644)); err != nil {
		return nil, err
	}
	capabilities, err := unitCapabilities(filepath.Join(root, "manifests", "systemd", "coil-lb-agent.service"))
	if err != nil {
		return nil, err
	}
	g.Program = &Program{
		Path: "setpriv", Netns: g.NS.Path(), Log: r.path(name + ".log"),
		Args: []string{
			"--bounding-set=" + capabilities, "--inh-caps=" + capabilities, "--no-new-privs", path,
			"--name=" + name, "--kubeconfig=" + kubeconfig, "--state-dir=" + g.StateDir(), "-v=1", "--keepalived-config=" + daemon("keepalived.conf"),
			"--keepalived-fragment=" + g.Fragment(), "--keepalived-pid-file=" + daemon("pid"), "--keepalived-dump-dir=" + daemon(),
		},
	}
	g.Keepalived = &Program{
		Path: "/usr/sbin/keepalived", Netns: g.NS.Path(), Log: r.path(name + ".keepalived.log"), Env: []string{"TMPDIR=" + daemon()},
		Args: []string{"-n", "-l", "-G", "-f", daemon("keepalived.conf"), "-p", daemon("pid"), "-r", daemon("vrrp.pid")},
	}
	return g, nil
}

// unitCapabilities are those that a unit of systemd gives to its program, as setpriv(1) wants them.
func unitCapabilities(file string) (string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	_, line, found := strings.Cut(string(text), "\nCapabilityBoundingSet=")
	if !found {
		return "", fmt.Errorf("%s: no CapabilityBoundingSet", file)
	}
	line, _, _ = strings.Cut(line, "\n")
	all := "-all"
	for _, c := range strings.Fields(line) {
		all += ",+" + strings.ToLower(strings.TrimPrefix(c, "CAP_"))
	}
	return all, nil
}

// KillKeepalived kills all processes of the machine's keepalived, which are a group, and waits until they are gone: as long as one of them is a zombie, another keepalived
// doesn't start. Its addresses stay.
func (g *Gateway) KillKeepalived(ctx context.Context) error {
	if !g.Keepalived.Running() {
		return nil
	}
	group := -g.Keepalived.PID()
	if err := syscall.Kill(group, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	g.Keepalived.Kill()
	return wait.PollUntilContextTimeout(ctx, 10*time.Millisecond, testkit.Timeout(20*time.Second), true, func(context.Context) (bool, error) {
		return errors.Is(syscall.Kill(group, 0), syscall.ESRCH), nil
	})
}

// CutAPI cuts the machine off from the API server, and connects it again.
func (g *Gateway) CutAPI(cut bool) { g.api.Cut(cut) }

// Cleanup runs coil-lb-agent --cleanup.
func (g *Gateway) Cleanup(ctx context.Context) (string, error) {
	return g.NS.Run(ctx, g.Path, append(slices.Clone(g.Args), "--cleanup")...)
}

// StateDir has the state of coil-lb-agent.
func (g *Gateway) StateDir() string { return g.rig.path(g.Name, "state") }

// Fragment is coil-lb-agent's part of the configuration of keepalived.
func (g *Gateway) Fragment() string { return g.daemon("coil", "coil.conf") }

// daemon is a path of files of keepalived.
func (g *Gateway) daemon(elem ...string) string {
	return g.rig.path(append([]string{g.Name, "keepalived"}, elem...)...)
}

// Close takes the machine away.
func (g *Gateway) Close() error {
	var errs []error
	if g.Program != nil {
		g.Kill()
		errs = append(errs, g.KillKeepalived(context.Background()))
	}
	if g.api != nil {
		errs = append(errs, g.api.Close())
	}
	if g.NS != nil {
		errs = append(errs, g.NS.Close())
	}
	return errors.Join(append(errs, os.RemoveAll(g.rig.path(g.Name)))...)
}
