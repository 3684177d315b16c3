package forwarding

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/datagram"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/node/floating/place"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// lab is a node that answers for addresses, and probes them.
type lab struct {
	*floatingtest.Path
	tables place.Tables
	place  *place.Place
	prober *Prober
	pods   map[types.UID]place.Pod
}

func newLab(t *testing.T, tracked bool) *lab {
	l := &lab{Path: floatingtest.NewPath(t)}
	l.pods = map[types.UID]place.Pod{"router": {
		Link: l.Link, Address: ipam.Address{IPv4: netip.MustParseAddr("10.0.1.2"), IPv6: netip.MustParseAddr("fd00:1::2")},
		Netns: store.Netns{Path: l.Pod.Lab().Path(), Inode: l.Pod.Inode()},
	}}
	pod := func(uid types.UID) (place.Pod, bool) { p, ok := l.pods[uid]; return p, ok }
	l.tables = testkit.Must(place.OpenTables(l.Node.NS))(t)
	t.Cleanup(l.tables.Close)
	l.place = testkit.Must(place.New(t.Context(), place.Config{Handle: l.Handle, Tables: l.tables, PodTable: 116, ExportTable: 119, Loopback: 1, Tracked: tracked, Pod: pod}))(t)
	t.Cleanup(l.place.Wait)
	table := testkit.Must(nft.New(l.Node.NS, dataplane.NftTableProbes))(t)
	t.Cleanup(table.Close)
	l.prober = New(Config{Handle: l.Handle, Table: table, Pod: pod, Tracked: tracked}, prometheus.NewRegistry())
	return l
}

func nothing(context.Context, floating.Address) error { return nil }

// fate is the fate of the probes of an address.
func (l *lab) fate(a floating.Address) Fate {
	l.T.Helper()
	return testkit.Must(l.prober.Probe(l.T.Context(), []floating.Address{a}, nothing))(l.T)[0]
}

// fates returns a function that wants a fate of the probes of an address.
func (l *lab) fates(a floating.Address) func(what string, passed bool, dropped ...dataplane.Family) {
	return func(what string, passed bool, dropped ...dataplane.Family) {
		l.T.Helper()
		got := l.fate(a)
		if got.Err != nil || got.Passed != passed || !slices.Equal(got.Dropped, dropped) {
			l.T.Errorf("%s: the fate is %+v, want passed %t, dropped %v", what, got, passed, dropped)
		}
	}
}

const forwardingPolicy = "add table ip filter; add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }; add rule ip filter FORWARD ip saddr 10.0.1.0/24 accept"

// The node finds out that rules of others drop packets of an address, in each family, and by none of its other properties. No probe leaves
// the node, and nothing that is others' changes.
func TestProbe(t *testing.T) {
	l := newLab(t, false)
	p := l.place
	o := floatingtest.Order(7, time.Hour)
	testkit.Check(t, p.Answer(t.Context(), o))
	l.Await(o, true)
	none := l.Leaving()
	is := l.fates(o.Address)
	is("without a route to the outside", false)
	testkit.Check(t, l.Node.Lab().IP(t.Context(), "route add default via 10.0.0.2"))
	is("with a route of IPv4 alone", true)
	testkit.Check(t, l.Node.Lab().IP(t.Context(), "-6 route add default via fd00::2"))
	is("without rules of others", true)
	l.Rules(forwardingPolicy)
	before := testkit.Must(l.Node.Run("nft", "list", "table", "ip", "filter"))(t)
	is("with a policy and an exception for pods", false, dataplane.IPv4)
	if got := testkit.Must(l.tables.Dropping())(t); !slices.Equal(got, []string{"ip filter FORWARD"}) {
		t.Errorf("chains that drop are %q", got)
	}
	l.Rules("add table ip6 t; add chain ip6 t c { type filter hook forward priority 10; }; add rule ip6 t c iifname \"pod\" drop")
	is("with a rule for the link", false, dataplane.IPv4, dataplane.IPv6)
	l.Rules("delete table ip6 t")
	is("with a policy", false, dataplane.IPv4)
	if after := testkit.Must(l.Node.Run("nft", "list", "table", "ip", "filter"))(t); after != before {
		t.Errorf("the table of another program was\n%s\nand is\n%s", before, after)
	}
	l.Rules("add rule ip filter FORWARD ip saddr 192.0.2.0/24 accept")
	is("with an exception for the address", true)
	l.Rules("flush chain ip filter FORWARD")
	is("without it again", false, dataplane.IPv4)
	l.Rules("delete table ip filter; add table ip early; add chain ip early c { type filter hook prerouting priority 0; }; add rule ip early c iifname \"pod\" drop")
	is("before the node decides to forward", false, dataplane.IPv4)
	l.Rules("delete table ip early")
	testkit.Check(t, p.Stop(t.Context(), o.Address))
	p.Wait()
	is("when the node has stopped", true)
	l.pods["router"] = place.Pod{Link: l.pods["router"].Link, Address: l.pods["router"].Address}
	if l.fate(o.Address).Err == nil {
		t.Error("probes are sent in a network namespace that isn't known")
	}
	delete(l.pods, "router")
	is("when the pod has gone", false)
	none()
}

