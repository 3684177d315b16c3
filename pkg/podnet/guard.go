package podnet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"sync"
	"time"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// Guard makes the host's ruleset what it should be. With Options.SourceGuard pods send from their own
// addresses only: the host's routes say which these are, so that nothing has to be done for a single
// pod. Clients of Egresses have the guards that GuardClient gave them. Guards of links that are gone
// are removed. The result counts missing objects, not this removal.
func (n *Network) Guard(ctx context.Context) (dataplane.Result, error) {
	n.clients.mu.Lock()
	defer n.clients.mu.Unlock()
	if err := n.recallGuards(ctx); err != nil {
		return dataplane.Result{}, err
	}
	result, err := n.syncGuard(ctx)
	if err != nil {
		return result, err
	}
	forgotten, err := n.forgetGuards(ctx)
	if forgotten {
		_, failed := n.syncGuard(ctx)
		err = errors.Join(err, failed)
	}
	return result, err
}

// CheckGuard says why a pod can send from addresses of others, or why it can't though it may; the link is
// that of the attachment. Nothing is changed. Check doesn't ask this: the fault isn't the pod's alone,
// and to attach the pod again wouldn't help.
func (n *Network) CheckGuard(ctx context.Context, p Pod, a Attachment) error {
	if !n.opts.SourceGuard {
		return nil
	}
	l, err := n.handle.LinkByIndex(ctx, a.HostIfIndex)
	if err != nil {
		return fmt.Errorf("link %s: %w", a.HostIfName, err)
	}
	p.learn(l)
	if l.Group != p.group() {
		err = fmt.Errorf("source guard: group of %s is %#x, not %#x", l.Name, l.Group, p.group())
	}
	if p.Unguarded {
		return err
	}
	if missing := n.checkTable(ctx); missing != nil {
		err = errors.Join(err, fmt.Errorf("source guard: the pod can send from any address: %w", missing))
	}
	return err
}

// guards says whether a pod may send from its own addresses only.
func (o Options) guards(p Pod) bool { return o.SourceGuard && !p.Unguarded }

// WatchGuard begins to watch for changes of the rule.
func (n *Network) WatchGuard() (*nft.Watch, error) { return n.guard.Watch() }

// Dropped returns how many packets of pods the host's ruleset dropped since it was made, by counter and family:
// ruleset.Forged, whose sources weren't the pods', and ruleset.PastTunnel, for destinations of Egresses. Without rules
// the counters have no family.
func (n *Network) Dropped(ctx context.Context) (map[string]map[dataplane.Family]uint64, error) {
	dropped := map[string]map[dataplane.Family]uint64{ruleset.Forged: {}, ruleset.PastTunnel: {}}
	counters, err := n.guard.Counters(ctx)
	for _, c := range counters {
		if name, family := dataplane.CutFamily(c.Name); dropped[name] != nil {
			dropped[name][family] = c.Packets
		}
	}
	return dropped, err
}

// Straggle lets a pod send from addresses that aren't routed to its link any more, for ruleset.Straggling from now on.
func (n *Network) Straggle(ctx context.Context, link int, addrs ...netip.Addr) error {
	return n.letSend(ctx, ruleset.StragglingSet, link, addrs)
}

// LetProbe lets a pod send probes, and nothing else, from addresses that aren't routed to its link, for ruleset.Probing from now on.
func (n *Network) LetProbe(ctx context.Context, link int, addrs ...netip.Addr) error {
	return n.letSend(ctx, ruleset.ProbingSet, link, addrs)
}

func (n *Network) letSend(ctx context.Context, set func(dataplane.Family) dataplane.Set, link int, addrs []netip.Addr) error {
	if !n.opts.SourceGuard {
		return nil
	}
	var all []nft.Renewal
	for _, a := range addrs {
		s := set(dataplane.FamilyOf(a))
		all = append(all, nft.Renewal{Set: s, Key: dataplane.KeyOfLink(link) + dataplane.KeyOf(a), For: s.Timeout})
	}
	return n.guard.Renew(ctx, all...)
}

// clientGuards are the guards of pods that use Egresses, by the index of the host's end of their links.
type clientGuards struct {
	// mu is held from a change of the guards until the kernel has them.
	mu sync.Mutex
	// asked are the changes that wait for mu: its holder makes them all, since the kernel takes as long for one.
	queue sync.Mutex
	asked []*guardChange
	// by is nil until the guards of a former agent were read from the kernel.
	by map[int]dataplane.ClientGuard
}

