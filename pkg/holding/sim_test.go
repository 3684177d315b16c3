package holding

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

const address1, address2 = "a", "b"

// begin makes a world of nodes that all may have each address, and lets some take them.
func begin(seed uint64, nodes int, change func(*world), addresses ...string) *world {
	w := newWorld(seed, nodes)
	if change != nil {
		change(w)
	}
	var names []string
	for _, n := range w.nodes {
		names = append(names, n.name)
	}
	for _, id := range addresses {
		w.change(Record{ID: id, Successors: slices.Clone(names)})
		slices.Reverse(names)
	}
	for _, n := range w.nodes {
		w.start(n)
	}
	w.run(6 * time.Second)
	return w
}

// faulty is how long faults happen, healed how long a history goes on without any.
const (
	faulty = 20 * time.Second
	healed = 20 * time.Second
)

// history plays random faults, and returns what was wrong.
func history(seed uint64, trace *strings.Builder, change func(*world)) error {
	w := begin(seed, 1+int(seed%5), func(w *world) {
		w.trace = trace
		w.late, w.odd = 0.1, 0.01
		if change != nil {
			change(w)
		}
	}, address1, address2)
	end := w.now + faulty
	for range 2 + w.rand.IntN(3) {
		// Faults that come together are worse.
		together := w.upTo(faulty - 4*time.Second)
		for range 1 + w.rand.IntN(5) {
			w.after(together+w.upTo(4*time.Second), w.fault)
		}
	}
	w.run(end)
	w.heal()
	w.run(end + healed)
	for id := range w.all() {
		if who := w.answering(id); len(who) != 1 {
			return fmt.Errorf("nodes %v answer for %s, %v after the last fault", who, id, healed)
		}
	}
	return w.exclusive()
}

// exclusive returns an error if two nodes have answered for an address for too long.
func (w *world) exclusive() error {
	for id := range w.all() {
		if twice, at := w.twice(id); twice > time.Second {
			return fmt.Errorf("two nodes answered at once for %s for %v, from %v on", id, twice, at)
		}
	}
	return nil
}

// fault does something that happens, and undoes it later.
func (w *world) fault() {
	n := w.nodes[w.rand.IntN(len(w.nodes))]
	lasts := w.between(200*time.Millisecond, 7*time.Second)
	switch w.rand.IntN(13) {
	case 0:
		w.partition(lasts)
	case 1:
		m := w.nodes[w.rand.IntN(len(w.nodes))]
		w.tell("link %s to %s is cut", n.name, m.name)
		w.cut[[2]string{n.name, m.name}] = true
		w.after(lasts, func() { delete(w.cut, [2]string{n.name, m.name}) })
	case 2:
		for _, m := range w.nodes {
			if w.chance(0.5) {
				w.tell("%s is cut from the API server", m.name)
				m.cut = true
				w.after(lasts, func() { m.cut = false; w.relist(m) })
			}
		}
	case 3:
		w.tell("the API server is down")
		w.down = true
		w.after(lasts, func() {
			w.down = false
			for _, m := range w.nodes {
				w.relist(m)
			}
		})
	case 4:
		w.slow = w.between(100*time.Millisecond, time.Second)
		w.after(lasts, func() { w.slow = 20 * time.Millisecond })
	case 5, 6:
		w.kill(n)
		w.after(w.between(50*time.Millisecond, lasts), func() { w.start(n) })
	case 7:
		w.cutPower(n)
		w.after(lasts, func() { w.start(n) })
	case 8:
		w.tell("%s stands still for %v", n.name, lasts)
		if w.chance(0.5) {
			n.stall = lasts
		} else {
			n.paused = max(n.paused, w.now+lasts)
		}
	case 9:
		w.setReady(n, false)
		w.after(lasts, func() { w.setReady(n, true) })
		if w.chance(0.1) {
			w.step(n, Leave{})
			w.after(lasts, func() {
				w.kill(n)
				w.start(n)
			})
		}
	case 10:
		w.loss = w.rand.Float64() / 2
		w.after(lasts, func() { w.loss = 0 })
	case 11:
		w.control(w.any(), func(r *Record) {
			w.rand.Shuffle(len(r.Successors), func(i, j int) { r.Successors[i], r.Successors[j] = r.Successors[j], r.Successors[i] })
			r.Successors = r.Successors[:1+w.rand.IntN(len(r.Successors))]
		})
		w.after(lasts, w.allSucceed)
	case 12:
		w.control(w.any(), func(r *Record) { r.MovingTo = n.name })
		w.after(w.upTo(lasts), w.copied)
		w.step(n, Disputed{w.any()})
		blocked := w.any()
		w.step(n, Blocked{blocked, true})
		w.after(lasts, func() { w.step(n, Blocked{blocked, false}) })
	}
}

