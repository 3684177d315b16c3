package crash

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// copies are two nodes that copy the connections of a floating address to each other.
type copies struct {
	*holders
	tables []*conntrack.Table // of the routers
	made   uint16             // how many connections of each family there were
}

func newCopies(t *testing.T, pool string, number int) *copies {
	t.Helper()
	c := &copies{holders: newHolders(t, pool, number)}
	for _, r := range c.Routers {
		for _, command := range []string{"add table inet t", "add chain inet t nat { type nat hook postrouting priority srcnat; }"} {
			testkit.Must(r.Run(t.Context(), "nft", command))(t)
		}
		ns := testkit.Must(netlab.Open(r.Path))(t)
		table := testkit.Must(conntrack.New(ns.NS))(t)
		t.Cleanup(func() {
			table.Close()
			testkit.Check(t, ns.Close())
		})
		c.tables = append(c.tables, table)
	}
	return c
}

// connects gives a router new connections by the address, and returns them.
func (c *copies) connects(i int) []string {
	c.t.Helper()
	var flows []conntrack.Flow
	var all []string
	for n, a := range c.Addrs {
		client, server := []string{"10.0.9.9", "fd00::9:9"}[n], []string{"192.0.2.1", "2001:db8::1"}[n]
		for port := range uint16(20) {
			port += c.made
			flows = append(flows, conntrack.Flow{
				Protocol: unix.IPPROTO_TCP, Src: netip.AddrPortFrom(netip.MustParseAddr(client), 1000+port), Dst: netip.AddrPortFrom(netip.MustParseAddr(server), 443),
				Translated: netip.AddrPortFrom(a, 2000+port), Timeout: 3600, TCP: conntrack.TCP{State: 3, FlagsOrig: 3, FlagsReply: 3},
			})
			all = append(all, flows[len(flows)-1].String())
		}
	}
	c.made += 20
	if n, err := c.tables[i].Insert(c.t.Context(), flows); n != len(flows) || err != nil {
		c.t.Fatalf("%d of %d connections are inserted, %v", n, len(flows), err)
	}
	return all
}

// known are the connections by the address that a router knows. Pings of the test aren't among them.
func (c *copies) known(i int) (all []string, err error) {
	err = c.tables[i].Translated(c.t.Context(), c.Addrs, func(f conntrack.Flow) {
		if f.Protocol == unix.IPPROTO_TCP {
			all = append(all, f.String())
		}
	})
	slices.Sort(all)
	return all, err
}

// taken says which of some connections a router lacks.
func (c *copies) taken(i int, want []string, when string) {
	c.t.Helper()
	got := testkit.Must(c.known(i))(c.t)
	if lost := slices.DeleteFunc(slices.Clone(want), func(f string) bool { return slices.Contains(got, f) }); len(lost) > 0 {
		c.t.Errorf("%s: the router of node %s lacks %d of %d connections", when, c.Candidates[i].Name, len(lost), len(want))
	}
}

// forgotten waits until the router of a node that hasn't the address knows no connection of it.
func (c *copies) forgotten(i int) {
	c.t.Helper()
	testkit.Eventually(c.t, 40*time.Second, "the router of node "+c.Candidates[i].Name+" knows no connection", func() error {
		all, err := c.known(i)
		if err == nil && len(all) > 0 {
			err = fmt.Errorf("it knows %d", len(all))
		}
		return err
	})
}

// same waits until both routers know the same connections.
func (c *copies) same(when string) {
	c.t.Helper()
	testkit.Eventually(c.t, 40*time.Second, when+": both routers know the same connections", func() error {
		a, err := c.known(0)
		if err != nil {
			return err
		}
		b, err := c.known(1)
		if err == nil && (!slices.Equal(a, b) || len(a) == 0) {
			err = fmt.Errorf("%d and %d", len(a), len(b))
		}
		return err
	})
}

// dies waits until coild is killed at a point.
func (c *copies) dies(n *rig.Node, p faultpoint.Point) {
	c.t.Helper()
	select {
	case <-n.Coild.Ended():
	case <-time.After(testkit.Timeout(20 * time.Second)):
		c.t.Fatalf("coild never passed %s", p)
	}
}

