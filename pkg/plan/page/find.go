package page

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/inventory"
)

// maxFound bounds what a search finds.
const maxFound = 100

// Found is an object that a search finds.
type Found struct {
	Kind string `json:"kind"`
	Name string `json:"name"`
	// Says is what there is to know of it at once.
	Says string `json:"says"`
	// Section and Key are of its row on the page; empty if it has none.
	Section string `json:"section,omitempty"`
	Key     string `json:"key,omitempty"`
}

// Result is what a search finds.
type Result struct {
	Found []Found `json:"found"`
	// More is how many there are beyond Found.
	More int `json:"more,omitempty"`
}

// Find finds objects by an address, a CIDR or a range of addresses such as 10.0.0.0-10.0.0.31, which finds who has something of it, or by a part of a name. A node's
// whole name finds what it has, too.
func Find(c Cluster, query string) Result {
	f := finder{o: c.Objects}
	query = strings.TrimSpace(query)
	if query == "" {
		return Result{Found: []Found{}}
	}
	if from, to, ok := parseRange(query); ok {
		f.within(from, to)
	} else {
		f.named(strings.ToLower(query))
	}
	r := Result{Found: f.found, More: max(0, len(f.found)-maxFound)}
	r.Found = append([]Found{}, r.Found[:len(r.Found)-r.More]...)
	return r
}

// parseRange reads an address, a CIDR, or two addresses.
func parseRange(s string) (from, to netip.Addr, ok bool) {
	if p, err := netip.ParsePrefix(s); err == nil {
		return p.Masked().Addr(), last(p), true
	}
	first, second, two := strings.Cut(s, "-")
	from, err := netip.ParseAddr(strings.TrimSpace(first))
	if err != nil || from.Zone() != "" {
		return from, to, false
	}
	if !two {
		return from, from, true
	}
	to, err = netip.ParseAddr(strings.TrimSpace(second))
	return from, to, err == nil && to.BitLen() == from.BitLen()
}

// last is the last address of a prefix.
func last(p netip.Prefix) netip.Addr {
	bytes := p.Masked().Addr().AsSlice()
	for bit := p.Bits(); bit < len(bytes)*8; bit++ {
		bytes[bit/8] |= 1 << (7 - bit%8)
	}
	a, _ := netip.AddrFromSlice(bytes)
	return a
}

// finder collects what is found.
type finder struct {
	o     inventory.Objects
	found []Found
}

func (f *finder) add(kind, name, says, section, key string) {
	f.found = append(f.found, Found{kind, name, says, section, key})
}

// within finds who has an address of a range.
func (f *finder) within(from, to netip.Addr) {
	meets := func(p netip.Prefix) bool {
		return p.IsValid() && p.Addr().BitLen() == from.BitLen() && p.Addr().Compare(to) <= 0 && last(p).Compare(from) >= 0
	}
	has := func(addr string) bool {
		a, err := netip.ParseAddr(addr)
		return err == nil && meets(netip.PrefixFrom(a, a.BitLen()))
	}
	for _, p := range inventory.Pools(f.o) {
		if slices.ContainsFunc(p.Subnets, func(s string) bool { prefix, err := netip.ParsePrefix(s); return err == nil && meets(prefix) }) {
			f.pool(p)
		}
	}
	f.blocks(func(b *v2.AddressBlock) bool { return slices.ContainsFunc(ipam.Prefixes(b.IPv4, b.IPv6), meets) })
	for _, n := range f.o.Nodes {
		if slices.ContainsFunc(plan.NodeInternalIPs(n), func(a netip.Addr) bool { return has(a.String()) }) {
			f.node(n.Name)
		}
	}
	for _, s := range inventory.Services(f.o) {
		if slices.ContainsFunc(s.Addresses, has) {
			f.service(s)
		}
	}
}

// named finds what has a part of its name, in lower case.
func (f *finder) named(part string) {
	matches := func(names ...string) bool {
		return slices.ContainsFunc(names, func(n string) bool { return strings.Contains(n, part) })
	}
	whole := ""
	for _, n := range inventory.Nodes(inventory.Objects{Nodes: f.o.Nodes, Blocks: f.o.Blocks}) {
		if matches(n.Name) {
			f.node(n.Name)
		}
		if n.Name == part {
			whole = part
		}
	}
	for _, p := range inventory.Pools(f.o) {
		if matches(p.Name) {
			f.pool(p)
		}
	}
	for _, e := range inventory.Egresses(f.o) {
		if name := e.Namespace + "/" + e.Name; matches(name) {
			f.add("Egress", name, fmt.Sprintf("%d of %d routers, %d clients", e.Routers, e.Wanted, e.Clients), "egresses", name)
		}
	}
	for _, p := range inventory.Policies(f.o) {
		kind, name := "EgressPolicy", p.Namespace+"/"+p.Name
		if p.Namespace == "" {
			kind, name = "EgressClusterPolicy", p.Name
		}
		if matches(name) {
			if p.Egress == "" {
				f.add(kind, name, "leads to no Egress", "", "")
			} else {
				f.add(kind, name, fmt.Sprintf("leads %d pods to Egress %s", p.Clients, p.Egress), "egresses", p.Egress)
			}
		}
	}
	for _, s := range inventory.Services(f.o) {
		if matches(s.Namespace+"/"+s.Name, strings.ToLower(s.Reason)) {
			f.service(s)
		}
	}
	for _, g := range inventory.Gateways(f.o) {
		if matches(g.Name) {
			f.add("LoadBalancerGateway", g.Name, fmt.Sprintf("%d Services", g.Services), "gateways", g.Name)
		}
	}
	f.blocks(func(b *v2.AddressBlock) bool {
		if whole != "" {
			return b.Labels[v2.LabelNode] == whole || b.Floating != nil && b.Floating.Holding.Holder == whole
		}
		return matches(b.Name)
	})
}

func (f *finder) pool(p inventory.Pool) {
	f.add("AddressPool", p.Name, fmt.Sprintf("%s; %s blocks and %s addresses in use", strings.Join(p.Subnets, ", "), p.Blocks.Summary, p.Addresses.Summary), "pools", p.Name)
}

func (f *finder) node(name string) { f.add("Node", name, "", "nodes", name) }

func (f *finder) service(s inventory.Service) {
	says := s.Reason
	if len(s.Addresses) > 0 {
		says = strings.Join(s.Addresses, ", ") + "; " + s.Reason
	}
	f.add("Service", s.Namespace+"/"+s.Name, says, "services", s.Namespace+"/"+s.Name)
}

// blocks adds AddressBlocks: those of nodes, then floating addresses.
func (f *finder) blocks(chosen func(*v2.AddressBlock) bool) {
	some := inventory.Objects{Blocks: slices.DeleteFunc(slices.Clone(f.o.Blocks), func(b *v2.AddressBlock) bool { return !chosen(b) })}
	for _, b := range inventory.Blocks(some) {
		holder := "held by no node"
		if b.Node != "" {
			holder = "held by node " + b.Node
		}
		f.add("AddressBlock", b.Name, fmt.Sprintf("%s, %s; %d of %d addresses in use", joined(b.IPv4, b.IPv6), holder, b.Allocated, b.Addresses), "pools", b.Pool)
	}
	for _, a := range inventory.Addresses(some) {
		says := "of " + a.Owner + ", " + a.State
		if a.Holder != "" && a.State == inventory.StateHeld {
			says = "of " + a.Owner + ", on node " + a.Holder
		}
		f.add("Floating address", a.Address, says, "addresses", a.Block)
	}
}
