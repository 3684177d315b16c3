// Package podnet attaches pods to the node's network, one at a time, and finds
// attached ones.
//
// It owns the veths whose alias starts with "COIL:", the addresses and parameters of
// both of their ends, and the routes of the pod table. All that a pod has is made in
// one go and removed in one go: a failed Attach leaves nothing. It must not know how
// addresses are assigned, where they are recorded, nor anything of Kubernetes' API.
package podnet

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/rule"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
)

const (
	// defaultMTU is Ethernet's.
	defaultMTU = 1500
	// minIPv6MTU is the least that IPv6 works with (RFC 8200, section 5).
	minIPv6MTU = 1280
	// minMTU is the least that IPv4 works with (RFC 791).
	minMTU = 68
)

// Gateways are the addresses of the host's end of every pod's link. They can be
// the same for all pods, since they are link-local.
var Gateways = ipam.Address{
	IPv4: netip.MustParseAddr("169.254.1.1"),
	IPv6: netip.MustParseAddr("fe80::1"),
}

// Options are the numbers and habits of a node.
type Options struct {
	// PodTable is the routing table with a route to each pod, RulePriority the
	// priority of the rule that looks it up. The rule after it looks up
	// dataplane.TableUnassigned.
	PodTable, RulePriority int
	// Protocol marks the routes and rules of this node's agent.
	Protocol int
	// CompatCalico names the host's ends as Calico does, so that its policies
	// find them.
	CompatCalico bool
	// MTU is that of pods; 0 is that of the node's uplinks, see DetectMTU.
	MTU int
	// SourceGuard drops packets of pods from addresses that aren't theirs.
	SourceGuard bool
	// StragglersTracked lets the host track connections of Straggle, for rules of others that need it.
	StragglersTracked bool
	// Netns is the path of the host's network namespace; empty is the one that
	// the process was started in.
	Netns string
	// SysctlRecord is the file for the old values of the kernel parameters that
	// Forward changes; empty doesn't keep them.
	SysctlRecord string
}

// Validate returns an error if the options can't be used.
func (o Options) Validate() error {
	var errs []error
	if o.PodTable < 1 || o.PodTable == dataplane.TableUnassigned {
		errs = append(errs, fmt.Errorf("pod table %d can't be used", o.PodTable))
	}
	if o.RulePriority < 1 {
		errs = append(errs, fmt.Errorf("rule priority %d is not positive", o.RulePriority))
	}
	if o.Protocol < 1 || o.Protocol > 255 {
		errs = append(errs, fmt.Errorf("protocol %d is not within 1 and 255", o.Protocol))
	}
	if o.MTU != 0 && o.MTU < minMTU {
		errs = append(errs, fmt.Errorf("MTU %d is less than %d", o.MTU, minMTU))
	}
	return errors.Join(errs...)
}

// Pod has the facts about a pod that Attach needs.
type Pod struct {
	attachment.ID
	// Netns is the path of the pod's network namespace.
	Netns string
	// Pool is where the address is from; recorded in the link's alias.
	Pool string
	// Namespace and Name are the pod's; they name the host's end with CompatCalico.
	Namespace, Name string
	// Address is the pod's, of one or both families.
	Address ipam.Address
	// NodeAddrs are the node's own addresses. Packets from the node to the pod
	// carry them as source, of each family in which one is set and is an address
	// of this host.
	NodeAddrs ipam.Address
	// Unguarded lets the pod send from any address, whatever the Options say.
	Unguarded bool
}

// group is that of the host's end.
func (p Pod) group() uint32 {
	if p.Unguarded {
		return dataplane.LinkGroupUnguarded
	}
	return dataplane.LinkGroup
}

// learn takes from a link the fact that a lost record lacks: without the pod's namespace it isn't
// known whether the pod may send from any address.
func (p *Pod) learn(l rtnl.Link) {
	p.Unguarded = p.Unguarded || p.Namespace == "" && l.Group == dataplane.LinkGroupUnguarded
}