// begins starts coild, which ends at a point; without one it doesn't.
func (c *copies) begins(n *rig.Node, p faultpoint.Point) {
	c.t.Helper()
	if n.Coild.Faults = ""; p != "" {
		n.Coild.Faults = string(p) + "=1"
	}
	c.check(n.Start(c.t.Context()))
}

// standby lets connections be copied all the time.
func (c *copies) standby() {
	c.t.Helper()
	patch := testkit.Must(json.Marshal(map[string]any{"floating": map[string]any{"standby": true}}))(c.t)
	testkit.Must(c.Coil.CoilV2().AddressBlocks().Patch(c.t.Context(), c.Block, types.MergePatchType, patch, metav1.PatchOptions{}))(c.t)
}

// rounds are points, again and again in the long form. Then comes none.
func rounds(points []faultpoint.Point) (all []faultpoint.Point) {
	for range testkit.CrashForm.Times(1, 10) {
		all = append(all, points...)
	}
	return append(all, "")
}

// The node that hands an address over is killed at each step. The other one has it then, with the connections that it was given; the router of before
// forgets them when coild is back.
func TestKilledWhileItHandsOver(t *testing.T) {
	t.Parallel()
	c := newCopies(t, "handover", 3)
	ctx, killed, other := t.Context(), c.Candidates[0], c.Candidates[1]
	c.held(0)
	all := rounds(faultpoint.Handover)
	killed.Coild.Kill()
	c.begins(killed, all[0])
	for i, p := range all[:len(all)-1] {
		c.check(c.Place(ctx, killed.Name, 0, 1))
		c.held(0)
		made := c.connects(0)
		c.check(c.Place(ctx, other.Name, 1, 0))
		c.dies(killed, p)
		c.check(c.Place(ctx, "", 1, 0))
		c.held(1)
		if p != faultpoint.HandoverOffered {
			c.taken(1, made, "killed at "+string(p))
		}
		c.begins(killed, all[i+1])
		if testkit.CrashForm.Long() || all[i+1] == "" {
			c.forgotten(0)
		}
	}
	c.held(1)
}

// The node that is to have an address is killed at each step. The address stays where it is, with its connections; what the other router was given of
// them is forgotten when coild is back.
func TestKilledWhileItIsHandedOver(t *testing.T) {
	t.Parallel()
	c := newCopies(t, "received", 4)
	ctx, killed := t.Context(), c.Candidates[1]
	c.held(0)
	made := c.connects(0)
	all := rounds(faultpoint.Receive)
	killed.Coild.Kill()
	c.begins(killed, all[0])
	for i, p := range all[:len(all)-1] {
		c.check(c.Place(ctx, killed.Name, 1, 0))
		c.dies(killed, p)
		c.check(c.Place(ctx, "", 0, 1))
		c.held(0)
		c.taken(0, made, "killed at "+string(p))
		c.begins(killed, all[i+1])
		if testkit.CrashForm.Long() || all[i+1] == "" {
			c.forgotten(1)
		}
	}
	c.held(0)
}

// The node that keeps the connections of an address for its holder is killed at each step, and then the holder. Whoever has the address has the
// connections that the other knew, and copies them again when both are there.
func TestKilledWhileItIsInStep(t *testing.T) {
	t.Parallel()
	c := newCopies(t, "standby", 5)
	ctx, killed, other := t.Context(), c.Candidates[1], c.Candidates[0]
	c.held(0)
	made := c.connects(0)
	c.standby()
	c.same("at first")
	all := rounds(faultpoint.Follow)
	killed.Coild.Kill()
	c.begins(killed, all[0])
	for i, p := range all[:len(all)-1] {
		c.dies(killed, p)
		c.begins(killed, all[i+1])
	}
	c.same("after the follower was killed")
	c.held(0)

	all = rounds(faultpoint.Standby)
	killed.Coild.Kill()
	c.begins(killed, all[0])
	c.same("before the holder is killed")
	for i, p := range all[:len(all)-1] {
		c.check(c.Place(ctx, killed.Name, 1, 0))
		c.dies(killed, p)
		c.check(c.Place(ctx, "", 0, 1))
		c.held(0)
		c.taken(0, made, "killed at "+string(p))
		c.begins(killed, all[i+1])
		c.same("killed at " + string(p))
	}
	c.check(c.Place(ctx, other.Name, 0, 1))
	c.held(0)
}
