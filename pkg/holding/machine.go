package holding

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// Machine is the protocol on one node. It has no goroutine and no clock: [Machine.Step] gets what happens and when, and returns what
// is to be done. Times are of the node's monotonic clock, from any beginning.
type Machine struct {
	self  string
	life  uint64
	rules rules
	// began is the first moment of this life, and listening that since when messages of others would have been heard.
	began, listening time.Duration
	// last is the last step, sent that with the last heartbeats.
	last, sent time.Duration
	peers      map[string]*peer
	names      []string          // of the peers, sorted
	addresses  []*address        // sorted by ID
	rounds     map[string]*round // the last one about each peer
	// reading is whether a Read is under way. readBegan is the beginning of the last one, look whether a new one is wanted.
	reading, look bool
	readBegan     time.Duration

	// leaving is when it was said that this program will end.
	leaving time.Duration

	next time.Duration
	out  []Action
}

// never is before all times.
const never time.Duration = math.MinInt64 / 2

// idle is the time between two looks without addresses.
const idle = time.Hour

// New returns the Machine of a node that begins at the time now. life is a random number.
func New(self string, life uint64, now time.Duration) *Machine {
	return &Machine{
		self: self, life: life, rules: defaults(),
		began: now, listening: now, last: now, sent: never, readBegan: never, leaving: never,
		peers: map[string]*peer{}, rounds: map[string]*round{},
	}
}

// Next returns when the next Tick is due. Each Step may change it.
func (m *Machine) Next() time.Duration { return m.next }

// Successor returns the first successor of an address that this node hears; empty if there is none.
func (m *Machine) Successor(now time.Duration, id string) string {
	if a := m.find(id); a != nil {
		if i := slices.IndexFunc(a.rec.Successors, func(n string) bool { return m.hears(now, n) }); i >= 0 {
			return a.rec.Successors[i]
		}
	}
	return ""
}

// Step takes an event that happens at the time now, which is never before that of the last one, and returns what is to be done, in
// this order.
func (m *Machine) Step(now time.Duration, e Event) []Action {
	m.out = nil
	m.next = now + m.rules.heartbeat
	if now-m.last > m.rules.silence/2 {
		// This program was stopped itself, or had no processor, and has missed heartbeats of others.
		m.listening = now
	}
	m.last = now
	for _, a := range m.addresses {
		m.lapse(now, a)
	}
	m.take(now, e)
	m.heartbeat(now)
	for _, a := range m.addresses {
		m.decide(now, a)
		m.answer(now, a)
	}
	m.read(now)
	if len(m.addresses) == 0 {
		m.next = now + idle // most nodes have nothing to do with floating addresses
	}
	return m.out
}

// take changes the state as an event says.
func (m *Machine) take(now time.Duration, e Event) {
	switch e := e.(type) {
	case Received:
		m.receive(now, e.From, e.Message)
	case Seen:
		m.observe(now, e.Record)
	case Gone:
		m.forget(now, e.ID)
	case ReadDone:
		m.readDone(now, e)
	case WriteDone:
		m.writeDone(now, e)
	case Ready:
		a := m.address(e.ID)
		a.known, a.ready, a.next = true, e.Ready, e.Next
	case Copied:
		m.address(e.ID).copied = true
	case Disputed:
		m.address(e.ID).disputed = now
	case Leave:
		m.leaving, m.look = now, true
	case Blocked:
		a := m.address(e.ID)
		a.yields = e.Blocked && (a.yields || !a.blocked)
		a.blocked = e.Blocked
	}
}

func (m *Machine) do(a Action) { m.out = append(m.out, a) }

// reached reports whether it is time t, and else sees to a Tick then.
func (m *Machine) reached(now, t time.Duration) bool {
	if now >= t {
		return true
	}
	m.next = min(m.next, t)
	return false
}

func byID(a *address, id string) int { return cmp.Compare(a.rec.ID, id) }

// find returns the state of an address, nil if there is none.
func (m *Machine) find(id string) *address {
	if i, ok := slices.BinarySearchFunc(m.addresses, id, byID); ok {
		return m.addresses[i]
	}
	return nil
}

// address returns the state of an address, and begins one.
func (m *Machine) address(id string) *address {
	i, ok := slices.BinarySearchFunc(m.addresses, id, byID)
	if !ok {
		m.addresses = slices.Insert(m.addresses, i, &address{
			rec: Record{ID: id}, confirmed: never, until: never, announced: never, disputed: never, retry: never,
		})
	}
	return m.addresses[i]
}

func (m *Machine) forget(now time.Duration, id string) {
	a := m.find(id)
	if a == nil {
		return
	}
	if a.until != never {
		m.do(Stop{id})
	}
	m.addresses = slices.DeleteFunc(m.addresses, func(b *address) bool { return b == a })
	m.meet(now)
}

// read begins a live read if one is wanted.
func (m *Machine) read(now time.Duration) {
	want, pause := m.look, m.rules.read
	if m.look {
		pause = m.rules.votes
	}
	for _, a := range m.addresses {
		if !a.heldBy(m.self) || !a.ready || a.barred() {
			continue
		}
		if a.confirmed == never || a.disputed > m.sure(now, a) && m.reached(now, a.announced+m.rules.retry) {
			want, pause = true, m.rules.votes
		}
		want = want || !a.claimed || m.reached(now, m.leaseOf(now, a)-m.rules.reserve)
	}
	if want && !m.reading && m.reached(now, m.readBegan+pause) {
		m.reading, m.look, m.readBegan = true, false, now
		m.do(Read{})
	}
}

func (m *Machine) readDone(now time.Duration, e ReadDone) {
	m.reading = false
	if e.Err != nil {
		return
	}
	mine := map[string]Record{}
	for _, r := range e.Records {
		mine[r.ID] = r
		m.observe(now, r)
	}
	for _, a := range m.addresses {
		if a.rec.Holder != m.self {
			continue
		}
		if r, ok := mine[a.rec.ID]; ok && r.Epoch == a.rec.Epoch {
			a.confirmed = max(a.confirmed, m.readBegan)
		} else if !ok && a.rec.Version <= e.Version {
			a.denied, a.claimed, a.confirmed = true, false, never
		}
	}
}
