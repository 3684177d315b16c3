package podnet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Withdraw deletes the routes to pods from the pod table, so that nothing
// reaches them any more. Addresses without a route are success.
func (n *Network) Withdraw(ctx context.Context, addrs ...ipam.Address) error {
	var routes []dataplane.Route
	for _, a := range addrs {
		routes = append(routes, n.hostRoutes(a, ipam.Address{}, 0)...)
	}
	if err := n.routes.Delete(ctx, routes...); err != nil {
		return fmt.Errorf("withdraw pod routes: %w", err)
	}
	return nil
}

// Target is the link of an attachment that is to be removed. HostIfIndex is where it
// was last seen, 0 if that is unknown; a link that Coil 2.x made is only found by it.
type Target struct {
	attachment.ID
	HostIfIndex int
}

// Forget makes the kernel forget the flows of addresses whose routes are withdrawn, so that
// none of them leads to the next pod with such an address: packets that are sent meanwhile meet
// no route, and make no new flow.
func (n *Network) Forget(ctx context.Context, addrs ...ipam.Address) error {
	var all []netip.Addr
	for _, a := range addrs {
		all = append(all, a.Addrs()...)
	}
	if n.flows == nil || len(all) == 0 {
		return nil
	}
	forgotten, err := n.flows.Forget(ctx, all...)
	if err != nil {
		return fmt.Errorf("forget the flows of %d addresses: %w", len(all), err)
	}
	klog.FromContext(ctx).V(4).Info("Forgot flows of addresses without a pod", "flows", forgotten, "addresses", len(all))
	return nil
}

// RemoveAll removes the links of attachments, and with them their addresses and
// routes, and returns the error of each. The pods' network namespaces aren't needed.
// A link is removed only if its alias names the attachment. When there is none, that
// is success.
//
// Many take hardly longer than one: the kernel waits, for tens of milliseconds, until
// no processor uses a removed link any more, but only once for all links of a group.
func (n *Network) RemoveAll(ctx context.Context, targets ...Target) []error {
	results := make([]error, len(targets))
	var links []rtnl.Link
	var of []int // the target of each
	for i, t := range targets {
		l, err := n.find(ctx, t.ID, t.HostIfIndex)
		switch {
		case err == nil:
			links, of = append(links, l), append(of, i)
		case !errors.Is(err, rtnl.ErrNotExist):
			results[i] = err
		}
	}
	for i, err := range n.removeLinks(ctx, links) {
		results[of[i]] = err
	}
	for i, err := range results {
		if err != nil {
			results[i] = fmt.Errorf("detach %s: %w", targets[i].Key(), err)
		}
	}
	return results
}

// removeLinks removes links, of which each belongs to an attachment, and returns the
// error of each.
func (n *Network) removeLinks(ctx context.Context, links []rtnl.Link) []error {
	results := make([]error, len(links))
	if len(links) > 1 && n.removeGroup(ctx, links) == nil {
		return results
	}
	// Also after a failure: a link that is gone is success, and each of the others gets its own
	// error.
	for i, l := range links {
		results[i] = n.remove(ctx, l)
	}
	return results
}

// removeGroup removes links together, or returns why that wasn't possible: some may be
// gone all the same.
func (n *Network) removeGroup(ctx context.Context, links []rtnl.Link) error {
	n.groups.RLock()
	defer n.groups.RUnlock()
	indexes := make([]int, 0, len(links))
	for _, l := range links {
		indexes = append(indexes, l.Index)
	}
	return n.handle.DelTogether(ctx, indexes)
}

// find returns the host's end of an attachment without a dump; rtnl.ErrNotExist.
func (n *Network) find(ctx context.Context, id attachment.ID, hint int) (rtnl.Link, error) {
	lookups := []func() (rtnl.Link, error){
		func() (rtnl.Link, error) { return n.handle.LinkByAltName(ctx, altName(id)) },
		// An Attach that was killed may not have come to the alternative name.
		func() (rtnl.Link, error) { return n.handle.LinkByName(ctx, linkName(id)) },
	}
	if hint > 0 {
		lookups = slices.Insert(lookups, 0, func() (rtnl.Link, error) { return n.handle.LinkByIndex(ctx, hint) })
	}
	for _, lookup := range lookups {
		l, err := lookup()
		if err == nil && belongs(l, id) {
			return l, nil
		}
		if err != nil && !errors.Is(err, rtnl.ErrNotExist) {
			return rtnl.Link{}, err
		}
	}
	return rtnl.Link{}, fmt.Errorf("link of %s: %w", id.Key(), rtnl.ErrNotExist)
}

// belongs says whether a link is the host's end of an attachment: by its alias,
// or, when an Attach was killed before it set that, by its group and name.
func belongs(l rtnl.Link, id attachment.ID) bool {
	if l.Alias == "" {
		return l.Name == linkName(id) && (dataplane.OfPods(l.Group) || beingRemoved(l))
	}
	_, owner, ok := parseAlias(l.Alias)
	return ok && owner == id
}

func (n *Network) remove(ctx context.Context, l rtnl.Link) error {
	_, err := n.handle.Apply(ctx, rtnl.ErrNotExist, rtnl.DelLink(l.Index))
	return err
}