// partition divides the nodes into two groups, one of which may be without the API server.
func (w *world) partition(lasts time.Duration) {
	var groups [2][]*simNode
	for _, n := range w.nodes {
		i := w.rand.IntN(2)
		groups[i] = append(groups[i], n)
	}
	alone := w.chance(0.5)
	for _, a := range groups[0] {
		w.tell("%s is in a part of the network, without the API server: %t", a.name, alone)
		if alone {
			a.cut = true
			w.after(lasts, func() { a.cut = false; w.relist(a) })
		}
		for _, b := range groups[1] {
			for _, link := range [][2]string{{a.name, b.name}, {b.name, a.name}} {
				w.cut[link] = true
				w.after(lasts, func() { delete(w.cut, link) })
			}
		}
	}
}

func (w *world) setReady(n *simNode, ready bool) {
	w.tell("%s is ready: %t", n.name, ready)
	n.ready = ready
	for id := range w.all() {
		e := Ready{ID: id, Ready: ready}
		if !ready && w.chance(0.5) {
			e.Next = w.nodes[w.rand.IntN(len(w.nodes))].name // which may be n itself, or no successor
		}
		w.step(n, e)
	}
}

// all returns the addresses.
func (w *world) all() iter.Seq[string] { return slices.Values(slices.Sorted(maps.Keys(w.records))) }

// any returns one of the addresses.
func (w *world) any() string {
	all := slices.Collect(w.all())
	return all[w.rand.IntN(len(all))]
}

// control is a write of the controller to the record of an address.
func (w *world) control(id string, change func(*Record)) {
	r := w.records[id]
	r.Successors = slices.Clone(r.Successors)
	if change(&r); !w.down {
		w.change(r)
	}
}

// allSucceed makes all nodes successors.
func (w *world) allSucceed() {
	for id := range w.all() {
		w.control(id, func(r *Record) {
			r.Successors = nil
			for _, n := range w.nodes {
				r.Successors = append(r.Successors, n.name)
			}
		})
	}
}

func (w *world) copied() {
	for _, n := range w.nodes {
		for id := range w.all() {
			w.step(n, Copied{id})
		}
	}
}

// heal ends all faults, but a pause that has begun.
func (w *world) heal() {
	w.tell("all is healed")
	clear(w.cut)
	w.down, w.slow, w.loss, w.late = false, 20*time.Millisecond, 0, 0
	w.allSucceed()
	for _, n := range w.nodes {
		n.cut, n.stall = false, 0
		w.start(n)
		w.setReady(n, true)
		w.relist(n)
	}
	w.after(2*time.Second, w.copied)
	w.after(4*time.Second, w.copied)
}

// replay returns what happens in a history.
func replay(seed uint64, change func(*world)) string {
	var b strings.Builder
	_ = history(seed, &b, change)
	return b.String()
}

func TestSimulation(t *testing.T) {
	const parts = 4
	for part := range uint64(parts) {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			for seed := part; seed < uint64(testkit.FloatingForm.Times(600, 100000)); seed += parts {
				if err := history(seed, nil, nil); err != nil {
					t.Fatalf("history %d: %v:\n%s", seed, err, replay(seed, nil))
				}
			}
		})
	}
}
