package storetest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
)

// model is what a Store must do, in the simplest way.
type model struct {
	blocks []store.Block
	now    time.Duration // CLOCK_BOOTTIME
	boot   int
	seq    int
	slots  map[ipam.Address]*slot // addresses that were used
	byName map[string]*slot       // allocations
}

type slot struct {
	address    ipam.Address
	state      store.State
	boot       int
	freed      time.Duration
	freedOrder int
}

func (m *model) cooled(s *slot) bool {
	if s.boot == m.boot {
		return m.now-s.freed >= coolDown
	}
	return m.now >= coolDown
}

// pick is the address that Reserve must take.
func (m *model) pick(blocks []store.Block, yield bool) *slot {
	var coolest *slot
	for _, b := range blocks {
		var oldest *slot
		for o := range b.Size() {
			s := m.slots[b.At(o)]
			if s == nil {
				return &slot{address: b.At(o)}
			}
			if s.state == store.Cooling && (oldest == nil || s.freedOrder < oldest.freedOrder) {
				oldest = s
			}
		}
		if oldest != nil && m.cooled(oldest) {
			return oldest
		}
		if oldest != nil && (coolest == nil || oldest.freedOrder < coolest.freedOrder) {
			coolest = oldest
		}
	}
	if yield {
		return coolest
	}
	return nil
}

func (m *model) usage() []string {
	var lines []string
	for _, b := range m.blocks {
		allocated, cooling := 0, 0
		for o := range b.Size() {
			switch s := m.slots[b.At(o)]; {
			case s == nil:
			case s.state != store.Cooling:
				allocated++
			case !m.cooled(s):
				cooling++
			}
		}
		lines = append(lines, fmt.Sprintf("%s %d/%d/%d", b.Name, allocated, cooling, b.Size()))
	}
	return lines
}

// testHistories does random steps to the Store and to the model.
func testHistories(t *testing.T, n *node) {
	const steps = 1500
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 3))
	m := &model{
		blocks: []store.Block{blockA, blockB, blockC},
		now:    n.clock.Boottime(), slots: map[ipam.Address]*slot{}, byName: map[string]*slot{},
	}
	n.setBlocks(m.blocks...)
	for i := range steps {
		name := fmt.Sprint(r.IntN(14)) // two more than addresses
		s := m.byName[name]
		switch step := r.IntN(100); {
		case step < 40:
			blocks := append([]store.Block(nil), m.blocks...)
			r.Shuffle(len(blocks), func(i, j int) { blocks[i], blocks[j] = blocks[j], blocks[i] })
			blocks = blocks[:1+r.IntN(3)]
			q := request(name, blocks...)
			q.Yield = r.IntN(4) == 0
			a, err := n.Reserve(n.ctx(), q)
			m.reserved(t, i, name, m.pick(blocks, q.Yield), a, err)
		case step < 55:
			err := n.Attach(n.ctx(), id(name), wiring(name))
			switch {
			case s == nil:
				wantErr(t, fmt.Sprintf("step %d: Attach", i), err, store.ErrNotFound)
			case s.state != store.Pending:
				wantErr(t, fmt.Sprintf("step %d: Attach", i), err, store.ErrState)
			case err != nil:
				t.Fatalf("step %d: Attach: %v", i, err)
			default:
				s.state = store.Attached
			}
		case step < 75:
			a, err := n.Release(n.ctx(), id(name))
			if s == nil {
				wantErr(t, fmt.Sprintf("step %d: Release", i), err, store.ErrNotFound)
			} else if err != nil || a.Address != s.address || a.State != store.Releasing {
				t.Fatalf("step %d: Release: %s %s, %v; want %s", i, a.State, a.Address, err, s.address)
			} else {
				s.state = store.Releasing
			}
		case step < 90:
			if err := n.Cool(n.ctx(), id(name)); err != nil {
				t.Fatalf("step %d: Cool: %v", i, err)
			}
			if s != nil && s.state == store.Releasing {
				m.seq++
				s.state, s.boot, s.freed, s.freedOrder = store.Cooling, m.boot, m.now, m.seq
				delete(m.byName, name)
			}
		case step < 97:
			d := time.Duration(r.Int64N(int64(coolDown / 2)))
			n.clock.Advance(d)
			m.now += d
		case step < 99:
			n.restart()
		default:
			d := time.Duration(r.Int64N(int64(2 * coolDown)))
			n.reboot(d)
			m.boot++
			m.now = d
		}
		if i%10 == 0 {
			m.compare(t, n)
		}
	}
	m.compare(t, n)
}

// reserved checks the answer of Reserve.
func (m *model) reserved(t *testing.T, step int, name string, want *slot, a store.Allocation, err error) {
	t.Helper()
	have := m.byName[name]
	switch {
	case have != nil && have.state == store.Releasing:
		wantErr(t, fmt.Sprintf("step %d: Reserve", step), err, store.ErrState)
	case have != nil:
		if err != nil || a.Address != have.address || a.State != have.state {
			t.Fatalf("step %d: Reserve again: %s %s, %v; want %s %s", step, a.State, a.Address, err, have.state, have.address)
		}
	case want == nil:
		wantErr(t, fmt.Sprintf("step %d: Reserve", step), err, store.ErrNoAddress)
	case err != nil || a.Address != want.address || a.State != store.Pending:
		t.Fatalf("step %d: Reserve: %s %s, %v; want %s", step, a.State, a.Address, err, want.address)
	default:
		want.state = store.Pending
		m.slots[want.address], m.byName[name] = want, want
	}
}

func (m *model) compare(t *testing.T, n *node) {
	t.Helper()
	n.wantUsage(m.usage()...)
	as := n.list()
	wantUnique(t, as)
	if len(as) != len(m.byName) {
		t.Fatalf("%d allocations, want %d", len(as), len(m.byName))
	}
	for name, s := range m.byName {
		a, err := n.Get(n.ctx(), id(name))
		if err != nil || a.Address != s.address || a.State != s.state {
			t.Fatalf("%s is %s %s, %v; want %s %s", name, a.State, a.Address, err, s.state, s.address)
		}
		if _, err := n.Release(n.ctx(), id("never-"+name)); !errors.Is(err, store.ErrNotFound) {
			t.Fatalf("Release of what never was: %v", err)
		}
	}
}
