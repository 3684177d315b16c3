package holding

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

// holder returns the node that answers.
func (w *world) holder(t *testing.T) *simNode {
	t.Helper()
	who := w.answering(address1)
	if len(who) != 1 {
		t.Fatalf("nodes %v answer, want one", who)
	}
	return w.node(who[0])
}

// others are all nodes but one.
func (w *world) others(n *simNode) []*simNode {
	return slices.DeleteFunc(slices.Clone(w.nodes), func(o *simNode) bool { return o == n })
}

// The most that a fault may cost.
func TestFaults(t *testing.T) {
	const most = 40 * time.Second
	for name, c := range map[string]struct {
		fault func(w *world, holder *simNode)
		gap   time.Duration // at most
		moves bool
		nodes []int
	}{
		"nothing": {func(*world, *simNode) {}, 0, false, []int{1, 2, 3, 4, 5}},
		"the API server is down": {func(w *world, _ *simNode) {
			w.down = true
		}, 0, false, []int{1, 2, 3, 4, 5}},
		"the holder is cut from the API server": {func(_ *world, h *simNode) {
			h.cut = true
		}, 0, false, []int{1, 2, 3, 4, 5}},
		"all others are cut from the API server": {func(w *world, h *simNode) {
			for _, n := range w.others(h) {
				n.cut = true
			}
		}, 0, false, []int{2, 3, 4, 5}},
		"the holder is cut from all others": {func(w *world, h *simNode) {
			w.isolate(h)
		}, 2600 * time.Millisecond, true, []int{3, 4, 5}},
		"the holder is cut from the only other one": {func(w *world, h *simNode) {
			w.isolate(h)
		}, 0, false, []int{2}},
		"the holder is cut from all others and the API server": {func(w *world, h *simNode) {
			w.isolate(h)
			h.cut = true
		}, 2600 * time.Millisecond, true, []int{3, 4, 5}},
		"the holder is cut from the only other one and the API server": {func(w *world, h *simNode) {
			w.isolate(h)
			h.cut = true
		}, 3600 * time.Millisecond, true, []int{2}},
		"the holder is switched off": {func(w *world, h *simNode) {
			w.cutPower(h)
		}, 2600 * time.Millisecond, true, []int{3, 4, 5}},
		"the holder is switched off, and one is left": {func(w *world, h *simNode) {
			w.cutPower(h)
		}, 3600 * time.Millisecond, true, []int{2}},
		"the holder stands still": {func(w *world, h *simNode) {
			h.paused = w.now + most
		}, 2600 * time.Millisecond, true, []int{3, 4, 5}},
		"another node is switched off": {func(w *world, h *simNode) {
			w.cutPower(w.others(h)[0])
		}, 0, false, []int{2, 3, 4, 5}},
		"the holder is killed and starts": {func(w *world, h *simNode) {
			w.kill(h)
			w.after(300*time.Millisecond, func() { w.start(h) })
		}, 0, false, []int{1, 2, 3, 4, 5}},
		"the holder isn't ready": {func(w *world, h *simNode) {
			w.setReady(h, false)
		}, 500 * time.Millisecond, true, []int{2, 3, 4, 5}},
		"the address moves": {func(w *world, h *simNode) {
			w.control(address1, func(r *Record) { r.MovingTo = w.others(h)[0].name })
			w.after(time.Second, w.copied)
		}, 100 * time.Millisecond, true, []int{2, 3, 4, 5}},
		"two are cut from two, without the API server": {func(w *world, h *simNode) {
			w.split(h, true)
		}, 3600 * time.Millisecond, true, []int{4}},
		"two are cut from two": {func(w *world, h *simNode) {
			w.split(h, false)
		}, 0, false, []int{4}},
	} {
		for _, n := range c.nodes {
			t.Run(fmt.Sprintf("%s of %d", name, n), func(t *testing.T) {
				for seed := range uint64(testkit.FloatingForm.Times(10, 100)) {
					w := begin(seed, n, nil, address1)
					before, at := w.holder(t), w.now
					c.fault(w, before)
					w.run(at + most)
					if gap := w.gap(address1, at, w.now); gap > c.gap {
						t.Errorf("seed %d: nobody answers for %v, want at most %v", seed, gap, c.gap)
					}
					if twice, from := w.twice(address1); twice > time.Second {
						t.Errorf("seed %d: two nodes answer for %v, from %v on", seed, twice, from)
					}
					if after := w.holder(t); (after != before) != c.moves {
						t.Errorf("seed %d: %s answers after %s, want a move: %t", seed, after.name, before.name, c.moves)
					}
				}
			})
		}
	}
}

// cutBoth cuts or mends both directions between two nodes.
func (w *world) cutBoth(a, b *simNode, cut bool) {
	w.cut[[2]string{a.name, b.name}], w.cut[[2]string{b.name, a.name}] = cut, cut
}

// isolate cuts a node from all others.
func (w *world) isolate(n *simNode) {
	for _, o := range w.others(n) {
		w.cutBoth(n, o, true)
	}
}

// split cuts the holder and another node from the others.
func (w *world) split(h *simNode, alone bool) {
	others := w.others(h)
	for _, a := range []*simNode{h, others[0]} {
		a.cut = alone
		for _, b := range others[1:] {
			w.cutBoth(a, b, true)
		}
	}
}