// beingMade says whether a link is the host's end of one that Attach hasn't labelled yet.
// It comes up after that, so that a pod's link which lost its labels isn't taken for one.
func beingMade(l rtnl.Link) bool {
	return l.Group == dataplane.LinkGroup && strings.HasPrefix(l.Name, namePrefix) && !l.Up && l.Alias == "" && len(l.AltNames) == 0
}

// Recovered has the findings of Recover.
type Recovered struct {
	// Found are all attachments, as List returns them.
	Found []Found
	// Unfinished counts the removed links.
	Unfinished int
	// Strays are the routes of the pod table to links that are no attachment's, such as links whose alias was lost.
	// Sync deletes these routes.
	Strays []string
}

// Recover removes the links of Attaches that were killed before they labelled them. No Attach may be in progress.
func (n *Network) Recover(ctx context.Context) (r Recovered, err error) {
	links, err := n.handle.Veths(ctx)
	if err != nil {
		return r, fmt.Errorf("list attached pods: %w", err)
	}
	unfinished := slices.DeleteFunc(slices.Clone(links), func(l rtnl.Link) bool { return !beingMade(l) })
	if err := errors.Join(n.removeLinks(ctx, unfinished)...); err != nil {
		return r, fmt.Errorf("remove unfinished links: %w", err)
	}
	r.Unfinished = len(unfinished)
	var others map[int][]netip.Prefix
	if r.Found, others, err = n.attachments(ctx, links); err == nil {
		r.Strays, err = n.strays(ctx, others)
	}
	return r, err
}

// Found is an attachment that was found in the kernel.
type Found struct {
	attachment.ID
	// Pool is empty for pods that Coil didn't give their address.
	Pool string
	// HostIfName and HostIfIndex are of the host's end of the link.
	HostIfName  string
	HostIfIndex int
	// Unlabelled links are found by their alias only; see Label.
	Unlabelled bool
	// Addresses are the destinations that the pod table routes to the link: at most one of each
	// family unless another program changed it.
	Addresses []netip.Addr
}

// Attached returns which attachments have a link. An error says that the kernel couldn't be
// read completely; nothing is known then.
func (n *Network) Attached(ctx context.Context) ([]attachment.ID, error) {
	links, err := n.handle.Veths(ctx)
	if err != nil {
		return nil, fmt.Errorf("list links of pods: %w", err)
	}
	ids := make([]attachment.ID, 0, len(links))
	for _, l := range links {
		if _, id, ok := parseAlias(l.Alias); ok {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// List returns all attachments, ordered by the index of their links. An error
// says that the kernel couldn't be read completely; nothing is known then.
func (n *Network) List(ctx context.Context) ([]Found, error) {
	links, err := n.handle.Veths(ctx)
	if err != nil {
		return nil, fmt.Errorf("list attached pods: %w", err)
	}
	found, _, err := n.attachments(ctx, links)
	return found, err
}

// attachments returns the attachments that have one of the links, and the destinations that the pod table routes to other
// links.
func (n *Network) attachments(ctx context.Context, links []rtnl.Link) (found []Found, others map[int][]netip.Prefix, err error) {
	routed := map[int][]netip.Prefix{}
	for _, family := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		routes, err := n.handle.Routes(ctx, family, n.opts.PodTable, n.opts.Protocol)
		if err != nil {
			return nil, nil, fmt.Errorf("list attached pods: %w", err)
		}
		for _, r := range routes {
			routed[r.Link] = append(routed[r.Link], r.Dst)
		}
	}
	for _, l := range links {
		if pool, id, ok := parseAlias(l.Alias); ok {
			f := Found{ID: id, Pool: pool, HostIfName: l.Name, HostIfIndex: l.Index, Unlabelled: !labelled(l, id)}
			for _, dst := range routed[l.Index] {
				if dst.IsSingleIP() {
					f.Addresses = append(f.Addresses, dst.Addr())
				}
			}
			found = append(found, f)
			delete(routed, l.Index)
		}
	}
	slices.SortFunc(found, func(a, b Found) int { return a.HostIfIndex - b.HostIfIndex })
	return found, routed, nil
}

// strays describes routes by links that may be no attachment's.
func (n *Network) strays(ctx context.Context, routes map[int][]netip.Prefix) ([]string, error) {
	var strays []string
	for _, index := range slices.Sorted(maps.Keys(routes)) {
		l, err := n.handle.LinkByIndex(ctx, index)
		if errors.Is(err, rtnl.ErrNotExist) {
			continue // it took the routes along
		}
		if err != nil {
			return nil, fmt.Errorf("list pod routes: %w", err)
		}
		if _, _, ok := parseAlias(l.Alias); ok {
			continue
		}
		for _, dst := range routes[index] {
			to := dst.String()
			if dst.IsSingleIP() {
				to = dst.Addr().String()
			}
			strays = append(strays, fmt.Sprintf("%s with the route to %s: its alias %q is not of a pod", l.Name, to, l.Alias))
		}
	}
	return strays, nil
}

// String is the attachment with its pool, link and addresses.
func (f Found) String() string {
	var addrs []string
	for _, a := range f.Addresses {
		addrs = append(addrs, a.String())
	}
	return fmt.Sprintf("%s pool %q on %s (index %d) %s", f.Key(), f.Pool, f.HostIfName, f.HostIfIndex, strings.Join(addrs, ","))
}
