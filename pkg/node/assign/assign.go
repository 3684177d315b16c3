// Package assign gives addresses to pods and takes them back: the life of an
// address from the request of the container runtime to its cool-down.
//
// It owns the order of steps and their undoing. It must not know gRPC, how the
// record is kept, how the kernel is told, nor where blocks come from.
//
// An attachment is identified by container ID and interface name. Per
// attachment one step runs at a time:
//
//	ADD, nothing recorded      take an address while the link is made, wire the pod, record it
//	ADD, attached and intact   answer what was recorded
//	ADD, attached but broken   wire again with the same address
//	ADD while ADD runs         wait for it, then as above
//	DEL while ADD runs         stop it, wait until it has undone its steps, then DEL
//	DEL                        withdraw what is announced on links and the routes, answer; then, in the
//	                           background and with the links of others, remove the link, cool the address
//	DEL, link being removed    success
//	ADD, link being removed    wait for that, then as above
//	DEL, nothing recorded      remove the link if there is one; success
//	DEL, record read-only      withdraw the routes, remove the link, answer; record that
//	                           when it can be written
package assign

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/syncmap"
)

// Blocks supplies blocks; see package blocks.
type Blocks interface {
	// Usable names the blocks that give addresses of a pool, in order of preference.
	Usable(pool string) []string
	// Generation counts the news about a pool.
	Generation(pool string) uint64
	// Ask waits for one more block: nil says that there is news since the generation.
	Ask(ctx context.Context, pool string, since uint64) error
	// Changed says that addresses of a pool were taken or freed.
	Changed(pool string)
}

// Network wires pods; see package podnet.
type Network interface {
	Prepare(ctx context.Context, p podnet.Pod) (*podnet.Link, error)
	Discard(ctx context.Context, l *podnet.Link) error
	Attach(ctx context.Context, p podnet.Pod, prepared *podnet.Link) (podnet.Attachment, error)
	Check(ctx context.Context, p podnet.Pod, a podnet.Attachment) error
	CheckGuard(ctx context.Context, p podnet.Pod, a podnet.Attachment) error
	Withdraw(ctx context.Context, addrs ...ipam.Address) error
	RemoveAll(ctx context.Context, targets ...podnet.Target) []error
	Forget(ctx context.Context, addrs ...ipam.Address) error
	Attached(ctx context.Context) ([]attachment.ID, error)
}

// Announcer makes addresses known on the node's links; see package announce.
type Announcer interface {
	// Changed says that pods with links have other addresses of a block than before. It doesn't block.
	Changed(block string)
	// Withdraw ends that for addresses that are given up, as the record says.
	Withdraw(ctx context.Context, addrs ...netip.Addr) error
}

// Config has the settings of an Assigner, and the questions that it asks of others.
type Config struct {
	// BlockTimeout is for how long an ADD waits for a block before it fails, so that
	// the reason reaches the pod's events.
	BlockTimeout time.Duration
	// UndoTimeout bounds the undoing of a failed ADD.
	UndoTimeout time.Duration
	// Suspicion is how long an attachment has to seem lost before it is released.
	Suspicion time.Duration
	// NodeAddrs returns the addresses that the node uses towards pods.
	NodeAddrs func() ipam.Address
	// Unguarded says whether pods of a namespace may send from any address.
	Unguarded func(namespace string) bool
	// Lives says whether the network namespace that an attachment was made in is there, as far as
	// that can be told.
	Lives func(store.Allocation) bool
	// Warn records an Event about the Node.
	Warn func(reason, format string, args ...any)
}

// unavailable gives an error the class of node.ErrUnavailable, not its text.
type unavailable struct{ error }

func (unavailable) Is(target error) bool { return target == node.ErrUnavailable }
func (u unavailable) Unwrap() error      { return u.error }

