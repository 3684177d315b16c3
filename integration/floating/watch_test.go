package floating

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// hosts are outside of the cluster: each one sends to the address by one node, whatever that node announces, so that it knows
// when the node answers.
type hosts []*netlab.NS

// newHosts makes a host for each node. Numbers start after those of other tests.
func newHosts(f *fixture, number byte) (all hosts) {
	f.t.Helper()
	for i, n := range f.Candidates {
		h := testkit.Must(f.NewHost(f.t.Context(), number+byte(i)))(f.t)
		// A node that has the packet's own link as its way tells the host to go there itself.
		testkit.Check(f.t, h.Sysctl("ipv4/conf/all/accept_redirects=0", "ipv4/conf/eth0/accept_redirects=0", "ipv6/conf/eth0/accept_redirects=0"))
		f.t.Cleanup(func() { _ = h.Close() })
		for _, a := range f.Addrs {
			via := n.Addr4
			if a.Is6() {
				via = n.Addr6
			}
			testkit.Check(f.t, h.IP(f.t.Context(), fmt.Sprintf("route add %s via %s", netip.PrefixFrom(a, a.BitLen()), via)))
		}
		all = append(all, h)
	}
	return all
}

// watch is what hosts see for some time.
type watch struct {
	f     *fixture
	began time.Time
	pings [][]*netlab.Pinger // of each node
}

// watch begins to ask all nodes.
func (all hosts) watch(f *fixture) *watch {
	w := &watch{f: f, began: time.Now()}
	for i, h := range all {
		var pings []*netlab.Pinger
		for _, a := range f.Addrs {
			// Two hops: the node, and the pod on it. A node that sends the packet on to another one isn't asked.
			pings = append(pings, testkit.Must(h.PingsWithin(f.Candidates[i].Name, a, 2))(f.t))
		}
		w.pings = append(w.pings, pings)
	}
	return w
}

// span is a time in which a node answered.
type span struct {
	node     string
	from, to time.Time
}

// merged is the longest silence within a span: pings are 10 ms apart, and the machine may be busy.
const merged = 100 * time.Millisecond

// end stops the pings, and returns what the hosts have seen; see seen.
func (w *watch) end() (both time.Duration, spans []string) {
	var ending sync.WaitGroup
	for _, p := range slices.Concat(w.pings...) {
		ending.Go(func() { _, _, _ = p.End() }) // a node that is gone is unreachable
	}
	ending.Wait()
	return w.seen()
}

// seen returns for how long two nodes have answered for one address at most, and when each one has answered.
func (w *watch) seen() (both time.Duration, spans []string) {
	for family := range w.f.Addrs {
		var all []span
		for i, pings := range w.pings {
			p := pings[family]
			var own []span
			for _, at := range p.Answers() {
				if last := len(own) - 1; last >= 0 && at.Sub(own[last].to) <= merged {
					own[last].to = at
				} else {
					own = append(own, span{w.f.Candidates[i].Name, at, at})
				}
			}
			for _, s := range own {
				spans = append(spans, fmt.Sprintf("%s %s-%s", s.node, s.from.Sub(w.began).Round(time.Millisecond), s.to.Sub(w.began).Round(time.Millisecond)))
				for _, other := range all {
					from, to := s.from, s.to
					if other.from.After(from) {
						from = other.from
					}
					if other.to.Before(to) {
						to = other.to
					}
					both = max(both, to.Sub(from))
				}
			}
			all = append(all, own...)
		}
	}
	return both, spans
}

// most is for how long two nodes may answer at once.
const most = time.Second

// fault is something that happens to the holder, the first of the nodes, and to the others.
type fault struct {
	name string
	do   func(ctx context.Context, f *fixture, holder *rig.Node, others []*rig.Node) error
	// moves says that another node takes the address.
	moves bool
}

var faults = []fault{
	{"off the API server", func(_ context.Context, _ *fixture, holder *rig.Node, _ []*rig.Node) error {
		holder.CutAPI(true)
		return nil
	}, false},
	{"off its peers", func(ctx context.Context, f *fixture, holder *rig.Node, others []*rig.Node) error {
		return f.Divide(ctx, f.Block, []*rig.Node{holder}, others)
	}, true},
	{"off both", func(ctx context.Context, f *fixture, holder *rig.Node, others []*rig.Node) error {
		holder.CutAPI(true)
		return f.Divide(ctx, f.Block, []*rig.Node{holder}, others)
	}, true},
	{"two against two", func(ctx context.Context, f *fixture, holder *rig.Node, others []*rig.Node) error {
		return f.Divide(ctx, f.Block, []*rig.Node{holder, others[0]}, others[1:])
	}, false},
	{"two off the API server against two", func(ctx context.Context, f *fixture, holder *rig.Node, others []*rig.Node) error {
		holder.CutAPI(true)
		others[0].CutAPI(true)
		return f.Divide(ctx, f.Block, []*rig.Node{holder, others[0]}, others[1:])
	}, true},
	{"frozen", func(ctx context.Context, f *fixture, holder *rig.Node, _ []*rig.Node) error {
		return f.freeze(ctx, holder)
	}, true},
}

// freeze stops the coild of a node by a signal.
func (f *fixture) freeze(ctx context.Context, n *rig.Node) error {
	f.frozen = n
	_, err := f.RunRouter(ctx, "kill", "-STOP", fmt.Sprint(n.Coild.PID()))
	return err
}

