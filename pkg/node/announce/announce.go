// Package announce makes the node's addresses known on its links: the kernel answers for them by ARP and NDP, and hosts are told where
// they are now.
//
// It owns the proxy neighbour entries of one protocol, the kernel parameters that these need, and the announcements. It must not know
// whose the addresses are, nor the routes to them: without a route by another link the kernel doesn't answer by ARP.
//
//	address                        on the links in whose subnets it is
//	new                            make the entry, then announce it: at once, after 1 s, 2 s and 5 s
//	found, of an earlier process   keep the entry, announce it once
//	on another link, or the link   as if it were new
//	has another MAC address, or
//	its carrier again
//	uncertain                      keep the entries that there are
//	in no link's subnet            warn, once for each pool
//	withdrawn, or not wanted       remove the entries
//	is at another host, too        tell
//
// Nothing tells when an entry is deleted: Check looks for that.
package announce

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/kernel/announce"
	"github.com/coil-net/coil/pkg/kernel/neighbour"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
)

// Entry is the kind of the proxy neighbour entries that are repaired; label kind of coil_repairs_total.
const Entry = "neighbour_proxy"

// Kinds are the kinds with advice for the admin; see package pods.
var Kinds = map[string]string{
	Entry: "proxy neighbour entries go when their link goes down: look for what takes it down, or for a program that deletes the entries " +
		"(ip neighbour flush proxy)",
}

// Address is one that this node is to answer for.
type Address struct {
	netip.Addr
	// Pool names where the address is from, for people.
	Pool string
	// Uncertain says that it isn't known whether to answer for the address: it stays as it is.
	Uncertain bool
}

// Repairs counts objects that were lost and are restored; see package reconcile.
type Repairs interface {
	Done(ctx context.Context, kind string, n int)
	Saw(kind, what string)
}

// Config is what a Keeper is made of.
type Config struct {
	// Addresses returns all addresses that are to be announced. It is called when no Withdraw is at work, so that an address which was
	// given up before it was withdrawn isn't announced again.
	Addresses func(context.Context) ([]Address, error)
	// Handle is of the host's network namespace. Protocol marks the entries.
	Handle   *rtnl.Handle
	Protocol int
	// Set sets kernel parameters of the host that have another value, and says whether it set any.
	Set func(...sysctl.Setting) (changed bool, err error)
	// Send sends announcements once; see package kernel/announce.
	Send    func([]announce.Announcement) error
	Repairs Repairs
	// Warn records an Event about the Node.
	Warn func(reason, format string, args ...any)
	// Watch hears what hosts say on a link until its context ends; see package kernel/announce. Rival is called for each message of another
	// host about an address for which this node answers, and must not block.
	Watch func(ctx context.Context, link int, seen func(announce.Claim)) error
	Rival func(Rival)
}

// Keeper implements the package's task. Its methods may be called concurrently.
type Keeper struct {
	cfg     Config
	entries *neighbour.Syncer

	answered, homeless *prometheus.GaugeVec
	rivals             *prometheus.CounterVec

	// idle is true when there is no entry and none is wanted: then Withdraw has nothing to wait for, and changes of links don't matter.
	idle atomic.Bool
	// ours is what was held last.
	ours atomic.Pointer[ours]
	// mu is held while it is read what is wanted, and the kernel is made so.
	mu    sync.Mutex
	links map[int]link
	// held are the entries that exist, and the state of its link in which each was announced last, empty if an earlier process did that;
	// nil if it isn't known what exists.
	held map[spot]string
	// sure says that there are no others.
	sure  bool
	turns turns
	// wake has an item when there are turns, or links, that Run doesn't know of.
	wake chan struct{}
	// told are the pools about which Warn was called.
	told map[string]bool
	// set are the parameters that had their values once, by link.
	set map[parameter]bool
}

// spot is an address on a link.
type spot struct {
	link int
	addr netip.Addr
}

// New returns a Keeper. Nothing is changed yet.
func New(cfg Config) *Keeper {
	k := &Keeper{
		cfg: cfg, entries: neighbour.New(cfg.Handle, cfg.Protocol), wake: make(chan struct{}, 1),
		told: map[string]bool{}, set: map[parameter]bool{},
		answered: newGauge("coil_announce_addresses", "Addresses for which the node answers by ARP or NDP, by family."),
		homeless: newGauge("coil_announce_homeless_addresses",
			"Addresses for which the node should answer by ARP or NDP and that are in the subnet of none of its links, by family."),
		rivals: newCounter("coil_announce_rival_packets_total",
			"Packets of ARP and NDP in which other hosts said that an address is at them for which the node answers, by family."),
	}
	k.ours.Store(&ours{})
	return k
}