// Assigner implements the package's task. Its methods may be called concurrently.
type Assigner struct {
	cfg    Config
	store  store.Store
	blocks Blocks
	net    Network
	links  Announcer
	flight flight

	removals *removals
	short    syncmap.Map[string, bool] // pools that had no address for the last ADD, by name

	unlisted suspects // the runtime's GC doesn't list them
	unlinked suspects // the kernel has no link of theirs
	// linkless has the index of the lost link for attachments that keep their addresses without a link. An ADD may
	// make another one.
	linkless syncmap.Map[attachment.ID, int]
}

// New returns an Assigner. Nothing is detached completely before Run is called.
func New(cfg Config, s store.Store, b Blocks, n Network, links Announcer) *Assigner {
	return &Assigner{
		cfg: cfg, store: s, blocks: b, net: n, links: links, flight: flight{calls: map[attachment.ID]*call{}}, removals: newRemovals(),
	}
}

// Add attaches a pod, or returns the attachment that it has already. An ADD that
// returns an error leaves nothing behind.
func (a *Assigner) Add(ctx context.Context, r node.AddRequest) (store.Allocation, error) {
	ctx, done, err := a.flight.add(ctx, r.ID)
	if err != nil {
		return store.Allocation{}, err
	}
	defer done()
	alloc, err := a.add(ctx, r)
	if err != nil && errors.Is(context.Cause(ctx), node.ErrDeleted) {
		return store.Allocation{}, node.ErrDeleted
	}
	return alloc, err
}

func (a *Assigner) add(ctx context.Context, r node.AddRequest) (_ store.Allocation, err error) {
	faultpoint.At(faultpoint.AddBegun)
	alloc, link, err := a.begin(ctx, r)
	if err != nil {
		return store.Allocation{}, err
	}
	if alloc.Netns.Inode != 0 && alloc.Netns != r.Netns {
		// The sandbox was made again: the link is gone with the earlier one.
		if err := a.remove(ctx, r.ID); err != nil {
			return store.Allocation{}, err
		}
		if alloc, err = a.reserve(ctx, r); err != nil {
			return store.Allocation{}, err
		}
	}
	again := alloc.State == store.Attached
	if again {
		if alloc.Netns.Inode == 0 { // found in the kernel after the record was lost
			alloc.Netns, alloc.Pod = r.Netns, r.Pod
		}
		err := a.net.Check(ctx, a.podOf(alloc), attachmentOf(alloc))
		if err == nil && len(alloc.Result) > 0 {
			return alloc, finish(ctx, r, alloc)
		}
		if ctx.Err() != nil {
			return store.Allocation{}, context.Cause(ctx) // nothing is known to be broken
		}
		klog.FromContext(ctx).Info("Wiring a pod again", "address", alloc.Address, "reason", err)
	}
	pod := a.podOf(alloc)

	committed := false
	defer func() {
		if !committed {
			err = errors.Join(err, a.undo(ctx, r.ID))
		}
	}()
	att, err := a.net.Attach(ctx, pod, link)
	if err != nil {
		return store.Allocation{}, fmt.Errorf("wire the pod: %w", err)
	}
	alloc.Wiring = store.Wiring{HostIfName: att.HostIfName, HostIfIndex: att.HostIfIndex}
	if alloc.Wiring.Result, err = result(pod, att); err != nil {
		return store.Allocation{}, err
	}
	if again {
		err = a.store.Adopt(ctx, alloc)
	} else {
		err = a.store.Attach(ctx, r.ID, alloc.Wiring)
	}
	if err != nil {
		return store.Allocation{}, fmt.Errorf("record the attachment: %w", err)
	}
	faultpoint.At(faultpoint.AddRecorded)
	if err := finish(ctx, r, alloc); err != nil {
		return store.Allocation{}, err
	}
	if err := context.Cause(ctx); err != nil {
		return store.Allocation{}, err // nobody takes the answer
	}
	committed = true
	alloc.State = store.Attached
	a.blocks.Changed(alloc.Pool)
	a.links.Changed(alloc.Block)
	return alloc, nil
}

