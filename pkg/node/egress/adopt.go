package egress

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
)

// Adoption finds running pods whose record lacks their network namespace or their name: pods of
// Coil 2.x, and pods whose record was lost.
type Adoption struct {
	// Dir is where container runtimes bind the network namespaces of pods.
	Dir string
	// Pods are those that the API server has, by their addresses.
	Pods map[netip.Addr]store.Pod
	// Host knows better than a pod that has given itself the address of another.
	Host *podnet.Network
}

// Adopt looks into each network namespace for the address of a pod. The sandboxes that are known come
// back completed, and others are added.
func (a Adoption) Adopt(ctx context.Context, known []node.Sandbox) ([]node.Sandbox, error) {
	entries, err := os.ReadDir(a.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("look for network namespaces of pods: %w", err)
	}
	all := slices.Clone(known)
	for _, e := range entries {
		path := filepath.Join(a.Dir, e.Name())
		found, err := a.inspect(ctx, path)
		if err != nil {
			// A namespace that is being made or removed is no pod's yet, or no more.
			klog.FromContext(ctx).V(2).Info("Can't look into a network namespace", "path", path, "reason", err)
			continue
		}
		if found.Address == (ipam.Address{}) || slices.ContainsFunc(all, func(s node.Sandbox) bool { return s.Inode == found.Inode && s.Name != "" }) {
			continue
		}
		i := slices.IndexFunc(all, func(s node.Sandbox) bool { return s.Inode == 0 && s.Address == found.Address })
		if i < 0 {
			all = append(all, found)
			continue
		}
		found.ID = all[i].ID
		all[i] = found
	}
	return all, nil
}

// inspect returns the sandbox of the pod that has a network namespace; without an address if
// none has.
func (a Adoption) inspect(ctx context.Context, path string) (node.Sandbox, error) {
	ns, err := netns.Open(path)
	if err != nil {
		return node.Sandbox{}, err
	}
	defer ns.Close()
	h, err := rtnl.NewOfPod(ns)
	if err != nil {
		return node.Sandbox{}, err
	}
	defer h.Close()
	addrs, err := h.Addrs(ctx)
	if err != nil {
		return node.Sandbox{}, err
	}
	// Nothing tells the container's ID. Its DEL doesn't matter: the namespace goes.
	s := node.Sandbox{ID: attachment.ID{ContainerID: "netns-" + filepath.Base(path)}, Netns: store.Netns{Path: path, Inode: ns.Inode()}}
	for _, addr := range addrs {
		pod, ok := a.Pods[addr.Prefix.Addr()]
		if !ok || s.Name != "" && s.Pod != pod {
			continue
		}
		elsewhere, err := a.Host.Elsewhere(ctx, addr.Prefix.Addr(), ns)
		if err != nil {
			return node.Sandbox{}, err
		}
		if elsewhere {
			continue
		}
		s.Pod = pod
		if s.IfName == "" {
			l, err := h.LinkByIndex(ctx, addr.Link)
			if err != nil {
				return node.Sandbox{}, err
			}
			s.IfName = l.Name
		}
		s.Address = ipam.AddressOf(append(s.Address.Addrs(), addr.Prefix.Addr())...)
	}
	return s, nil
}
