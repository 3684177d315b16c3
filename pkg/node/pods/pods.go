// Package pods keeps the host's objects for all pods together as they should be: rules, kernel parameters, the host's
// ends of the pods' links, and the routes to them.
//
// It owns when they are compared with the kernel, and which of the changes are repairs. It must not know how the kernel
// is written, nor how pods get their addresses.
package pods

import (
	"context"
	"errors"
	"net/netip"
	"runtime/debug"
	"runtime/metrics"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/podnet"
)

// The kinds of objects that are repaired; label kind of coil_repairs_total.
const (
	Route       = "pod_route"
	Rule        = "rule"
	Link        = "link"
	LinkAddress = "link_address"
	Sysctl      = "sysctl"
)

const networkManager = "a network manager must leave the pods' links alone: Unmanaged=yes below [Link] in a .network file " +
	"that matches veth*, or unmanaged-devices of NetworkManager"

// Kinds are the kinds with advice for the admin: which program is likely to destroy such objects again and again, and
// what to do about it.
var Kinds = map[string]string{
	Rule: "systemd-networkd deletes what it doesn't know unless a file in /etc/systemd/networkd.conf.d/ " +
		"says, below [Network], ManageForeignRoutingPolicyRules=no",
	Route: "systemd-networkd deletes what it doesn't know unless a file in /etc/systemd/networkd.conf.d/ " +
		"says, below [Network], ManageForeignRoutes=no. Felix of Calico deletes routes of links that it takes for its own " +
		"unless FELIX_REMOVEEXTERNALROUTES=false. The kernel deletes IPv4 routes whose source is the node's address when that is removed",
	Link:        networkManager,
	LinkAddress: networkManager,
	Sysctl:      "look for these parameters in /etc/sysctl.d, /usr/lib/sysctl.d and in what manages the node's configuration",
}

// Network makes the host's objects for pods; see package podnet.
type Network interface {
	Forward(ctx context.Context) (changed bool, err error)
	DetectMTU(ctx context.Context, own ipam.Address) (mtu int, changed bool, err error)
	Rules(ctx context.Context) (dataplane.Result, error)
	MendLinks(ctx context.Context, want Wired) (podnet.Mended, error)
	Sync(ctx context.Context, want Wired) (dataplane.Result, error)
}

// Links knows single links; see package podnet.
type Links interface {
	Sound(ctx context.Context, index int, lost ...netip.Addr) (bool, error)
	Owns(ctx context.Context, index int) (bool, error)
	UplinkChanged(l rtnl.Link) bool
}

// Wired returns the pods that have links and routes, or may have them in a moment.
type Wired = func(context.Context) ([]podnet.Wired, error)

// Repairs counts objects that were lost and are restored; see package reconcile.
type Repairs interface {
	Done(ctx context.Context, kind string, n int)
	Saw(kind, what string)
}

// Keeper implements the package's task.
type Keeper struct {
	Network Network
	Links   Links
	Wired   Wired
	// PodTable is the table of routes to pods.
	PodTable  int
	NodeAddrs func() ipam.Address
	Repairs   Repairs

	own *ipam.Address // the node's addresses at the last call of Moved
}

// Thrifty gives back the memory that do took to read all pods, and the garbage of pods that came
// and went before: Go would keep it in reserve, and the node has better use for it. To look for
// it takes time, too, so that it has to be worth while.
func Thrifty(do func(context.Context) error) func(context.Context) error {
	const worth = 1 << 20 // bytes
	return func(ctx context.Context) error {
		err := do(ctx)
		heap := []metrics.Sample{
			{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/free:bytes"}, {Name: "/gc/heap/live:bytes"},
		}
		metrics.Read(heap)
		if heap[0].Value.Uint64()+heap[1].Value.Uint64() > heap[2].Value.Uint64()+worth {
			debug.FreeOSMemory()
		}
		return err
	}
}

// Moved says whether the node has other addresses than at the last call: they are the source of the pods' routes. A Node
// may get its addresses after coild has started. Moved is called by one goroutine.
func (k *Keeper) Moved() bool {
	before, own := k.own, k.NodeAddrs()
	k.own = &own
	return before != nil && *before != own
}

// Sync makes rules, parameters, links and routes of all pods what they should be, as they were before.
func (k *Keeper) Sync(ctx context.Context) error {
	return errors.Join(k.Mend(ctx, true, k.Wired), k.Routes(ctx, true))
}

// Mend makes the rules, the host's parameters and the host's ends of the links of pods what they should be. With repair,
// its changes count as repairs: all was as it should be before.
func (k *Keeper) Mend(ctx context.Context, repair bool, pods Wired) error {
	net := k.Network
	forwarding, forwardErr := net.Forward(ctx)
	mtu, changed, mtuErr := net.DetectMTU(ctx, k.NodeAddrs())
	if changed {
		klog.FromContext(ctx).Info("The MTU of pods follows that of the node's uplinks", "mtu", mtu)
	}
	rules, ruleErr := net.Rules(ctx)
	mended, linkErr := net.MendLinks(ctx, pods)
	if repair {
		if forwarding {
			k.Repairs.Done(ctx, Sysctl, 1)
		}
		k.Repairs.Done(ctx, Rule, rules.Added)
		k.Repairs.Done(ctx, Link, mended.Links)
		k.Repairs.Done(ctx, LinkAddress, mended.Addresses)
		k.Repairs.Done(ctx, Sysctl, mended.Parameters+mended.Learned)
	}
	return errors.Join(forwardErr, mtuErr, ruleErr, linkErr)
}

// Routes makes the routes of all pods what they should be. A pod's routes come with the pod, so that routes which are
// added here were lost.
func (k *Keeper) Routes(ctx context.Context, repair bool) error {
	res, err := k.Network.Sync(ctx, k.Wired)
	if repair {
		k.Repairs.Done(ctx, Route, res.Added)
	}
	if res.Changed() {
		klog.FromContext(ctx).Info("Routes of pods changed", "added", res.Added, "replaced", res.Replaced, "deleted", res.Deleted)
	}
	return err
}
