package floating

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

const egressNamespace = "internet"

// fixture is a rig with some nodes that may have an address.
type fixture struct {
	*rig.Rig
	*rig.Floating
	t *testing.T
	// frozen is the node whose coild a signal has stopped; nil if there is none.
	frozen *rig.Node
	// epoch and claims are those of the last holder.
	epoch, claims int64
}

// common makes the namespace of routers, once for all tests. pools counts the pools.
var (
	common sync.Once
	pools  atomic.Int32
)

// newFixture returns a rig whose nodes may have the address of a pool, in their order.
func newFixture(t *testing.T, pool string, nodes int) *fixture {
	t.Helper()
	return newFixtureOf(t, pool, nodes, rig.NodeOptions{})
}

// newFixtureOf is newFixture with options of the nodes.
func newFixtureOf(t *testing.T, pool string, nodes int, o rig.NodeOptions) *fixture {
	t.Helper()
	f, ctx := &fixture{Rig: shared.Rig(t), t: t}, t.Context()
	common.Do(func() {
		testkit.Check(t, f.AddNamespace(ctx, egressNamespace, "routers"), f.AddPool(ctx, "routers", 4, rig.Dual("10.0.0.0/16", "fd00::/112")))
	})
	n := pools.Add(1) // each has addresses of its own, in the subnet of the nodes
	subnet := rig.Dual(fmt.Sprintf("10.255.%d.0/32", 100+n), fmt.Sprintf("fd00:255::1:%x00/128", n))
	testkit.Check(t, f.AddPool(ctx, pool, 0, subnet), f.Announce(ctx, pool, v2.AnnounceNeighbor))
	var all []*rig.Node
	for range nodes {
		n := testkit.Must(f.AddNode(ctx, o))(t)
		all = append(all, n)
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("the end of the log of %s:\n%s", n.Name, n.Coild.Logs(60))
			}
		})
	}
	f.Floating = testkit.Must(f.NewFloating(ctx, egressNamespace, pool, all...))(t)
	return f
}

// holding returns the holding of the address's AddressBlock.
func (f *fixture) holding() v2.FloatingHolding {
	f.t.Helper()
	return testkit.Must(f.Holding(f.t.Context()))(f.t)
}

// held waits until a node has the address: the host outside reaches it there, in both families, and nowhere else.
func (f *fixture) held(i int) {
	f.t.Helper()
	n := f.Candidates[i]
	testkit.Eventually(f.t, 20*time.Second, fmt.Sprintf("%s has %s", n.Name, f.Addrs), func() error {
		// Before its first claim the holder needs the API server.
		h := f.holding()
		if h.Holder != n.Name || h.PodUID != types.UID(f.Routers[i].UID) || h.Epoch != f.epoch && h.Claims == f.claims {
			return fmt.Errorf("%+v", h)
		}
		if err := f.answering(i); err != nil {
			return err
		}
		f.epoch, f.claims = h.Epoch, h.Claims
		return nil
	})
}

// answering returns an error unless exactly one node of those that run answers for the address.
func (f *fixture) answering(want int) error {
	for i, n := range f.Candidates {
		if !n.Coild.Running() || n == f.frozen {
			continue
		}
		out, err := n.Run(f.t.Context(), "sh", "-c", "ip -4 neigh show proxy; ip -6 neigh show proxy; ip -4 route show table all proto 32; ip -6 route show table all proto 32")
		if err != nil {
			return err
		}
		for _, a := range f.Addrs {
			if got, should := strings.Count(out, a.String()), map[bool]int{true: 3}[i == want]; got != should {
				return fmt.Errorf("%s has %d objects of %s, want %d:\n%s", n.Name, got, a, should, out)
			}
		}
	}
	return nil
}

// pings pings the address from outside, in both families.
func (f *fixture) pings() (all []*netlab.Pinger) {
	f.t.Helper()
	for _, a := range f.Addrs {
		all = append(all, rigtest.Pings(f.t, func() (*netlab.Pinger, error) { return f.PingOutside(a) }))
	}
	return all
}

