package floating

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kernel/announce"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// attacker is a host on the nodes' network that says that addresses are at it, and drops what it gets.
type attacker struct {
	t    *testing.T
	ns   *netlab.NS
	link *net.Interface
}

func newAttacker(f *fixture, number byte) attacker {
	f.t.Helper()
	ns := testkit.Must(f.NewHost(f.t.Context(), number))(f.t)
	f.t.Cleanup(func() { _ = ns.Close() })
	link := testkit.Must(netns.In(ns.NS, func() (*net.Interface, error) { return net.InterfaceByName("eth0") }))(f.t)
	return attacker{f.t, ns, link}
}

// forge says so once, in both families.
func (a attacker) forge(f *fixture) {
	a.t.Helper()
	var all []announce.Announcement
	for _, addr := range f.Addrs {
		all = append(all, announce.Announcement{Link: a.link.Index, MAC: a.link.HardwareAddr, Addr: addr})
	}
	testkit.Check(a.t, announce.Send(a.ns.NS, all))
}

// told waits until the block, and an Event about it, say what is wrong.
func (f *fixture) told(condition, node string) {
	f.t.Helper()
	testkit.Eventually(f.t, 20*time.Second, fmt.Sprintf("%s tells %s", node, condition), func() error {
		b, err := f.Coil.CoilV2().AddressBlocks().Get(f.t.Context(), f.Block, metav1.GetOptions{})
		if err != nil {
			return err
		}
		c := meta.FindStatusCondition(b.Status.Conditions, condition)
		if c == nil || c.Status != metav1.ConditionTrue || !strings.HasPrefix(c.Message, "node "+node+": ") {
			return fmt.Errorf("conditions are %+v", b.Status.Conditions)
		}
		events, err := f.Core.CoreV1().Events(metav1.NamespaceDefault).List(f.t.Context(), metav1.ListOptions{
			FieldSelector: "reason=" + condition + ",involvedObject.kind=AddressBlock,involvedObject.name=" + f.Block,
		})
		if err == nil && (len(events.Items) == 0 || events.Items[0].Type != corev1.EventTypeWarning) {
			err = errors.New("there is no Event")
		}
		return err
	})
	for _, n := range f.Candidates {
		if n.Name == node {
			testkit.Eventually(f.t, 20*time.Second, node+" has it in its metrics", func() error { return f.troubled(n, condition, 1) })
		}
	}
}

// troubled returns an error unless a node counts some addresses with a condition.
func (f *fixture) troubled(n *rig.Node, condition string, addresses int) error {
	text, err := n.Get(f.t.Context(), "/metrics")
	if want := fmt.Sprintf("coil_floating_troubled_addresses{condition=%q} %d\n", condition, addresses); err == nil && !strings.Contains(text, want) {
		err = fmt.Errorf("%s has no metric %s", n.Name, want)
	}
	return err
}

// Forged announcements take an address away until a second after the last one at most, also while the API server is away, and are told. An outage of the API server alone
// takes nothing away, and moves nothing.
func TestForgedAnnouncements(t *testing.T) {
	f := newFixture(t, "forged", 3)
	f.held(0)
	attacker := newAttacker(f, 90)
	epoch := f.holding().Epoch
	forged := func(what string, times int) {
		t.Helper()
		pings := f.pings()
		lasts(t, time.Second)
		began := time.Now()
		for range times {
			attacker.forge(f)
			lasts(t, 100*time.Millisecond)
		}
		forging := time.Since(began)
		lasts(t, 2*time.Second)
		gone := outage(t, pings)
		t.Logf("%s: the address was away for %s", what, gone)
		if most := forging + testkit.Limit(time.Second); gone > most {
			t.Errorf("%s: the address was away for %s, want %s at most", what, gone, most)
		}
	}
	forged("once", 1)
	f.told(v2.BlockConflicting, f.Candidates[0].Name)
	forged("ten times", 10)
	lasts(t, time.Second)
	pings := f.pings()
	f.API.StopServer()
	lasts(t, 5*time.Second) // longer than any lease
	if gone := outage(t, pings); gone > 0 {
		t.Errorf("in an outage of the API server the address was silent for %s", gone)
	}
	forged("without the API server", 1)
	testkit.Check(t, f.API.StartServer(t.Context()))
	f.held(0)
	if got := f.holding().Epoch; got != epoch {
		t.Errorf("it has moved, from epoch %d to %d", epoch, got)
	}
	// The controller has to become the leader again: the next test needs it.
	testkit.Check(t, f.Release(t.Context()))
	testkit.Eventually(t, time.Minute, "no node answers", func() error { return f.answering(-1) })
}

