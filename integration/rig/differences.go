package rig

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// The contract's numbers in the kernel, written down a second time on purpose.
const (
	podTable, exportTable, unassignedTable = "116", "119", "120"
	protocol                               = "30"
	aliasPrefix                            = "COIL:"
	linkGroup                              = "1668245868" // 0x636f696c
)

// Differences compares record, kernel and API server with each other and with the ledger,
// for each node, and returns every difference in words. Nothing may be in progress.
// An error says that one of them couldn't be read.
func (r *Rig) Differences(ctx context.Context) ([]string, error) {
	var wrongs []string
	var errs []error
	for _, n := range r.Nodes() {
		found, err := n.Differences(ctx)
		wrongs = append(wrongs, found...)
		errs = append(errs, err)
	}
	found, err := r.blockDifferences(ctx)
	return append(wrongs, found...), errors.Join(append(errs, err)...)
}

// AwaitClean waits until Differences finds no difference twice in a row: the node's background work
// may take a moment. The error names the differences that remain.
func (r *Rig) AwaitClean(ctx context.Context, within time.Duration) error {
	return awaitClean(ctx, within, r.Differences)
}

// AwaitClean waits as that of Rig does for one node, while others may be busy.
func (n *Node) AwaitClean(ctx context.Context, within time.Duration) error {
	return awaitClean(ctx, within, n.Differences)
}