// A node finds out whether it would forward packets of an address that is at another node. It doesn't answer for it, leads no packets to it,
// and nothing leaves it: no probe, and no error about one.
func TestProbeOfAddressElsewhere(t *testing.T) {
	for _, tracked := range []bool{false, true} {
		t.Run(fmt.Sprintf("tracked %t", tracked), func(t *testing.T) {
			l := newLab(t, tracked)
			p := l.place
			a := floatingtest.Order(7, 0).Address
			a.OfEgress = true
			l.Outside()
			none := l.Leaving()
			is := l.fates(a)
			is("without rules of others", true)
			for _, to := range a.Addrs() {
				testkit.Check(t, l.Passes(to, false))
			}
			if got := l.Routes("116") + l.Routes("119"); got != "" {
				t.Errorf("routes are %q", got)
			}
			l.Rules(forwardingPolicy)
			is("with a policy", false, dataplane.IPv4)
			l.Rules("delete table ip filter; add table inet t; add chain inet t c { type filter hook forward priority 10; }; add rule inet t c iifname \"pod\" reject")
			is("with a rule that says so", false, dataplane.IPv4, dataplane.IPv6)
			l.Rules("delete table inet t; add table inet t; add chain inet t c { type nat hook postrouting priority 100; }; add rule inet t c masquerade")
			is("translated, unless it is an Egress's", true)
			l.Rules("delete table inet t; add table inet t; add chain inet t c { type filter hook postrouting priority 300; }; add rule inet t c ip saddr 192.0.2.7 ip saddr set 10.0.0.1")
			is("with another source", false, dataplane.IPv4)
			l.Rules("delete table inet t")
			// It comes here, and goes again.
			o := floatingtest.Order(7, time.Hour)
			o.OfEgress = true
			testkit.Check(t, p.Answer(t.Context(), o))
			l.Await(o, true)
			is("when it is here", true)
			testkit.Check(t, p.Stop(t.Context(), o.Address))
			is("when it has gone", true)
			p.Wait()
			if got := testkit.Must(l.Node.Run("nft", "list", "ruleset"))(t); got != "" {
				t.Errorf("there is still %s", got)
			}
			none()
		})
	}
}

// The table goes when all probes have arrived, and not before: a late one would leave the node.
func TestLateProbe(t *testing.T) {
	l := newLab(t, false)
	l.Outside()
	none := l.Leaving()
	a := floatingtest.Order(7, 0).Address
	link := testkit.Must(l.Handle.LinkByIndex(t.Context(), l.Link))(t)
	sends := func() error {
		return datagram.Send(l.Pod.NS, link.Peer, datagram.Datagram{MAC: link.MAC, From: a.IPv4, To: ruleset.ProbeTo[dataplane.IPv4], Hops: probeHops, Content: ruleset.Probe})
	}
	testkit.Must(l.prober.cfg.Table.Sync(t.Context(), ruleset.Probes{Addresses: a.Addrs()}.Ruleset()))(t)
	late := time.AfterFunc(100*time.Millisecond, func() { testkit.Check(t, sends()) })
	defer late.Stop()
	testkit.Check(t, l.prober.awaitArrived(t.Context(), 1), l.prober.Clear(t.Context()))
	if got := testkit.Must(l.Node.Run("nft", "list", "ruleset"))(t); got != "" {
		t.Errorf("there is still %s", got)
	}
	none()
}

// What keeps one address from being probed is no harm to others. A table of an earlier life goes.
func TestProbeOthers(t *testing.T) {
	l := newLab(t, false)
	l.Outside()
	testkit.Must(l.prober.cfg.Table.Sync(t.Context(), ruleset.Probes{Addresses: floatingtest.Order(9, 0).Addrs()}.Ruleset()))(t)
	addrs := []floating.Address{floatingtest.Order(8, 0).Address, floatingtest.Order(7, 0).Address}
	fates := testkit.Must(l.prober.Probe(t.Context(), addrs, func(_ context.Context, a floating.Address) error {
		if a.Block == "p-8" {
			return errors.New("refused")
		}
		return nil
	}))(t)
	if len(fates) != 2 || fates[0].Err == nil || fates[0].Passed || fates[1].Err != nil || !fates[1].Passed {
		t.Errorf("fates %+v", fates)
	}
	for _, fate := range []string{"passed", "unknown"} {
		if n := testutil.ToFloat64(l.prober.fates.WithLabelValues(fate)); n != 1 {
			t.Errorf("%v of the fate %s were counted", n, fate)
		}
	}
	if got := testkit.Must(l.Node.Run("nft", "list", "ruleset"))(t); got != "" {
		t.Errorf("there is still %s", got)
	}
}
