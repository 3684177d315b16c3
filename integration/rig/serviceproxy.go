package rig

import (
	"context"
	"errors"
	"net/url"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// ServiceProxy is a machine with kube-proxy in its mode nftables.
type ServiceProxy struct {
	*Program
	// NS is the machine's network namespace.
	NS *netlab.NS

	api *netlab.Proxy
}

// NewServiceProxy makes a machine without links whose kube-proxy isn't started yet. It takes the part of a Node, which must be there. Without a cluster CIDR no source is
// translated.
func (r *Rig) NewServiceProxy(ctx context.Context, node string) (_ *ServiceProxy, err error) {
	p := &ServiceProxy{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	bin, err := (&build.Builder{KubernetesVersion: r.opts.KubernetesVersion, Log: r.opts.Log}).Programs(ctx, "kube-proxy")
	if err != nil {
		return nil, err
	}
	cfg, err := r.API.UserConfig("system:kube-proxy")
	if err != nil {
		return nil, err
	}
	kubeconfig := r.path("kube-proxy." + node + ".kubeconfig")
	if err := writeKubeconfig(cfg, kubeconfig); err != nil {
		return nil, err
	}
	server, err := url.Parse(cfg.Host)
	if err != nil {
		return nil, err
	}
	if p.NS, err = netlab.New(); err != nil {
		return nil, err
	}
	if p.api, err = netlab.NewProxy(ctx, p.NS, server.Host, server.Host); err != nil {
		return nil, err
	}
	p.Program = &Program{Path: bin["kube-proxy"], Netns: p.NS.Path(), Log: r.path("kube-proxy." + node + ".log"), Args: []string{
		"--kubeconfig=" + kubeconfig, "--proxy-mode=nftables", "--hostname-override=" + node,
		"--conntrack-max-per-core=0", "--conntrack-min=0", "--conntrack-tcp-timeout-established=0s", "--conntrack-tcp-timeout-close-wait=0s",
	}}
	return p, nil
}

// Close takes the machine away.
func (p *ServiceProxy) Close() error {
	if p.Program != nil {
		p.Kill()
	}
	var errs []error
	if p.api != nil {
		errs = append(errs, p.api.Close())
	}
	if p.NS != nil {
		errs = append(errs, p.NS.Close())
	}
	return errors.Join(errs...)
}
