package floating

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// flows is the table of a router, in which sources are translated.
func (f *fixture) flows(i int) *conntrack.Table {
	f.t.Helper()
	ns := testkit.Must(netlab.Open(f.Routers[i].Path))(f.t)
	table := testkit.Must(conntrack.New(ns.NS))(f.t)
	f.t.Cleanup(func() {
		table.Close()
		testkit.Check(f.t, ns.Close())
	})
	for _, command := range []string{"add table inet t", "add chain inet t nat { type nat hook postrouting priority srcnat; }"} {
		testkit.Must(f.Routers[i].Run(f.t.Context(), "nft", command))(f.t)
	}
	return table
}

// known are the flows of the address in a table.
func (f *fixture) known(table *conntrack.Table) (all []string, err error) {
	err = table.Translated(f.t.Context(), f.Addrs, func(flow conntrack.Flow) { all = append(all, flow.String()) })
	slices.Sort(all)
	return all, err
}

// connections gives a router's table n connections by each of its addresses, and returns them as known does.
func (f *fixture) connections(table *conntrack.Table, n uint16) []string {
	f.t.Helper()
	var flows []conntrack.Flow
	for i, a := range f.Addrs {
		client, server := []string{"10.0.9.9", "fd00::9:9"}[i], []string{"192.0.2.1", "2001:db8::1"}[i]
		for port := range n {
			flows = append(flows, conntrack.Flow{
				Protocol: unix.IPPROTO_TCP, Src: netip.AddrPortFrom(netip.MustParseAddr(client), 1000+port), Dst: netip.AddrPortFrom(netip.MustParseAddr(server), 443),
				Translated: netip.AddrPortFrom(a, 2000+port), Timeout: 3600, TCP: conntrack.TCP{State: 3, FlagsOrig: 3, FlagsReply: 3},
			})
		}
	}
	if n, err := table.Insert(f.t.Context(), flows); n != len(flows) || err != nil {
		f.t.Fatalf("%d flows are inserted, %v", n, err)
	}
	return testkit.Must(f.known(table))(f.t)
}

// A router that ends keeps the address as long as it serves. When the address moves, its connections do, and the router of before forgets them.
func TestConnectionsAreHandedOver(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "copied", 3)
	f.held(0)
	before, after := f.flows(0), f.flows(1)
	want := f.connections(before, 50)
	pings := f.pings()
	epoch := f.holding().Epoch
	testkit.Check(t, f.End(t.Context(), 0))
	lasts(t, 2*time.Second)
	if got := f.holding().Epoch; got != epoch {
		t.Errorf("the epoch is %d, and was %d: the address has moved though its router serves", got, epoch)
	}
	testkit.Check(t, f.Place(t.Context(), f.Candidates[1].Name, 1, 0, 2))
	f.held(1)
	// What clients still send by the router of before may leave its node.
	testkit.Eventually(t, 5*time.Second, "the router of before may send from the address", func() error {
		out, err := f.Candidates[0].Run(t.Context(), "nft", "list", "table", "inet", "coil")
		for _, a := range f.Addrs {
			if err == nil && !strings.Contains(out, a.String()) {
				err = fmt.Errorf("not from %s", a)
			}
		}
		return err
	})
	testkit.Check(t, f.Place(t.Context(), "", 1, 2))
	if gone := outage(t, pings); gone > testkit.Timeout(time.Second) {
		t.Errorf("the address was silent for %s", gone)
	}
	if got := testkit.Must(f.known(after))(t); !slices.Equal(got, want) {
		t.Errorf("the next router has %d flows, want %d: %v", len(got), len(want), got)
	}
	testkit.Eventually(t, 30*time.Second, "the router of before has forgotten them", func() error {
		left, err := f.known(before)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%d are left", len(left))
		}
		return err
	})
}

// The address of many connections moves within 2 s of the order, and all of them with it.
func TestManyConnectionsAreHandedOver(t *testing.T) {
	f := newFixture(t, "many", 2)
	f.held(0)
	before, after := f.flows(0), f.flows(1)
	want := f.connections(before, uint16(testkit.FloatingForm.Times(500, 25000)))
	pings := f.pings()
	began := time.Now()
	testkit.Check(t, f.Place(t.Context(), f.Candidates[1].Name, 1, 0))
	testkit.Eventually(t, 20*time.Second, "the next router knows the connections", func() error {
		n, _, err := after.Size()
		if err == nil && n < len(want) {
			err = fmt.Errorf("%d of %d", n, len(want))
		}
		return err
	})
	copied := time.Since(began)
	testkit.Eventually(t, 20*time.Second, "the next node has the address", func() error {
		if h := f.holding(); h.Holder != f.Candidates[1].Name {
			return fmt.Errorf("%s has it", h.Holder)
		}
		return nil
	})
	moved := time.Since(began)
	if got := testkit.Must(f.known(after))(t); !slices.Equal(got, want) {
		t.Errorf("the next router has %d flows, want %d", len(got), len(want))
	}
	f.held(1)
	gone := outage(t, pings)
	t.Logf("%d connections were copied after %s, the address had moved after %s, and was silent for %s", len(want), copied, moved, gone)
	if copied > testkit.Limit(2*time.Second) || moved > testkit.Limit(2*time.Second) {
		t.Errorf("%d connections were copied after %s, and the address had moved after %s: want 2s", len(want), copied, moved)
	}
	if gone > testkit.Timeout(time.Second) {
		t.Errorf("the address was silent for %s", gone)
	}
}
