package rig

import (
	"context"
	"path/filepath"

	"github.com/coil-net/coil/integration/lab/build"
)

// NewRouter installs the rights of coil-router, and returns the node's, which the caller starts
// and ends.
func (n *Node) NewRouter(ctx context.Context) (*Program, error) {
	path, err := (&build.Builder{Log: n.rig.opts.Log}).Own(ctx, "cmd/coil-router")
	if err != nil {
		return nil, err
	}
	root, err := build.Root()
	if err != nil {
		return nil, err
	}
	if _, err := n.rig.API.Kubectl(ctx, "apply", "-f", filepath.Join(root, "manifests", "router", "rbac.yaml")); err != nil {
		return nil, err
	}
	kubeconfig, err := n.rig.kubeconfig("coil-router")
	if err != nil {
		return nil, err
	}
	return &Program{
		Path: path, Args: []string{"--kubeconfig=" + kubeconfig}, Netns: n.NetnsPath(),
		Env: []string{"COIL_NODE_NAME=" + n.Name}, Log: n.path("coil-router.log"),
	}, nil
}