func awaitClean(ctx context.Context, within time.Duration, differences func(context.Context) ([]string, error)) error {
	deadline := time.Now().Add(testkit.Timeout(within))
	for clean := 0; ; {
		wrongs, err := differences(ctx)
		if err == nil && len(wrongs) == 0 {
			if clean++; clean == 2 {
				return nil
			}
		} else {
			clean = 0
		}
		if clean == 0 && time.Now().After(deadline) {
			return errors.Join(err, fmt.Errorf("%d differences %s after the last change:\n  %s",
				len(wrongs), testkit.Timeout(within), strings.Join(wrongs, "\n  ")))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// blockDifferences checks that no two blocks overlap and that each has a node.
func (r *Rig) blockDifferences(ctx context.Context) ([]string, error) {
	nodes := map[string]bool{}
	for _, n := range r.Nodes() {
		nodes[n.Name] = true
	}
	return r.BlockDifferences(ctx, labels.Everything(), func(node string) bool { return nodes[node] })
}

// BlockDifferences checks that no two AddressBlocks overlap, and that each selected block
// is of a node that may have it. It may be called at any time.
func (r *Rig) BlockDifferences(ctx context.Context, selected labels.Selector, may func(node string) bool) ([]string, error) {
	blocks, err := r.Coil.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var wrongs []string
	type held struct {
		prefix netip.Prefix
		block  string
	}
	var all []held
	for _, b := range blocks.Items {
		if node := b.Labels[v2.LabelNode]; selected.Matches(labels.Set(b.Labels)) && !may(node) {
			wrongs = append(wrongs, fmt.Sprintf("AddressBlock %s is of node %q, which can't have it", b.Name, node))
		}
		for _, cidr := range []*string{b.IPv4, b.IPv6} {
			if cidr == nil {
				continue
			}
			p, err := netip.ParsePrefix(*cidr)
			if err != nil {
				return nil, err
			}
			for _, o := range all {
				if o.prefix.Overlaps(p) {
					wrongs = append(wrongs, fmt.Sprintf("AddressBlocks %s and %s overlap: %s, %s", o.block, b.Name, o.prefix, p))
				}
			}
			all = append(all, held{p, b.Name})
		}
	}
	return wrongs, nil
}

// Differences does the node's part of Rig.Differences.
func (n *Node) Differences(ctx context.Context) ([]string, error) {
	s, err := n.look(ctx)
	if err != nil {
		return nil, fmt.Errorf("look at %s: %w", n.Name, err)
	}
	live := map[string]*Sandbox{}
	addrs := map[string][]netip.Addr{}
	for sb, has := range n.rig.Ledger.Live() {
		if sb.Node == n {
			id := sb.ContainerID + "/" + sb.IfName
			live[id], addrs[id] = sb, has
		}
	}
	c := &comparison{node: n, state: s, live: live, addrs: addrs}
	c.record()
	c.kernel()
	c.api()
	slices.Sort(c.wrongs)
	return append(n.rig.Ledger.Wrongs(n), c.wrongs...), nil
}

// comparison collects the differences of one node.
type comparison struct {
	node   *Node
	state  state
	live   map[string]*Sandbox
	addrs  map[string][]netip.Addr
	wrongs []string
}

func (c *comparison) wrong(format string, args ...any) {
	c.wrongs = append(c.wrongs, c.node.Name+": "+fmt.Sprintf(format, args...))
}

func addrText(addrs []netip.Addr) string {
	var all []string
	for _, a := range addrs {
		all = append(all, a.String())
	}
	return strings.Join(all, ",")
}

// record compares the record with the live sandboxes and with the links.
func (c *comparison) record() {
	links := map[int]link{}
	for _, l := range c.state.links {
		links[l.Index] = l
	}
	seen := map[string]bool{}
	for _, r := range c.state.rows {
		if r.State == "cooling" {
			continue
		}
		sb := c.live[r.id()]
		if sb == nil {
			c.wrong("the record has %s for %.12s, %s, which is no live sandbox", r.addrs(), r.ContainerID, r.State)
			continue
		}
		seen[r.id()] = true
		if r.State != "attached" {
			c.wrong("the record of %s is %s, not attached", sb, r.State)
		}
		if want := addrText(c.addrs[r.id()]); r.addrs() != want {
			c.wrong("the record of %s has %s, but ADD answered %s", sb, r.addrs(), want)
		}
		if l, ok := links[r.HostIfIndex]; !ok || l.Name != r.HostIfName || !strings.HasSuffix(l.Alias, ":"+r.ContainerID+":"+r.IfName) {
			c.wrong("the record of %s names link %s, index %d, but that is %+v", sb, r.HostIfName, r.HostIfIndex, l)
		}
		if want := sb.ns; want != nil && r.NetnsInode != 0 && r.NetnsInode != want.Inode() {
			c.wrong("the record of %s has network namespace %d, not %d", sb, r.NetnsInode, want.Inode())
		}
	}
	for id, sb := range c.live {
		if !seen[id] {
			c.wrong("the record lacks %s, to which ADD answered %s", sb, addrText(c.addrs[id]))
		}
	}
}

// kernel compares links and routes with the live sandboxes, and the rules with what
// they must be.
func (c *comparison) kernel() {
	devs := map[string]string{} // of live sandboxes, by name
	seen := map[string]bool{}
	for _, l := range c.state.links {
		rest, ours := strings.CutPrefix(l.Alias, aliasPrefix)
		if !ours {
			if l.Group == linkGroup {
				c.wrong("link %s, index %d, has our group, but alias %q", l.Name, l.Index, l.Alias)
			}
			continue
		}
		parts := strings.Split(rest, ":")
		id := strings.Join(parts[1:], "/")
		sb := c.live[id]
		switch {
		case sb == nil:
			c.wrong("link %s, index %d, is of %.12s, which is no live sandbox", l.Name, l.Index, parts[1])
		case seen[id]:
			c.wrong("link %s, index %d, is a second one of %s", l.Name, l.Index, sb)
		case l.State != "UP" || l.Group != linkGroup:
			c.wrong("link %s of %s is %s, of group %s", l.Name, sb, l.State, l.Group)
		default:
			devs[l.Name] = id
		}
		seen[id] = true
	}
	for id, sb := range c.live {
		if !seen[id] {
			c.wrong("the kernel lacks the link of %s", sb)
		}
	}
	want := map[string]string{}
	for id, addrs := range c.addrs {
		for _, a := range addrs {
			want[a.String()] = id
		}
	}
	for _, r := range c.state.routes[podTable] {
		id := devs[r.Dev]
		if want[r.Dst] == "" || want[r.Dst] != id {
			c.wrong("table %s leads %s to %s, but it is the address of %.12q", podTable, r.Dst, r.Dev, want[r.Dst])
		}
		delete(want, r.Dst)
	}
	for a, id := range want {
		c.wrong("table %s has no route to %s of %s", podTable, a, c.live[id])
	}
	have := addrText(slices.Concat(slices.Collect(maps.Values(c.addrs))...))
	for _, a := range c.state.proxies {
		if !slices.Contains(strings.Split(have, ","), a) {
			c.wrong("the node answers for %s, which is no live sandbox's", a)
		}
	}
	for _, w := range []string{
		"2000: from all lookup 116 proto 30", "2001: from all lookup 120 proto 30",
	} {
		if n := len(slices.DeleteFunc(slices.Clone(c.state.rules), func(r string) bool { return r != w })); n != 2 {
			c.wrong("%d of 2 families have the rule %q", n, w)
		}
	}
}

// api compares AddressBlocks and BlockRequests with the record and the routes.
func (c *comparison) api() {
	want := map[string]string{}
	for _, b := range c.state.held {
		ranges := joinText(b.IPv4, b.IPv6)
		want[b.Name] = ranges
		if uid := b.Annotations[v2.AnnotationNodeUID]; uid != string(c.node.uid) {
			c.wrong("AddressBlock %s has node UID %q, not %q", b.Name, uid, c.node.uid)
		}
		if b.DeletionTimestamp != nil && !c.inUse(ranges) {
			c.wrong("AddressBlock %s is being deleted, and no pod has an address of it", b.Name)
		}
	}
	if !maps.Equal(want, c.state.blocks) {
		c.wrong("the record has blocks %v, the API server %v", c.state.blocks, want)
	}
	for _, t := range []struct{ table, kind, dev string }{{exportTable, "unicast", "lo"}, {unassignedTable, "unreachable", ""}} {
		missing := map[string]bool{}
		for _, ranges := range want {
			for p := range strings.SplitSeq(ranges, ",") {
				missing[routeText(p)] = true
			}
		}
		for _, r := range c.state.routes[t.table] {
			if !missing[r.Dst] || r.Type != t.kind || t.dev != "" && r.Dev != t.dev || r.Protocol != protocol {
				c.wrong("table %s has the route %+v", t.table, r)
			}
			delete(missing, r.Dst)
		}
		for p := range missing {
			c.wrong("table %s has no route to %s", t.table, p)
		}
	}
	for _, r := range c.state.requests {
		c.wrong("BlockRequest %s is left: %+v", r.Name, r.Status)
	}
	for _, name := range c.state.queued {
		c.wrong("the queue of deletions has %s", name)
	}
	for _, r := range c.state.rows {
		if ranges, ok := want[r.Block]; ok && r.State != "cooling" {
			for _, a := range []*string{r.IPv4, r.IPv6} {
				if a != nil && !within(*a, ranges) {
					c.wrong("the record has %s in block %s, which is %s", *a, r.Block, ranges)
				}
			}
		}
	}
}

// inUse says whether a live sandbox has an address of the ranges.
func (c *comparison) inUse(ranges string) bool {
	for _, addrs := range c.addrs {
		for _, a := range addrs {
			if within(a.String(), ranges) {
				return true
			}
		}
	}
	return false
}

// routeText is how iproute2 writes a prefix.
func routeText(prefix string) string {
	if p, err := netip.ParsePrefix(prefix); err == nil && p.IsSingleIP() {
		return p.Addr().String()
	}
	return prefix
}

func within(addr, ranges string) bool {
	a, err := netip.ParseAddr(addr)
	if err != nil {
		return false
	}
	for p := range strings.SplitSeq(ranges, ",") {
		if x, err := netip.ParsePrefix(p); err == nil && x.Contains(a) {
			return true
		}
	}
	return false
}
