package podnet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

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

// Remove removes the link of an attachment, and with it its addresses and
// routes. The pod's network namespace isn't needed. hostIfIndex is where the
// link was last seen, 0 if that is unknown; a link that Coil 2.x made is only
// found by it. A link is removed only if its alias names the attachment. When
// there is none, that is success.
func (n *Network) Remove(ctx context.Context, id ID, hostIfIndex int) error {
	l, err := n.find(ctx, id, hostIfIndex)
	if err == nil {
		err = n.remove(ctx, l)
	}
	if err != nil && !errors.Is(err, rtnl.ErrNotExist) {
		return fmt.Errorf("detach %s: %w", id, err)
	}
	return nil
}

// find returns the host's end of an attachment without a dump; rtnl.ErrNotExist.
func (n *Network) find(ctx context.Context, id ID, hint int) (rtnl.Link, error) {
	lookups := []func() (rtnl.Link, error){
		func() (rtnl.Link, error) { return n.handle.LinkByAltName(ctx, id.altName()) },
		// An Attach that was killed may not have come to the alternative name.
		func() (rtnl.Link, error) { return n.handle.LinkByName(ctx, id.name()) },
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
	return rtnl.Link{}, fmt.Errorf("link of %s: %w", id, rtnl.ErrNotExist)
}

// belongs says whether a link is the host's end of an attachment: by its alias,
// or, when an Attach was killed before it set that, by its group and name.
func belongs(l rtnl.Link, id ID) bool {
	if l.Alias == "" {
		return l.Name == id.name() && l.Group == dataplane.LinkGroup
	}
	_, owner, ok := parseAlias(l.Alias)
	return ok && owner == id
}

func (n *Network) remove(ctx context.Context, l rtnl.Link) error {
	err := n.handle.Do(ctx, rtnl.DelLink(l.Index))
	if errors.Is(err, rtnl.ErrNotExist) {
		return nil
	}
	return err
}

// Found is an attachment that was found in the kernel.
type Found struct {
	ID
	// Pool is empty for pods that Coil didn't give their address.
	Pool string
	// HostIfName and HostIfIndex are of the host's end of the link.
	HostIfName  string
	HostIfIndex int
	// Addresses are those that the pod table routes to the link: at most one of
	// each family unless somebody else changed it.
	Addresses []netip.Addr
}

// List returns all attachments, ordered by the index of their links. An error
// says that the kernel couldn't be read completely; nothing is known then.
func (n *Network) List(ctx context.Context) ([]Found, error) {
	links, err := n.handle.Veths(ctx)
	if err != nil {
		return nil, fmt.Errorf("list attached pods: %w", err)
	}
	addrs := map[int][]netip.Addr{}
	for _, family := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		routes, err := n.handle.Routes(ctx, family, n.opts.PodTable, n.opts.Protocol)
		if err != nil {
			return nil, fmt.Errorf("list attached pods: %w", err)
		}
		for _, r := range routes {
			if r.Dst.IsSingleIP() {
				addrs[r.Link] = append(addrs[r.Link], r.Dst.Addr())
			}
		}
	}
	var found []Found
	for _, l := range links {
		if pool, id, ok := parseAlias(l.Alias); ok {
			found = append(found, Found{ID: id, Pool: pool, HostIfName: l.Name, HostIfIndex: l.Index, Addresses: addrs[l.Index]})
		}
	}
	slices.SortFunc(found, func(a, b Found) int { return a.HostIfIndex - b.HostIfIndex })
	return found, nil
}

// String is the attachment with its pool, link and addresses.
func (f Found) String() string {
	var addrs []string
	for _, a := range f.Addresses {
		addrs = append(addrs, a.String())
	}
	return fmt.Sprintf("%s pool %q on %s (index %d) %s", f.ID, f.Pool, f.HostIfName, f.HostIfIndex, strings.Join(addrs, ","))
}