// finish calls the Finish of the request. The attachment is recorded before: the record finds the pod meanwhile.
func finish(ctx context.Context, r node.AddRequest, alloc store.Allocation) error {
	if r.Finish == nil {
		return nil
	}
	return r.Finish(ctx, SandboxOf(alloc))
}

// SandboxOf returns the sandbox of an allocation.
func SandboxOf(alloc store.Allocation) node.Sandbox {
	return node.Sandbox{ID: alloc.ID, Pod: alloc.Pod, Netns: alloc.Netns, Address: alloc.Address}
}

// undo takes the steps of an ADD back, however far it came.
func (a *Assigner) undo(ctx context.Context, id attachment.ID) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.cfg.UndoTimeout)
	defer cancel()
	if err := a.remove(ctx, id); err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	return nil
}

// Check compares an attachment with the kernel and with the addresses that the
// runtime believes the pod to have. Each difference is named.
func (a *Assigner) Check(ctx context.Context, id attachment.ID, netns string, addrs []netip.Addr) error {
	alloc, err := a.store.Get(ctx, id)
	if err != nil {
		return fmt.Errorf("look up the attachment: %w", err)
	}
	if alloc.State != store.Attached {
		return fmt.Errorf("%w: it is %s", store.ErrState, alloc.State)
	}
	var errs []error
	for _, x := range addrs {
		if !slices.Contains(alloc.Address.Addrs(), x) {
			errs = append(errs, fmt.Errorf("address %s of the previous result is not the pod's, which has %s", x, alloc.Address))
		}
	}
	pod := a.podOf(alloc)
	if netns != "" {
		pod.Netns = netns
	}
	att := attachmentOf(alloc)
	return errors.Join(append(errs, a.net.Check(ctx, pod, att), a.net.CheckGuard(ctx, pod, att))...)
}

// podOf returns the pod of an allocation as it should be now.
func (a *Assigner) podOf(alloc store.Allocation) podnet.Pod {
	return podnet.Pod{
		ID:        alloc.ID,
		Netns:     alloc.Netns.Path,
		Pool:      alloc.Pool,
		Namespace: alloc.Namespace,
		Name:      alloc.Name,
		Address:   alloc.Address,
		NodeAddrs: a.cfg.NodeAddrs(),
		Unguarded: a.cfg.Unguarded(alloc.Namespace),
	}
}

// Wired returns the pods that have links and routes, or may have them in a moment.
func (a *Assigner) Wired(ctx context.Context) ([]podnet.Wired, error) {
	all, err := a.store.List(ctx)
	if err != nil {
		return nil, err
	}
	return a.WiredOf(all), nil
}

// WiredOf is Wired for attachments of the record.
func (a *Assigner) WiredOf(all []store.Allocation) []podnet.Wired {
	var pods []podnet.Wired
	for _, alloc := range all {
		if a.Linkless(alloc) || alloc.State != store.Attached && alloc.State != store.Pending {
			continue
		}
		host, _ := macsOf(alloc.Result)
		pods = append(pods, podnet.Wired{Pod: a.podOf(alloc), HostIfIndex: alloc.HostIfIndex, HostMAC: host})
	}
	return pods
}

// WiringOf returns the pod of an attachment as it should be now, and what was made for it, as far as the record knows; for package podnet.
func (a *Assigner) WiringOf(alloc store.Allocation) (podnet.Pod, podnet.Attachment) {
	return a.podOf(alloc), attachmentOf(alloc)
}

// attachmentOf returns the attachment of an allocation in the kernel, as far as the record knows.
func attachmentOf(alloc store.Allocation) podnet.Attachment {
	host, pod := macsOf(alloc.Result)
	return podnet.Attachment{
		HostIfName:  alloc.HostIfName,
		HostIfIndex: alloc.HostIfIndex,
		NetnsInode:  alloc.Netns.Inode,
		HostMAC:     host,
		PodMAC:      pod,
	}
}