// found returns an error unless a host of the link that asks who has the address finds the node that answers, each time.
func (f *fixture) found() error {
	for _, a := range slices.Repeat(f.Addrs, 5) {
		out, err := f.RunRouter(f.t.Context(), "sh", "-c", fmt.Sprintf("ip neigh del %[1]s dev br0 2>/dev/null; exec ping -c 1 -W 1 %[1]s", a))
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	return nil
}

// thaw lets it go on.
func (f *fixture) thaw() {
	if f.frozen != nil {
		testkit.Must(f.RunRouter(context.WithoutCancel(f.t.Context()), "kill", "-CONT", fmt.Sprint(f.frozen.Coild.PID())))(f.t)
		f.frozen = nil
	}
}

// mend ends all faults.
func (f *fixture) mend() {
	f.t.Helper()
	for _, n := range f.Candidates {
		n.CutAPI(false)
	}
	f.thaw()
	testkit.Check(f.t, f.Divide(f.t.Context(), f.Block))
}

// order are the nodes, the holder first.
func (f *fixture) order() (holder *rig.Node, others []*rig.Node) {
	f.t.Helper()
	name := f.holding().Holder
	for _, n := range f.Candidates {
		if n.Name == name {
			holder = n
		} else {
			others = append(others, n)
		}
	}
	if holder == nil {
		f.t.Fatal("no node has the address")
	}
	return holder, others
}

// settled waits until a node has the address for good, and returns it: its claim is newer than a record.
func (f *fixture) settled(what string, as func(holder string) error) {
	f.t.Helper()
	testkit.Eventually(f.t, 20*time.Second, what, func() error {
		h := f.holding()
		if h.Epoch != f.epoch && h.Claims == f.claims {
			return fmt.Errorf("not claimed: %+v", h)
		}
		for i, n := range f.Candidates {
			if n.Name == h.Holder {
				if err := errors.Join(as(h.Holder), f.answering(i)); err != nil {
					return err
				}
				f.epoch, f.claims = h.Epoch, h.Claims
				return nil
			}
		}
		return errors.New("no node has the address")
	})
}

// However the network is divided, two nodes never answer for longer than a second, and one does soon.
func TestDividedNetworks(t *testing.T) {
	for i, some := range slices.Collect(slices.Chunk(faults, 3)) { // two networks of nodes take half as long as one
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, fmt.Sprintf("divided-%d", i), 4)
			outside := newHosts(f, byte(1+20*i))
			f.held(0)
			for _, fault := range some {
				t.Run(fault.name, func(t *testing.T) {
					// A holder that half of the voters hear goes on by reading, and claims nothing as long as the network is divided.
					f := &fixture{Rig: f.Rig, Floating: f.Floating, t: t, epoch: f.epoch, claims: -1}
					f.suffer(fault, outside)
				})
			}
		})
	}
}

// suffer lets a fault happen for some seconds, and ends it.
func (f *fixture) suffer(fault fault, outside hosts) {
	t := f.t
	t.Helper()
	holder, others := f.order()
	pings, w := f.pings(), outside.watch(f)
	defer f.mend()
	testkit.Check(t, fault.do(t.Context(), f, holder, others))
	lasts(t, 4*time.Second)
	f.settled("a node has the address", func(name string) error {
		if moved := name != holder.Name; moved != fault.moves {
			return fmt.Errorf("%s has it, and it was at %s", name, holder.Name)
		}
		return nil
	})
	testkit.Check(t, f.found())
	f.mend()
	lasts(t, 2*time.Second)
	f.settled("it stays", func(string) error { return nil })
	both, spans := w.end()
	gone := outage(t, pings)
	t.Logf("silent for %s, two answers for %s", gone, both)
	bound := time.Duration(0)
	if fault.moves {
		bound = testkit.Limit(5 * time.Second)
	}
	if both > most || gone > bound {
		t.Errorf("silent for %s, want at most %s; two answers for %s, want at most %s: %s", gone, bound, both, most, strings.Join(spans, ", "))
	}
}

// The hosts see two answers where there are two: the kernel of a frozen holder is kept from stopping.
func TestWatchSeesTwo(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "two", 3)
	outside := newHosts(f, 11)
	f.held(0)
	w := outside.watch(f)
	defer f.thaw()
	testkit.Check(t, f.freeze(t.Context(), f.Candidates[0]))
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			var script []string
			for _, a := range f.Addrs {
				family := map[bool]string{true: "ip", false: "ip6"}[a.Is4()]
				element := fmt.Sprintf("element %s %s %s { %s", family, dataplane.NftTableFloating, ruleset.Answering(dataplane.FamilyOf(a)).Name, a)
				script = append(script, "add "+element+" timeout 1s }", "delete "+element+" }", "add "+element+" timeout 1s }")
			}
			_, _ = f.Candidates[0].Run(ctx, "nft", strings.Join(script, "; "))
		}
	}()
	f.settled("another node has it", func(name string) error {
		if name == f.Candidates[0].Name {
			return errors.New(name)
		}
		return nil
	})
	// Where the machine is busy, hosts don't see all of it: two pings are late, and a time has two parts.
	testkit.Eventually(t, 30*time.Second, "the hosts see it", func() error {
		if both, spans := w.seen(); both <= most {
			return fmt.Errorf("two answers for %s, want more than %s: %s", both, most, strings.Join(spans, ", "))
		}
		return nil
	})
	end()
	<-ended
	w.end()
}
