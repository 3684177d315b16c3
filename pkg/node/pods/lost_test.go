package pods

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/podnet"
)

// links notes who is looked at; those of unsound lack something.
type links struct {
	unsound map[int]bool
	err     error
	looked  []string
}

func (l *links) UplinkChanged(link rtnl.Link) bool { return link.Index == uplink && link.MTU != 1500 }

func (l *links) Owns(_ context.Context, index int) (bool, error) { return index != uplink, l.err }

// uplink is the index of the node's uplink, which had an MTU of 1500.
const uplink = 2

func (l *links) Sound(_ context.Context, index int, lost ...netip.Addr) (bool, error) {
	l.looked = append(l.looked, fmt.Sprintf("%d %v", index, lost))
	return !l.unsound[index], l.err
}

func TestLost(t *testing.T) {
	own := ipam.Address{IPv4: netip.MustParseAddr("192.0.2.1"), IPv6: netip.MustParseAddr("2001:db8::1")}
	lost := func(r dataplane.Route) rtnl.Change { return rtnl.Change{Kind: rtnl.RouteLost, Route: r} }
	in := func(table int) dataplane.Route {
		return dataplane.Route{Table: table, Dst: netip.MustParsePrefix("10.0.0.0/27"), Protocol: 30}
	}
	addr := func(kind rtnl.ChangeKind, link int, a netip.Addr) rtnl.Change {
		return rtnl.Change{Kind: kind, Link: link, Addr: a}
	}
	changed := func(l rtnl.Link) rtnl.Change { return rtnl.Change{Kind: rtnl.LinkChanged, Link: l.Index, State: &l} }
	taught := func(link int) rtnl.Change {
		return rtnl.Change{Kind: rtnl.RouteLearned, Route: dataplane.Route{Link: link, Protocol: unix.RTPROT_RA}}
	}
	half := rtnl.Link{Index: 7, Group: dataplane.LinkGroup} // as while it is made
	whole := rtnl.Link{
		Index: 7, Group: dataplane.LinkGroup, Alias: "COIL:default:abc:eth0", AltNames: []string{"coil-abc-eth0"}, Up: true,
		Parameters: rtnl.Parameters{Forwarding: true, RPFilter: rtnl.LooseRPFilter},
	}
	var many []rtnl.Change
	for i := range 2 * maxSuspects {
		l := half
		l.Index = 100 + i
		many = append(many, changed(l))
	}
	for _, c := range []struct {
		name        string
		changes     []rtnl.Change
		links       links
		lost        bool
		looked, saw []string
	}{
		{"rule", []rtnl.Change{{Kind: rtnl.RuleLost}}, links{}, true, nil, []string{Rule}},
		{"pod route", []rtnl.Change{lost(in(116))}, links{}, true, nil, []string{Route}},
		{"exported route", []rtnl.Change{lost(in(119))}, links{}, false, nil, nil},
		{"unreachable route", []rtnl.Change{lost(in(120))}, links{}, false, nil, nil},
		{"unknown", []rtnl.Change{{}}, links{}, true, nil, nil},
		{"node's address lost", []rtnl.Change{addr(rtnl.AddrLost, 2, own.IPv4)}, links{}, true, nil, nil},
		{"node's address came", []rtnl.Change{addr(rtnl.AddrAdded, 2, own.IPv6)}, links{}, true, nil, nil},
		{"another address came", []rtnl.Change{addr(rtnl.AddrAdded, 2, netip.MustParseAddr("192.0.2.9"))}, links{}, false, nil, nil},
		{"another address lost", []rtnl.Change{addr(rtnl.AddrLost, 2, netip.MustParseAddr("192.0.2.9"))}, links{},
			false, []string{"2 [192.0.2.9]"}, nil},
		{"gateway lost", []rtnl.Change{addr(rtnl.AddrLost, 7, podnet.Gateways.IPv4), changed(whole)}, links{unsound: map[int]bool{7: true}},
			true, []string{"7 [169.254.1.1]"}, nil},
		{"link is made", []rtnl.Change{changed(half), changed(whole)}, links{}, false, nil, nil},
		{"link whose address isn't known yet", []rtnl.Change{changed(rtnl.Link{Index: 7, Name: "veth0123456789a", Group: dataplane.LinkGroup})},
			links{}, false, nil, nil},
		{"link is half made still", []rtnl.Change{changed(half)}, links{}, false, []string{"7 []"}, nil},
		{"link lost a mark", []rtnl.Change{changed(whole), changed(half)}, links{unsound: map[int]bool{7: true}}, true, []string{"7 []"}, nil},
		{"link is removed", []rtnl.Change{addr(rtnl.AddrLost, 7, podnet.Gateways.IPv4), changed(half), {Kind: rtnl.LinkLost, Link: 7}},
			links{}, false, nil, nil},
		{"parameter of a link", []rtnl.Change{{Kind: rtnl.LinkChanged, Link: 7}}, links{unsound: map[int]bool{7: true}}, true, []string{"7 []"}, nil},
		{"parameter of all links", []rtnl.Change{{Kind: rtnl.LinkChanged, Link: -1}}, links{}, true, nil, nil},
		{"somebody else's link", []rtnl.Change{changed(rtnl.Link{Index: 9})}, links{}, false, nil, nil},
		{"MTU of the uplink", []rtnl.Change{changed(rtnl.Link{Index: uplink, MTU: 1400})}, links{}, true, nil, nil},
		{"route learned from a pod", []rtnl.Change{taught(7)}, links{}, true, nil, nil},
		{"route learned from a router", []rtnl.Change{taught(uplink)}, links{}, false, nil, nil},
		{"route learned from who can't be read", []rtnl.Change{taught(uplink)}, links{err: errors.New("no buffer space")}, true, nil, nil},
		{"uplink", []rtnl.Change{changed(rtnl.Link{Index: uplink, MTU: 1500})}, links{}, false, nil, nil},
		{"loopback", []rtnl.Change{changed(rtnl.Link{Index: 1})}, links{}, false, nil, nil},
		{"link that can't be read", []rtnl.Change{changed(half)}, links{err: errors.New("no buffer space")}, true, []string{"7 []"}, nil},
		{"too many links to look at", many, links{}, true, nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			saw := &repairs{done: map[string]int{}}
			k := &Keeper{Links: &c.links, PodTable: 116, NodeAddrs: func() ipam.Address { return own }, Repairs: saw}
			if got := k.Lost(t.Context(), c.changes); got != c.lost {
				t.Errorf("lost is %t", got)
			}
			if !slices.Equal(c.links.looked, c.looked) || !slices.Equal(saw.saw, c.saw) {
				t.Errorf("looked at %v, saw %v", c.links.looked, saw.saw)
			}
		})
	}
}

func TestAdviceForEachKind(t *testing.T) {
	for _, k := range []string{Route, Rule, Link, LinkAddress, Sysctl} {
		if Kinds[k] == "" {
			t.Errorf("none for %s", k)
		}
	}
}
