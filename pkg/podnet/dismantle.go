package podnet

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Trace is a link that bears a mark of Coil's.
type Trace struct {
	// ID is the attachment's; zero if the link doesn't tell.
	attachment.ID
	// Pool is where the pod's address is from; empty if unknown or Coil didn't give it.
	Pool string
	// InUse says that a pod may need the link: it is neither half made nor half removed.
	InUse bool
	// Foreign says that another plugin made the link, and Coil 2.x put an alias on it.
	Foreign bool
	link    rtnl.Link
}

// String names the link and whose it is.
func (t Trace) String() string {
	switch {
	case t.ID == attachment.ID{}:
		return "link " + t.link.Name
	case t.Foreign:
		return fmt.Sprintf("link %s of another plugin, with the alias of container %s", t.link.Name, t.Key())
	}
	return fmt.Sprintf("link %s of container %s, pool %q", t.link.Name, t.Key(), t.Pool)
}

// Traces returns the links that bear a mark, ordered by their indexes.
func (n *Network) Traces(ctx context.Context) ([]Trace, error) {
	links, err := n.handle.Veths(ctx)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	var all []Trace
	for _, l := range links {
		pool, id, aliased := parseAlias(l.Alias)
		switch {
		case aliased:
			foreign := pool == ""
			all = append(all, Trace{ID: id, Pool: pool, InUse: !foreign && !beingRemoved(l), Foreign: foreign, link: l})
		case l.Alias == "" && (dataplane.OfPods(l.Group) || beingRemoved(l)) && named(l):
			// The alias comes before a link is up, so that it was lost if that is up.
			all = append(all, Trace{InUse: l.Up && !beingRemoved(l), link: l})
		}
	}
	slices.SortFunc(all, func(a, b Trace) int { return a.link.Index - b.link.Index })
	return all, nil
}

// named says whether a link has a name like those that Attach gives.
func named(l rtnl.Link) bool {
	digits, ok := strings.CutPrefix(l.Name, namePrefix)
	_, err := hex.DecodeString("0" + digits) // of odd length
	return ok && len(digits) == hashDigits && err == nil || slices.ContainsFunc(l.AltNames, isAltName)
}

// Dismantle removes the links of traces, the routes to pods and the rules of the node, and tells
// each object that it removed. Links of other plugins only lose their alias. It goes on after a
// failure and can be repeated; without anything to remove it does nothing.
func (n *Network) Dismantle(ctx context.Context, traces []Trace, removed func(what string)) error {
	var errs []error
	var own []Trace
	var links []rtnl.Link
	for _, t := range traces {
		if !t.Foreign {
			own, links = append(own, t), append(links, t.link)
			continue
		}
		cleared, err := n.handle.Apply(ctx, rtnl.ErrNotExist, rtnl.ClearAlias(t.link.Index))
		if errs = append(errs, err); cleared > 0 {
			removed("alias of " + t.String())
		}
	}
	for i, err := range n.removeLinks(ctx, links) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", own[i], err))
		} else {
			removed(own[i].String())
		}
	}
	routes, err := n.routes.Sync(ctx, nil)
	if routes.Deleted > 0 {
		removed(fmt.Sprintf("%d routes of table %d", routes.Deleted, n.opts.PodTable))
	}
	errs = append(errs, err)
	rules, err := n.rules.Remove(ctx, n.wantedRules())
	for _, r := range rules {
		removed("rule " + r.String())
	}
	guarded, guardErr := n.guard.Exists(ctx)
	if guardErr == nil && guarded {
		if _, guardErr = n.guard.Sync(ctx, dataplane.Ruleset{}); guardErr == nil {
			removed("table inet " + dataplane.NftTable + " of nftables")
		}
	}
	return errors.Join(append(errs, err, guardErr)...)
}