// lasts lets a fault last for some time.
func lasts(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// outage ends pings, and returns for how long they weren't answered.
func outage(t *testing.T, pings []*netlab.Pinger) (longest time.Duration) {
	t.Helper()
	const every = 10 * time.Millisecond
	for _, p := range pings {
		sent, answered, err := p.End()
		testkit.Check(t, err)
		longest = max(longest, time.Duration(sent-answered)*every)
	}
	return longest
}

// The address moves when it is asked to, and when its router isn't ready any more.
func TestAddressMoves(t *testing.T) {
	f := newFixture(t, "moving", 3)
	f.held(0)
	epoch := f.holding().Epoch
	pings := f.pings()
	testkit.Check(t, f.Place(t.Context(), f.Candidates[1].Name, 1, 0, 2))
	f.held(1)
	testkit.Check(t, f.SetReady(t.Context(), 1, false))
	f.held(0)
	if gone := outage(t, pings); gone > testkit.Timeout(time.Second) {
		t.Errorf("in two moves the address was silent for %s", gone)
	}
	// Both handed it over. If copying took too long, the second one gave it up, and the next one took it.
	if now := f.holding(); now.Epoch != epoch+2 && now.Epoch != epoch+3 || !now.HandedOver {
		t.Errorf("%+v, want the epoch %d", now, epoch+2)
	}

	// Released: nobody has it.
	testkit.Check(t, f.Release(t.Context()))
	testkit.Eventually(t, 20*time.Second, "no node answers", func() error { return f.answering(-1) })
}

// A pool is announced by routes alone, and to neighbours again, while a node has an address of it.
func TestAnnounceChanges(t *testing.T) {
	f := newFixture(t, "announced", 1)
	f.held(0)
	for _, how := range []struct {
		by      v2.PoolAnnounce
		entries int
	}{{v2.AnnounceRoute, 0}, {v2.AnnounceNeighbor, 2}} {
		testkit.Check(t, f.Announce(t.Context(), "announced", how.by))
		testkit.Eventually(t, 5*time.Second, fmt.Sprintf("the address is announced by %s", how.by), func() error {
			out, err := f.Candidates[0].Run(t.Context(), "sh", "-c", "ip -4 neigh show proxy; ip -6 neigh show proxy")
			if n := strings.Count(out, f.Addrs[0].String()) + strings.Count(out, f.Addrs[1].String()); err == nil && n != how.entries {
				err = fmt.Errorf("%d entries of neighbours, want %d", n, how.entries)
			}
			return err
		})
	}
	f.held(0)
}

// The node of the holder loses power, and no controller runs: the next one answers within seconds. What comes back is no holder.
func TestPowerCut(t *testing.T) {
	f := newFixture(t, "power", 3)
	f.held(0)
	testkit.Check(t, f.KillController(t.Context()))
	defer func() { testkit.Check(t, f.Controller.Start()) }()
	var taken []time.Duration
	for n := range testkit.FloatingForm.Times(2, 20) {
		i := n % 2
		pings := f.pings()
		testkit.Check(t, f.Candidates[i].PowerCut(t.Context()))
		f.held(1 - i)
		taken = append(taken, outage(t, pings))
		testkit.Check(t, f.Candidates[i].PowerOn(t.Context()), f.Candidates[i].Start(t.Context()))
		testkit.Check(t, f.NewRouter(t.Context(), i), f.Place(t.Context(), "", 1-i, i, 2))
		f.held(1 - i)
	}
	slices.Sort(taken)
	t.Logf("silent for %s after power cuts", taken)
	if median, longest := taken[len(taken)/2], taken[len(taken)-1]; median > testkit.Limit(4*time.Second) || longest > testkit.Limit(5*time.Second) {
		t.Errorf("the address was silent for %s after power cuts (median), and for %s at most: want 4s and 5s", median, longest)
	}
}

// coild is killed: the address is at one node again soon, and the kernel of a node whose coild stays away stops by itself.
func TestKilledHolder(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "killed", 3)
	f.held(0)
	pings := f.pings()
	f.Candidates[0].Coild.Kill()
	f.held(1)
	if gone := outage(t, pings); gone > testkit.Limit(5*time.Second) {
		t.Errorf("the address was silent for %s after coild was killed", gone)
	}
	testkit.Check(t, f.Candidates[0].Start(t.Context()))
	f.held(1)
	// Cut off from the API server, the holder is believed by its peers.
	pings = f.pings()
	f.Candidates[1].CutAPI(true)
	lasts(t, 5*time.Second)
	f.Candidates[1].CutAPI(false)
	f.held(1)
	if gone := outage(t, pings); gone > 0 {
		t.Errorf("cut off from the API server, the holder was silent for %s", gone)
	}
}