// validate returns an error if no host can attach the pod.
func (p Pod) validate() error {
	var errs []error
	if p.ContainerID == "" || strings.ContainsAny(p.ContainerID, ":/") {
		errs = append(errs, fmt.Errorf("container ID %q can't be used", p.ContainerID))
	}
	if !validIfName(p.IfName) {
		errs = append(errs, fmt.Errorf("interface name %q can't be used", p.IfName))
	}
	if strings.Contains(p.Pool, ":") {
		errs = append(errs, fmt.Errorf("pool name %q can't be used", p.Pool))
	}
	if n := len(p.alias()); n > maxAlias {
		errs = append(errs, fmt.Errorf("alias of %d bytes is longer than %d", n, maxAlias))
	}
	if p.Address == (ipam.Address{}) {
		errs = append(errs, errors.New("there is no address"))
	}
	return errors.Join(append(errs, p.Address.Validate(), p.NodeAddrs.Validate())...)
}

// Attachment has the names and numbers of the objects that Attach made.
type Attachment struct {
	// HostIfName and HostIfIndex are of the host's end.
	HostIfName  string
	HostIfIndex int
	// NetnsInode tells the pod's network namespace from a later one at the same
	// path.
	NetnsInode uint64
	// HostMAC and PodMAC are the addresses of both ends.
	HostMAC, PodMAC string
}

// Wired is a pod that should be attached, and the index of the host's end of its
// link. Index 0 says that the pod is being attached just now. HostMAC is the MAC
// address of that end; empty if it isn't known.
type Wired struct {
	Pod
	HostIfIndex int
	HostMAC     string
}

// Network attaches pods to one node. It is safe for concurrent use.
type Network struct {
	opts   Options
	host   *netns.NS
	handle *rtnl.Handle
	routes *route.Syncer
	rules  *rule.Syncer
	flows  *conntrack.Table // nil: the kernel tracks none
	guard  *nft.Table
	// set sets the host's kernel parameters.
	set func(*netns.NS, ...sysctl.Setting) (bool, error)
	// clients are the guards of clients, which are in the same table.
	clients clientGuards
	// ipv6 says whether the kernel has IPv6 at all.
	ipv6 bool
	// inherits says that new network namespaces may come with IPv6 parameters
	// other than the kernel's defaults.
	inherits bool
	uplinks  atomic.Pointer[uplinks]
	// groups is held for writing while the labels of a link are restored, and for
	// reading while links are collected in a group to be removed.
	groups sync.RWMutex
}

// New returns the network of a node. It changes nothing yet.
func New(o Options) (*Network, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	open := netns.Current
	if o.Netns != "" {
		open = func() (*netns.NS, error) { return netns.Open(o.Netns) }
	}
	host, err := open()
	if err != nil {
		return nil, err
	}
	n := &Network{opts: o, host: host, set: sysctl.Set}
	n.uplinks.Store(&uplinks{mtu: defaultMTU})
	if n.handle, err = rtnl.New(host); err != nil {
		return nil, errors.Join(err, host.Close())
	}
	if n.guard, err = nft.New(host, dataplane.NftTable); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	if n.flows, err = conntrack.New(host); err != nil && !errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, errors.Join(err, n.Close())
	}
	if n.ipv6, err = sysctl.Exists(host, "net/ipv6"); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	// It is visible in the initial namespace only; the default is 0.
	v, err := sysctl.Get(host, "net/core/devconf_inherit_init_net")
	if err != nil && !errors.Is(err, sysctl.ErrNotExist) {
		return nil, errors.Join(err, n.Close())
	}
	n.inherits = v == "1" || v == "3"
	if o.SysctlRecord != "" {
		n.set = sysctl.NewRecord(o.SysctlRecord).Set
	}
	n.routes = route.New(n.handle, o.Protocol, o.PodTable)
	n.rules = rule.New(n.handle, o.Protocol, o.RulePriority, o.RulePriority+1)
	return n, nil
}

// Handle is for other work of the same agent in the host's namespace, so that notifications
// tell its own changes from those of others. It is closed by Close.
func (n *Network) Handle() *rtnl.Handle { return n.handle }

// SetParameters sets kernel parameters of the host that have another value, and says whether it set any. The old values are
// recorded with those that the Network itself replaces.
func (n *Network) SetParameters(settings ...sysctl.Setting) (changed bool, err error) {
	return n.set(n.host, settings...)
}

// Close closes the Network's descriptors; the pods stay attached. No call
// may be in progress.
func (n *Network) Close() error {
	n.handle.Close()
	if n.guard != nil {
		n.guard.Close()
	}
	if n.flows != nil {
		n.flows.Close()
	}
	return n.host.Close()
}
