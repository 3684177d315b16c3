package heal

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/podnet"
)

// once is a source that tells one batch.
type once []rtnl.Change

func (o once) Run(_ context.Context, _ time.Duration, told func([]rtnl.Change)) error {
	told(o)
	return nil
}

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

func TestWatch(t *testing.T) {
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
		name         string
		changes      []rtnl.Change
		links        links
		pods, blocks bool
		looked, saw  []string
	}{
		{"rule", []rtnl.Change{{Kind: rtnl.RuleLost}}, links{}, true, false, nil, []string{Rule}},
		{"pod route", []rtnl.Change{lost(in(116))}, links{}, true, false, nil, []string{PodRoute}},
		{"exported route", []rtnl.Change{lost(in(119))}, links{}, false, true, nil, []string{BlockRoute}},
		{"unreachable route", []rtnl.Change{lost(in(120))}, links{}, false, true, nil, []string{UnreachableRoute}},
		{"unknown", []rtnl.Change{{}}, links{}, true, true, nil, nil},
		{"node's address lost", []rtnl.Change{addr(rtnl.AddrLost, 2, own.IPv4)}, links{}, true, false, nil, nil},
		{"node's address came", []rtnl.Change{addr(rtnl.AddrAdded, 2, own.IPv6)}, links{}, true, false, nil, nil},
		{"another address came", []rtnl.Change{addr(rtnl.AddrAdded, 2, netip.MustParseAddr("192.0.2.9"))}, links{}, false, false, nil, nil},
		{"another address lost", []rtnl.Change{addr(rtnl.AddrLost, 2, netip.MustParseAddr("192.0.2.9"))}, links{},
			false, false, []string{"2 [192.0.2.9]"}, nil},
		{"gateway lost", []rtnl.Change{addr(rtnl.AddrLost, 7, podnet.Gateways.IPv4), changed(whole)}, links{unsound: map[int]bool{7: true}},
			true, false, []string{"7 [169.254.1.1]"}, nil},
		{"link is made", []rtnl.Change{changed(half), changed(whole)}, links{}, false, false, nil, nil},
		{"link whose address isn't known yet", []rtnl.Change{changed(rtnl.Link{Index: 7, Name: "veth0123456789a", Group: dataplane.LinkGroup})},
			links{}, false, false, nil, nil},
		{"link is half made still", []rtnl.Change{changed(half)}, links{}, false, false, []string{"7 []"}, nil},
		{"link lost a mark", []rtnl.Change{changed(whole), changed(half)}, links{unsound: map[int]bool{7: true}}, true, false, []string{"7 []"}, nil},
		{"link is removed", []rtnl.Change{addr(rtnl.AddrLost, 7, podnet.Gateways.IPv4), changed(half), {Kind: rtnl.LinkLost, Link: 7}},
			links{}, false, false, nil, nil},
		{"parameter of a link", []rtnl.Change{{Kind: rtnl.LinkChanged, Link: 7}}, links{unsound: map[int]bool{7: true}}, true, false, []string{"7 []"}, nil},
		{"parameter of all links", []rtnl.Change{{Kind: rtnl.LinkChanged, Link: -1}}, links{}, true, false, nil, nil},
		{"somebody else's link", []rtnl.Change{changed(rtnl.Link{Index: 9})}, links{}, false, false, nil, nil},
		{"MTU of the uplink", []rtnl.Change{changed(rtnl.Link{Index: uplink, MTU: 1400})}, links{}, true, false, nil, nil},
		{"route learned from a pod", []rtnl.Change{taught(7)}, links{}, true, false, nil, nil},
		{"route learned from a router", []rtnl.Change{taught(uplink)}, links{}, false, false, nil, nil},
		{"route learned from who can't be read", []rtnl.Change{taught(uplink)}, links{err: errors.New("no buffer space")}, true, false, nil, nil},
		{"uplink", []rtnl.Change{changed(rtnl.Link{Index: uplink, MTU: 1500})}, links{}, false, false, nil, nil},
		{"loopback", []rtnl.Change{changed(rtnl.Link{Index: 1})}, links{}, false, true, nil, nil},
		{"link that can't be read", []rtnl.Change{changed(half)}, links{err: errors.New("no buffer space")}, true, false, []string{"7 []"}, nil},
		{"too many links to look at", many, links{}, true, false, nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			pods, blocks := false, false
			var saw []string
			w := Watch{
				Source: once(c.changes), Links: &c.links, PodTable: 116, Loopback: 1, NodeAddrs: func() ipam.Address { return own },
				Pods: func() { pods = true }, Blocks: func() { blocks = true },
				Saw: func(kind, _ string) { saw = append(saw, kind) },
			}
			if err := w.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			if pods != c.pods || blocks != c.blocks {
				t.Errorf("woke pods %t, blocks %t", pods, blocks)
			}
			if !slices.Equal(c.links.looked, c.looked) || !slices.Equal(saw, c.saw) {
				t.Errorf("looked at %v, saw %v", c.links.looked, saw)
			}
		})
	}
}

func TestAdviceForEachKind(t *testing.T) {
	for _, k := range Kinds() {
		if Advice(k) == "" {
			t.Errorf("none for %s", k)
		}
	}
}
