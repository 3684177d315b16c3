package podnet

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// labelled says whether a link has the group and the alternative name of an attachment;
// those that Coil 2.x made have the alias only.
func labelled(l rtnl.Link, id attachment.ID) bool {
	return dataplane.OfPods(l.Group) && slices.Contains(l.AltNames, altName(id))
}

// Label gives the link of an attachment that Coil 2.x made the group and the alternative
// name by which others are found. Packets notice nothing.
func (n *Network) Label(ctx context.Context, f Found) error {
	l, err := n.find(ctx, f.ID, f.HostIfIndex)
	if err == nil {
		p := Wired{Pod: Pod{ID: f.ID}}
		p.learn(l)
		err = n.relabel(ctx, p, l, rtnl.LinkChange{})
	}
	if err != nil {
		return fmt.Errorf("label %s: %w", f, err)
	}
	return nil
}

// Strays returns the routes of the pod table to links that are no attachment's, such as
// those whose alias was lost. Sync deletes them. found are attachments that List has found: their
// links aren't looked at again.
func (n *Network) Strays(ctx context.Context, found []Found) ([]string, error) {
	attached := make(map[int]bool, len(found))
	for _, f := range found {
		attached[f.HostIfIndex] = true
	}
	var strays []string
	for _, family := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		routes, err := n.handle.Routes(ctx, family, n.opts.PodTable, n.opts.Protocol)
		if err != nil {
			return nil, fmt.Errorf("list pod routes: %w", err)
		}
		for _, r := range routes {
			if attached[r.Link] {
				continue
			}
			l, err := n.handle.LinkByIndex(ctx, r.Link)
			if errors.Is(err, rtnl.ErrNotExist) {
				continue // it took the route along
			}
			if err != nil {
				return nil, fmt.Errorf("list pod routes: %w", err)
			}
			if _, _, ok := parseAlias(l.Alias); !ok {
				strays = append(strays, fmt.Sprintf("%s with the route to %s: its alias %q is not of a pod", l.Name, r.Dst.Addr(), l.Alias))
			}
		}
	}
	return strays, nil
}