// Sync makes the entries what they should be, and announces what is new. Entries that were there before and are missing count as repaired.
func (k *Keeper) Sync(ctx context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.idle.Store(false) // before it is read what is wanted: a Withdraw that doesn't wait was recorded earlier
	addrs, err := k.cfg.Addresses(ctx)
	if err != nil {
		return fmt.Errorf("read which addresses to announce: %w", err)
	}
	if err := k.adopt(ctx); err != nil {
		return err
	}
	if k.links, err = readLinks(ctx, k.cfg.Handle, addrs); err != nil {
		return err
	}
	want, homeless := decide(k.links, addrs, k.held)
	k.warn(homeless)
	setErr := k.setParameters(ctx, want)
	fresh, found, err := k.write(ctx, want)
	k.publish(poolsOf(addrs))
	k.tell(ctx, fresh, found)
	count(k.answered, k.addrs())
	count(k.homeless, addrsOf(homeless))
	k.idle.Store(err == nil && len(want) == 0 && len(homeless) == 0)
	return errors.Join(setErr, err)
}

// adopt reads which entries there are if that isn't known.
func (k *Keeper) adopt(ctx context.Context) error {
	if k.held != nil {
		return nil
	}
	have, err := k.entries.List(ctx)
	if err != nil {
		return err
	}
	k.held, k.sure = map[spot]string{}, true
	for _, p := range have {
		k.held[spot{p.Link, p.Addr}] = ""
	}
	return nil
}

// write makes the entries those of want. It returns, of those that exist then, the spots that are new, and those that were found and
// that this process hasn't announced.
func (k *Keeper) write(ctx context.Context, want []spot) (fresh, found []spot, err error) {
	all := k.proxies(want)
	missing, err := k.entries.Missing(ctx, all)
	if err != nil {
		return nil, nil, err
	}
	lost := map[spot]bool{}
	for _, p := range missing {
		if _, ok := k.held[spot{p.Link, p.Addr}]; ok {
			lost[spot{p.Link, p.Addr}] = true
		}
	}
	res, err := k.entries.Sync(ctx, all)
	if err != nil {
		// Which of them failed is another question to the kernel.
		left, errMissing := k.entries.Missing(ctx, all)
		if errMissing != nil {
			k.held, k.sure = nil, false
			return nil, nil, errors.Join(err, errMissing)
		}
		want = without(want, left)
	}
	if res.Changed() {
		klog.FromContext(ctx).V(2).Info("Entries of addresses that are announced to neighbours changed", "added", res.Added, "deleted", res.Deleted, "entries", len(want))
	}
	held, restored := map[spot]string{}, 0
	for _, s := range want {
		announced, had := k.held[s]
		l := k.links[s.link]
		switch {
		case !had || lost[s] || announced != "" && announced != l.state() && l.carrier:
			fresh = append(fresh, s)
		case announced == "":
			found = append(found, s)
		}
		if lost[s] {
			restored++
		}
		held[s] = l.state()
	}
	k.held, k.sure = held, err == nil
	k.cfg.Repairs.Done(ctx, Entry, restored)
	return fresh, found, err
}

// Withdraw stops answering for addresses, which others may get afterwards. When it returns nil, there is no entry of the protocol for
// them. The caller has recorded before that they aren't to be announced.
func (k *Keeper) Withdraw(ctx context.Context, addrs ...netip.Addr) error {
	if k.idle.Load() {
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	gone := map[netip.Addr]bool{}
	for _, a := range addrs {
		gone[a] = true
	}
	if k.sure && !k.holds(gone) {
		return nil
	}
	if _, err := k.entries.Remove(ctx, addrs...); err != nil {
		return fmt.Errorf("stop answering for %s: %w", addrs, err)
	}
	for s := range k.held {
		if gone[s.addr] {
			delete(k.held, s)
		}
	}
	k.publish(k.ours.Load().pools)
	count(k.answered, k.addrs())
	return nil
}

// holds says whether there is an entry of one of the addresses.
func (k *Keeper) holds(addrs map[netip.Addr]bool) bool {
	for s := range k.held {
		if addrs[s.addr] {
			return true
		}
	}
	return false
}

// Check says whether an entry that should exist doesn't. It does nothing when there is none.
func (k *Keeper) Check(ctx context.Context) (lost bool, err error) {
	if k.idle.Load() {
		return false, nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	var want []spot
	for s := range k.held {
		want = append(want, s)
	}
	missing, err := k.entries.Missing(ctx, k.proxies(want))
	for _, p := range missing {
		k.cfg.Repairs.Saw(Entry, "lost: "+p.String())
	}
	return len(missing) > 0, err
}

// Lost says whether changes in the kernel may have destroyed entries, or have made links others.
func (k *Keeper) Lost(_ context.Context, changes []rtnl.Change) bool {
	if k.idle.Load() {
		return false
	}
	for _, c := range changes {
		switch c.Kind {
		case rtnl.Unknown:
			return true
		case rtnl.LinkLost:
			if k.uses(c.Link) {
				return true
			}
		case rtnl.LinkChanged:
			ofAll := c.State == nil && c.Link <= 0 // a parameter
			if ofAll || c.State != nil && suits(*c.State) || k.uses(c.Link) {
				return true
			}
		case rtnl.AddrAdded, rtnl.AddrLost:
			if !c.Addr.IsLinkLocalUnicast() {
				return true
			}
		}
	}
	return false
}

// uses says whether addresses are announced on a link.
func (k *Keeper) uses(index int) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, ok := k.links[index]
	return ok
}