// guardChange is a guard that a client is to have, and the result.
type guardChange struct {
	link  int
	guard dataplane.ClientGuard
	done  bool // guarded by clientGuards.mu, as the next
	err   error
}

// ErrNoHostLink: no link of the host leads to a pod directly, or not any more.
var ErrNoHostLink = errors.New("no veth of the host leads to the pod")

// HostLink returns the index of the host's end of a pod's link: the one that Attach made or, if another
// plugin attached the pod, the veth by which the host's routes lead to its addresses, if the other end is
// in the pod's namespace. Nothing in that namespace is asked, where a program may make links as it likes.
func (n *Network) HostLink(ctx context.Context, id attachment.ID, ns *netns.NS, address ipam.Address) (int, error) {
	own, err := n.find(ctx, id, 0)
	if err == nil || !errors.Is(err, rtnl.ErrNotExist) {
		return own.Index, err
	}
	for _, a := range address.Addrs() {
		link, here, err := n.wayTo(ctx, a, ns)
		if here || err != nil {
			return link, err
		}
	}
	return 0, fmt.Errorf("%s: %w", id.Key(), ErrNoHostLink)
}

// Elsewhere says whether the host's routes lead to an address by a veth whose other end isn't in a
// namespace: then the address isn't the one of the pod there, whatever the pod says.
func (n *Network) Elsewhere(ctx context.Context, a netip.Addr, ns *netns.NS) (bool, error) {
	link, here, err := n.wayTo(ctx, a, ns)
	return link != 0 && !here, err
}

// wayTo returns the link by which the host's routes lead to an address, if that is a veth to another
// namespace, and whether it is that one.
func (n *Network) wayTo(ctx context.Context, a netip.Addr, ns *netns.NS) (link int, here bool, err error) {
	r, err := n.handle.RouteTo(ctx, a, 0)
	var l rtnl.Link
	if err == nil && r.Type != dataplane.Local && r.Link != 0 {
		l, err = n.handle.LinkByIndex(ctx, r.Link)
	}
	if errors.Is(err, rtnl.ErrNotExist) || errors.Is(err, rtnl.ErrInvalid) { // the latter by a blackhole
		return 0, false, nil
	}
	if err != nil || l.Kind != "veth" || !l.PeerElsewhere {
		return 0, false, err
	}
	// The kernel has given the namespace an ID, at the latest when it answered.
	id, err := n.handle.NetnsID(ctx, ns)
	return l.Index, id >= 0 && id == l.PeerNetns, err
}

// ClientGuard returns the guard of the client behind a host's link.
func (n *Network) ClientGuard(ctx context.Context, link int) (dataplane.ClientGuard, error) {
	n.clients.mu.Lock()
	defer n.clients.mu.Unlock()
	err := n.recallGuards(ctx)
	return n.clients.by[link], err
}

// GuardClient gives the client behind a host's link a guard, in place of the one that it has; the zero
// guard is none.
func (n *Network) GuardClient(ctx context.Context, link int, g dataplane.ClientGuard) error {
	c := &guardChange{link: link, guard: g, err: errNotChanged}
	n.clients.queue.Lock()
	n.clients.asked = append(n.clients.asked, c)
	n.clients.queue.Unlock()
	n.clients.mu.Lock()
	defer n.clients.mu.Unlock()
	if !c.done {
		n.clients.queue.Lock()
		asked := n.clients.asked
		n.clients.asked = nil
		n.clients.queue.Unlock()
		n.changeGuards(ctx, asked)
	}
	return c.err
}

// errNotChanged: the change began, and didn't end.
var errNotChanged = errors.New("the host's ruleset wasn't changed")

// changeGuards must be called with mu held. A guard that the kernel refuses keeps no other client's from it.
func (n *Network) changeGuards(ctx context.Context, changes []*guardChange) {
	// Others' changes don't end with the caller of one.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), guardTimeout)
	defer cancel()
	together := n.changeGuardsOnce(ctx, changes)
	for _, c := range changes {
		c.done, c.err = true, together
		if together != nil && len(changes) > 1 {
			c.err = n.changeGuardsOnce(ctx, []*guardChange{c})
		}
	}
}

