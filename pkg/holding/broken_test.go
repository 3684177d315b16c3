package holding

import (
	"slices"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

// broken are protocols with one rule less. Each lets two nodes answer for more than a second: in one of many random histories, or,
// where that is rare, in one of many in which the worst happens at about the right moments.
var broken = map[string]struct {
	change func(*world)
	nodes  int
	worst  func(w *world, holder *simNode)
	// first is a history that shows it: the short form begins there, and searches all only if that has changed.
	first uint64
}{
	"leases outlast the silence": {change: func(w *world) { w.rules.lease = 4 * time.Second }},
	"a taker doesn't wait":       {change: func(w *world) { w.rules.settle = 0 }, nodes: 3, worst: unseenTake},
	"nobody is asked":            {change: func(w *world) { w.rules.quorum = func(int) int { return 0 } }},
	"one voter is enough":        {change: func(w *world) { w.rules.quorum = func(int) int { return 1 } }},
	"a majority needs no claim":  {change: func(w *world) { w.breaks = claimNothing }, nodes: 3, worst: lateTake},
	"who gives up doesn't stop":  {change: func(w *world) { w.deaf = true }},
	"a vote is no promise": {
		change: func(w *world) { w.breaks = promiseNothing }, nodes: 5, worst: changingMajority, first: 659,
	},
	"new voters count at once": {
		change: func(w *world) { w.breaks = func(m *Machine) { each(m, forgetVoters) } }, nodes: 5, worst: lostClaim,
	},
	"who gives up may go on": {
		change: func(w *world) { w.breaks = func(m *Machine) { each(m, func(a *address) { a.doubtful = nil }) } }, nodes: 3, worst: lateRelease,
	},
}

// unseenTake cuts a holder that relies on live reads from the API server when another node takes its address.
func unseenTake(w *world, h *simNode) {
	w.isolate(h)
	w.fate = func(n *simNode, write *Record) (time.Duration, bool) {
		if n != h && write != nil {
			h.cut = true
		}
		return 0, false
	}
}

// lateTake lets the write of a taker come late, when the holder has leases of all again, and cuts the holder from the API server
// before.
func lateTake(w *world, h *simNode) {
	w.isolate(h)
	w.after(w.between(1900*time.Millisecond, 2200*time.Millisecond), func() { clear(w.cut) })
	w.fate = func(n *simNode, write *Record) (time.Duration, bool) {
		if n == h || write == nil || write.Holder != n.name {
			return 0, false
		}
		late := w.between(1500*time.Millisecond, 2500*time.Millisecond)
		w.after(late-50*time.Millisecond, func() { h.cut = true })
		return late, false
	}
}

// changingMajority gives a holder without the API server a lease of one node in place of another's while both are asked about it.
func changingMajority(w *world, h *simNode) {
	o := w.others(h)
	taker, first, second, friend := o[0], o[1], o[2], o[3]
	h.cut = true
	w.cutBoth(h, taker, true)
	w.cut[[2]string{h.name, first.name}] = true
	w.cutBoth(taker, friend, true)
	w.after(w.between(100*time.Millisecond, 500*time.Millisecond), func() { w.cutBoth(h, second, true) })
	w.lag[[2]string{taker.name, second.name}] = w.between(250*time.Millisecond, 390*time.Millisecond)
	w.after(w.between(1400*time.Millisecond, 1700*time.Millisecond), func() { delete(w.cut, [2]string{h.name, first.name}) })
}

// lostClaim changes the successors, so that the holder wants other voters. Its claim is lost, and only the new voters grant it leases.
func lostClaim(w *world, h *simNode) {
	o := w.others(h)
	w.control(address1, func(r *Record) {
		r.Voters = []string{h.name, o[0].name, o[1].name}
		r.Successors = r.Voters
	})
	w.run(w.now + 2*time.Second)
	w.fate = func(n *simNode, _ *Record) (time.Duration, bool) { return 0, n == h }
	w.control(address1, func(r *Record) { r.Successors = []string{h.name, o[2].name, o[3].name, o[0].name} })
	w.after(w.between(100*time.Millisecond, 500*time.Millisecond), func() {
		h.cut = true
		w.cutBoth(h, o[0], true)
		w.cutBoth(h, o[1], true)
	})
}

// lateRelease lets a write come late by which a holder gives an address up that it wants back meanwhile.
func lateRelease(w *world, h *simNode) {
	w.control(address1, func(r *Record) { slices.Reverse(r.Successors) })
	w.run(w.now + time.Second)
	late := w.between(1500*time.Millisecond, 2500*time.Millisecond)
	w.fate = func(n *simNode, write *Record) (time.Duration, bool) {
		if n != h || write == nil {
			return 0, false
		}
		return late, write.Holder == h.name
	}
	w.setReady(h, false)
	w.after(100*time.Millisecond, func() { w.setReady(h, true) })
	w.after(late, func() { h.cut = true })
}

func each(m *Machine, do func(*address)) {
	for _, a := range m.addresses {
		do(a)
	}
}

// claimNothing takes each majority for one that was claimed.
func claimNothing(m *Machine) {
	each(m, func(a *address) { a.claimed = a.claimed || a.heldBy(m.self) && m.leaseOf(m.last, a) > m.last })
}

// promiseNothing forgets all promises.
func promiseNothing(m *Machine) {
	for _, p := range m.peers {
		p.withheld = never
	}
}

// forgetVoters counts only the voters that there are to be.
func forgetVoters(a *address) {
	if a.writing != nil && a.writing.Holder == a.rec.Holder {
		a.rec.Voters = a.writing.Voters
	}
}

// play runs one history, of the protocol as change leaves it, and returns what was wrong. change may be nil.
func play(seed uint64, nodes int, worst func(*world, *simNode), change func(*world)) error {
	if worst == nil {
		return history(seed, nil, change)
	}
	w := begin(seed, nodes, change, address1)
	worst(w, w.node(w.answering(address1)[0]))
	w.run(w.now + 20*time.Second)
	return w.exclusive()
}

// Each rule is needed: without it some history goes wrong, and none does with all of them.
func TestBroken(t *testing.T) {
	for name, c := range broken {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			caught := false
			histories, first := uint64(testkit.FloatingForm.Times(5000, 20000)), c.first
			if testkit.FloatingForm.Long() {
				first = 0
			}
			var shown uint64
			for i := range histories {
				seed := (first + i) % histories
				err := play(seed, c.nodes, c.worst, c.change)
				if err != nil {
					t.Logf("history %d: %v", seed, err)
					caught, shown = true, seed
					break
				}
			}
			if !caught {
				t.Error("no history shows it")
			}
			if c.worst == nil {
				return // TestSimulation does it
			}
			for i := range uint64(testkit.FloatingForm.Times(100, 500)) {
				seed := shown + i // the one that needs the rule, too
				if err := play(seed, c.nodes, c.worst, nil); err != nil {
					t.Errorf("with all rules, history %d: %v", seed, err)
				}
			}
		})
	}
}