// forwarding lets rules of another program drop what a node forwards, as Docker does, whose exceptions are for its own links. Pods keep theirs.
func (f *fixture) forwarding(i int, dropped bool) {
	f.t.Helper()
	rules := "nft delete table ip filter"
	if dropped {
		rules = "nft 'add table ip filter; add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }; " +
			"add rule ip filter FORWARD ip daddr 10.0.0.0/8 accept; add rule ip filter FORWARD ip saddr 10.0.0.0/16 accept'"
	}
	rigtest.Sh(f.t, f.Candidates[i], rules)
}

// probed counts how often a node has found that its packets are dropped.
func (f *fixture) probed(i int) (n int) {
	f.t.Helper()
	text := testkit.Must(f.Candidates[i].Get(f.t.Context(), "/metrics"))(f.t)
	if _, number, ok := strings.Cut(text, `coil_floating_probes_total{fate="dropped"} `); ok {
		testkit.Must(fmt.Sscan(number, &n))(f.t)
	}
	return n
}

// probes waits until a node has found so once more.
func (f *fixture) probes(i, before int) {
	f.t.Helper()
	testkit.Eventually(f.t, 20*time.Second, f.Candidates[i].Name+" probes", func() error {
		if n := f.probed(i); n <= before {
			return fmt.Errorf("it has probed %d times, before %d", n, before)
		}
		return nil
	})
}

// A node whose rules of others drop packets of an address leaves it to another one, and says so until a probe passes, however often its coild
// starts again. The address doesn't come back by itself. If all nodes drop its packets, one of them has it.
func TestForwardingBlocked(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "blocked", 3)
	f.held(0)
	testkit.Check(t, f.Place(t.Context(), f.Candidates[2].Name, 2, 0, 1))
	f.held(2)
	f.forwarding(0, true)
	f.forwarding(1, true)
	before := f.holding()
	testkit.Check(t, f.Place(t.Context(), f.Candidates[0].Name, 0, 1, 2))
	testkit.Eventually(t, 30*time.Second, "the address moves to the first node, to the second, and back to the third", func() error {
		if h := f.holding(); h.Epoch < before.Epoch+5 {
			return fmt.Errorf("%+v", h)
		}
		return nil
	})
	f.held(2)
	f.told(v2.BlockForwardingBlocked, f.Candidates[0].Name)
	stays := func(what string, epoch int64) {
		t.Helper()
		if h := f.holding(); h.Epoch != epoch {
			t.Errorf("%s the address has moved from epoch %d: %+v", what, epoch, h)
		}
	}
	after := f.holding()
	if after.Epoch != before.Epoch+5 || !after.HandedOver {
		t.Errorf("after %+v there is %+v", before, after)
	}
	f.Candidates[0].Coild.Stop()
	if out, err := f.Candidates[0].Run(t.Context(), "nft", "list table ip coil_floating"); err == nil {
		t.Errorf("a coild that has ended has left %s", out)
	}
	testkit.Check(t, f.Candidates[0].Start(t.Context()))
	f.probes(0, 0)
	f.told(v2.BlockForwardingBlocked, f.Candidates[0].Name)
	stays("while the rules are there", after.Epoch)
	f.forwarding(0, false)
	f.forwarding(1, false)
	testkit.Eventually(t, 20*time.Second, "all nodes know that packets are forwarded", func() error {
		b := testkit.Must(f.Coil.CoilV2().AddressBlocks().Get(t.Context(), f.Block, metav1.GetOptions{}))(t)
		if !meta.IsStatusConditionFalse(b.Status.Conditions, v2.BlockForwardingBlocked) {
			return fmt.Errorf("conditions are %+v", b.Status.Conditions)
		}
		for _, n := range f.Candidates {
			if err := f.troubled(n, v2.BlockForwardingBlocked, 0); err != nil {
				return err
			}
		}
		return nil
	})
	stays("after the rules are gone", after.Epoch)

	for i := range f.Candidates {
		f.forwarding(i, true)
	}
	testkit.Check(t, f.Place(t.Context(), f.Candidates[0].Name, 0, 1, 2))
	var last v2.FloatingHolding
	testkit.Eventually(t, 60*time.Second, "a node has the address though all drop packets", func() error {
		if last = f.holding(); last.Holder == "" || last.Epoch < after.Epoch+7 {
			return fmt.Errorf("%+v", last)
		}
		return nil
	})
	for i, n := range f.Candidates {
		if n.Name == last.Holder {
			f.held(i)
			f.probes(i, f.probed(i))
		}
	}
	stays("though all drop packets", last.Epoch)
}