// changeGuardsOnce must be called with mu held. On an error the kernel's ruleset is as it was.
func (n *Network) changeGuardsOnce(ctx context.Context, changes []*guardChange) error {
	if err := n.recallGuards(ctx); err != nil {
		return err
	}
	before := maps.Clone(n.clients.by)
	for _, c := range changes {
		if len(c.guard.Destinations) == 0 {
			delete(n.clients.by, c.link)
		} else {
			n.clients.by[c.link] = c.guard
		}
	}
	_, err := n.syncGuard(ctx)
	if err != nil {
		n.clients.by = before
	}
	return err
}

// guardTimeout bounds a change of the node's ruleset.
const guardTimeout = 10 * time.Second

// CheckClientGuard says whether the guard of the client behind a host's link is this one, and the host's
// ruleset as it was made last. Nothing is changed.
func (n *Network) CheckClientGuard(ctx context.Context, link int, g dataplane.ClientGuard) error {
	have, err := n.ClientGuard(ctx, link)
	if err != nil {
		return err
	}
	if !have.Equal(g) {
		return fmt.Errorf("the host keeps other packets of link %d than the client itself: those to %s, not to %s", link, shown(have.Destinations), shown(g.Destinations))
	}
	if err := n.checkTable(ctx); err != nil {
		return fmt.Errorf("the host doesn't keep what leaves past tunnels: %w", err)
	}
	return nil
}

// shown are the first of some ranges, for errors: a client may have thousands.
func shown(ranges []netipx.IPRange) string {
	const most = 8
	if len(ranges) <= most {
		return fmt.Sprint(ranges)
	}
	return fmt.Sprintf("%v and %d more ranges", ranges[:most], len(ranges)-most)
}

func (n *Network) checkTable(ctx context.Context) error {
	n.clients.mu.Lock()
	defer n.clients.mu.Unlock()
	if err := n.recallGuards(ctx); err != nil {
		return err
	}
	return n.guard.Check(ctx, n.hostRules().Ruleset())
}

// recallGuards must be called with mu held.
func (n *Network) recallGuards(ctx context.Context) error {
	if n.clients.by != nil {
		return nil
	}
	sets, err := n.guard.Sets(ctx)
	if err != nil {
		return fmt.Errorf("read the guards of clients: %w", err)
	}
	n.clients.by = ruleset.GuardsOf(sets)
	return nil
}

// forgetGuards forgets the guards of links that are gone, and says whether there were such; the kernel gives no index
// twice. It must be called with mu held.
func (n *Network) forgetGuards(ctx context.Context) (forgotten bool, err error) {
	var errs []error
	for link := range n.clients.by {
		_, err := n.handle.LinkByIndex(ctx, link)
		switch {
		case errors.Is(err, rtnl.ErrNotExist):
			delete(n.clients.by, link)
			forgotten = true
		case err != nil:
			errs = append(errs, err)
		}
	}
	return forgotten, errors.Join(errs...)
}

// hostRules must be called with mu held.
func (n *Network) hostRules() ruleset.Host {
	return ruleset.Host{SourceGuard: n.opts.SourceGuard, Tracked: n.opts.StragglersTracked, Clients: n.clients.by}
}

// syncGuard must be called with mu held.
func (n *Network) syncGuard(ctx context.Context) (dataplane.Result, error) {
	rules := n.hostRules()
	first, err := n.guardSourcesFirst(ctx, rules)
	if err == nil {
		var res dataplane.Result
		if res, err = n.guard.Sync(ctx, rules.Ruleset()); err == nil && !first.Changed() {
			first = res
		}
	}
	if err != nil {
		return dataplane.Result{}, fmt.Errorf("guard what pods send: %w", err)
	}
	return first, nil
}

// guardSourcesFirst makes a table that drops foreign sources alone, if there is none and clients have guards: these take
// a while to make, and may fail because of destinations that tenants chose.
func (n *Network) guardSourcesFirst(ctx context.Context, rules ruleset.Host) (dataplane.Result, error) {
	if !rules.SourceGuard || len(rules.Clients) == 0 {
		return dataplane.Result{}, nil
	}
	if exists, err := n.guard.Exists(ctx); exists || err != nil {
		return dataplane.Result{}, err
	}
	rules.Clients = nil
	return n.guard.Sync(ctx, rules.Ruleset())
}
