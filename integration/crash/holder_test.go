package crash

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/testkit"
)

// holders are two nodes that may have a floating address.
type holders struct {
	*cluster
	*rig.Floating
}

func newHolders(t *testing.T, pool string, number int) *holders {
	t.Helper()
	c := newCluster(t, 4)
	h, ctx := &holders{cluster: c}, t.Context()
	// In the subnet of the nodes.
	c.check(c.AddPool(ctx, pool, 0, rig.Dual(fmt.Sprintf("10.255.200.%d/32", number), fmt.Sprintf("fd00:255::2:%x/128", number))), c.Announce(ctx, pool, v2.AnnounceNeighbor))
	nodes := []*rig.Node{c.node(rig.NodeOptions{}), c.node(rig.NodeOptions{})}
	h.Floating = testkit.Must(c.NewFloating(ctx, c.pools[0], pool, nodes...))(t)
	return h
}

// has is how many objects of the address a node has: routes, entries of neighbours and elements by which packets pass.
func (h *holders) has(n *rig.Node) (count int, err error) {
	out, err := n.Run(h.t.Context(), "sh", "-c", `
		for family in -4 -6; do
			ip $family route show table 116 proto 32; ip $family route show table 119 proto 32; ip $family neigh show proxy
		done
		for set in ip:answering_ipv4 ip6:answering_ipv6 arp:answering_ipv4; do
			nft list set ${set%:*} coil_floating ${set#*:} 2>/dev/null || true
		done`)
	for _, a := range h.Addrs {
		count += strings.Count(out, a.String())
	}
	return count, err
}

// held waits until a node has the address, and the other one nothing of it.
func (h *holders) held(i int) {
	h.t.Helper()
	testkit.Eventually(h.t, 30*time.Second, h.Candidates[i].Name+" has the address, and the other node nothing of it", func() error { return h.holds(i) })
}

// holds returns an error unless a node has the address, and the other one nothing of it.
func (h *holders) holds(i int) error {
	const all = 2*3 + 3
	holding, err := h.Holding(h.t.Context())
	if err != nil || holding.Holder != h.Candidates[i].Name {
		return errors.Join(err, fmt.Errorf("%+v", holding))
	}
	for j, want := range map[int]int{i: all, 1 - i: 0} {
		if !h.Candidates[j].Coild.Running() {
			continue
		}
		if got, err := h.has(h.Candidates[j]); err != nil || got != want {
			return errors.Join(err, fmt.Errorf("%s has %d objects of the address, want %d", h.Candidates[j].Name, got, want))
		}
	}
	for _, a := range h.Addrs {
		if out, err := h.RunRouter(h.t.Context(), "ping", "-c", "1", "-W", "1", a.String()); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	return nil
}

// coild is killed at each step by which a node takes a floating address, while it has it, and at each by which it gives it up. The other node
// has it then; what is left goes when coild is back.
func TestKilledAtHolding(t *testing.T) {
	t.Parallel()
	points := map[string][]string{}
	for _, p := range faultpoint.Hold {
		points["take"] = append(points["take"], fmt.Sprintf("%s=1", p))
	}
	points["take"] = append(points["take"], fmt.Sprintf("%s=5", faultpoint.HoldOpened))
	for _, p := range faultpoint.Give {
		points["give"] = append(points["give"], fmt.Sprintf("%s=1", p))
	}
	number := 0
	for _, what := range []string{"take", "give"} {
		number++
		n := number
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			h := newHolders(t, what, n)
			ctx, killed, other := t.Context(), h.Candidates[0], h.Candidates[1]
			h.held(0)
			h.check(h.Place(ctx, other.Name, 1, 0))
			h.held(1)
			var all []string
			for range testkit.CrashForm.Times(1, 10) {
				all = append(all, points[what]...)
			}
			killed.Coild.Kill()
			killed.Coild.Faults = all[0]
			h.check(killed.Start(ctx))
			for i, p := range all {
				if strings.HasPrefix(p, string(faultpoint.HoldWritten)) {
					other.Coild.Kill() // one that lives writes the record itself when it hands the address over
				} else {
					h.check(h.Place(ctx, killed.Name, 0, 1))
				}
				if what == "give" {
					testkit.Eventually(t, time.Minute, killed.Name+" has the address", func() error {
						if !killed.Coild.Running() { // the machine is busy: it was late, gave the address up by itself, and was killed
							if err := errors.Join(killed.Start(ctx), h.Place(ctx, killed.Name, 0, 1)); err != nil {
								return err
							}
						}
						return h.holds(0)
					})
					h.check(h.Place(ctx, other.Name, 1, 0))
				}
				select {
				case <-killed.Coild.Ended():
				case <-time.After(testkit.Timeout(20 * time.Second)):
					t.Fatalf("coild never passed %s", p)
				}
				if !other.Coild.Running() {
					h.check(other.Start(ctx))
				}
				h.check(h.Place(ctx, "", 1, 0))
				h.held(1)
				killed.Coild.Faults = ""
				if i+1 < len(all) {
					killed.Coild.Faults = all[i+1]
				}
				h.check(killed.Start(ctx))
				h.held(1)
			}
		})
	}
}
