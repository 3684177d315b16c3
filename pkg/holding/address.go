package holding

import (
	"slices"
	"time"
)

// address is the state of one address on this node.
type address struct {
	rec Record
	// seen is when the record had this holder first, contended is when it had this node as the contender first.
	seen, contended time.Duration
	// known is whether anything was said about ready, which is whether this node could answer.
	known, ready bool
	// next is the node that was prepared when this one wasn't ready any more; empty if none was.
	next string
	// copied says that the record's MovingTo has all it needs.
	copied bool
	// disputed is when another host last said that the address is at it.
	disputed time.Duration
	// blocked says that this node drops packets of the address. It is to give the address up for that if yields is set.
	blocked, yields bool
	// denied says that a live read didn't have this node as the holder, though the record does.
	denied bool
	// confirmed is the beginning of the last live read, or write, that has this node as the holder.
	confirmed time.Duration
	// claimed says that this node has had a majority, without a gap, since it claimed the address.
	claimed bool
	// from is the first moment at which this node may answer.
	from time.Duration
	// until is how long this node answers. announced is when it last told so.
	until, announced time.Duration
	// writing is the write under way, nil if there is none. doubtful are earlier writes that the API server may still do.
	writing  *write
	doubtful []*write
	// retry is the first moment of the next write.
	retry time.Duration
}

// write is a write of a record.
type write struct {
	Record        // as it is to be, with the version that it replaces
	before string // the holder of that version
	begun  time.Duration
	// held says that this node has had a majority since the beginning of the write.
	held bool
}

func (a *address) heldBy(node string) bool { return a.rec.Holder == node && !a.denied }

// writes returns the writes of this node that may still change the record.
func (a *address) writes() []*write {
	if a.writing == nil {
		return a.doubtful
	}
	return append(slices.Clip(a.doubtful), a.writing)
}

// barred reports whether this node has asked to give the address up, which may be done at any time.
func (a *address) barred() bool {
	return slices.ContainsFunc(a.writes(), func(w *write) bool { return w.Holder != a.rec.Holder })
}

// lapse notices the end of a majority before a new one begins.
func (m *Machine) lapse(now time.Duration, a *address) {
	if m.leaseOf(now, a) <= now {
		a.claimed = false
		if a.writing != nil {
			a.writing.held = false
		}
	}
}

// observe takes a record if it is newer than the one that is known.
func (m *Machine) observe(now time.Duration, r Record) {
	a := m.address(r.ID)
	if r.Version <= a.rec.Version {
		return
	}
	before := a.rec
	a.rec, a.denied = r, false
	a.copied = a.copied && r.MovingTo == before.MovingTo
	switch {
	case r.Contender == m.self && before.Contender != m.self:
		a.contended = now
	case before.Contender == m.self && r.Contender != m.self && r.Holder == before.Holder:
		a.retry = now + m.rules.standoff
	}
	// Writes of older versions can't be done any more.
	a.doubtful = slices.DeleteFunc(a.doubtful, func(w *write) bool { return w.Version < r.Version })
	if before.Version == 0 || r.Epoch != before.Epoch || r.Holder != before.Holder {
		a.claimed, a.yields, a.confirmed, a.retry, a.seen, a.from = false, false, never, never, now, now
		a.next = ""
		if !r.HandedOver {
			a.from = now + m.rules.settle
		}
	}
	m.meet(now)
}

// decide writes the record of an address if it has to be another one.
func (m *Machine) decide(now time.Duration, a *address) {
	if a.writing != nil || !a.known || !m.reached(now, a.retry) {
		return
	}
	if a.heldBy(m.self) {
		m.hold(now, a)
	} else if a.ready && a.rec.Holder != m.self && m.leaving == never {
		m.pursue(now, a)
	}
}

// hold writes the record of an address that this node has, if the record has to change.
func (m *Machine) hold(now time.Duration, a *address) {
	next := a.rec
	next.Contender = ""
	switch {
	case !a.ready:
		next.Holder = ""
		if slices.Contains(a.rec.Successors, a.next) && m.hears(now, a.next) {
			next.Holder = a.next
		}
	case a.copied && m.hears(now, a.rec.MovingTo):
		next.Holder = a.rec.MovingTo
	case m.yields(a) && slices.ContainsFunc(a.rec.Successors, func(n string) bool { return m.hears(now, n) }):
		next.Holder = ""
	default:
		next.Claims++
		next.Voters = m.candidates(a.rec)
		majority := m.leaseOf(now, a) > now && m.majority(now, next.Voters) > now
		why := !a.claimed && majority || !sameSet(next.Voters, a.rec.Voters) || a.rec.Contender != ""
		if a.barred() || a.confirmed != never && why {
			m.write(now, a, next, majority)
		}
		return
	}
	// The next holder begins as soon as it sees the record. An earlier life of this program may have made the node answer.
	m.do(Stop{a.rec.ID})
	a.until, a.claimed, a.confirmed = never, false, never
	next.Epoch++
	next.HandedOver, next.MovingTo = true, ""
	m.write(now, a, next, false)
}

// yields says whether an address that this node has is to be another one's, if there is one.
func (m *Machine) yields(a *address) bool {
	return a.yields || m.leaving != never && a.confirmed >= m.leaving
}

// Leaves says whether addresses are still to be given up since this program will end.
func (m *Machine) Leaves() bool {
	return slices.ContainsFunc(m.addresses, func(a *address) bool { return a.heldBy(m.self) && a.ready || a.writing != nil })
}

// pursue takes an address that this node may have, or asks the voters about its holder.
func (m *Machine) pursue(now time.Duration, a *address) {
	others := slices.DeleteFunc(slices.Clone(a.rec.Successors), func(n string) bool { return n == a.rec.Holder })
	k := slices.Index(others, m.self)
	if k < 0 {
		return
	}
	wait := time.Duration(k) * m.rules.rank
	if a.rec.Holder != "" && slices.ContainsFunc(others[:k], func(n string) bool { return m.hears(now, n) }) {
		wait = time.Duration(k) * m.rules.deference
	}
	if a.blocked {
		wait += m.rules.reluctance
	}
	next := a.rec
	next.Holder, next.MovingTo, next.Contender = m.self, "", ""
	next.Epoch++
	if a.rec.Holder == "" {
		next.HandedOver, next.Voters = true, m.candidates(a.rec)
		if m.reached(now, a.seen+wait) {
			m.write(now, a, next, false)
		}
		return
	}
	holder := m.peers[a.rec.Holder]
	if holder == nil || !m.reached(now, max(m.silentSince(holder), a.seen)+m.rules.silence+wait) {
		return
	}
	silent, enough := m.agreed(now, m.ask(now, a.rec.Holder, holder), a.rec.Voters)
	switch {
	case !enough:
		return
	case 2*silent == len(a.rec.Voters) && a.rec.Contender != m.self:
		next = a.rec
		next.Contender = m.self
	case 2*silent == len(a.rec.Voters) && !m.reached(now, a.contended+m.rules.contend):
		return
	default:
		next.HandedOver = false
	}
	m.write(now, a, next, false)
}

// candidates are the voters that this node would choose as the holder.
func (m *Machine) candidates(r Record) []string {
	if slices.Contains(r.Successors, m.self) {
		return r.Successors
	}
	return append(slices.Clip(r.Successors), m.self)
}

// sameSet compares lists that have each name once.
func sameSet(a, b []string) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(n string) bool { return !slices.Contains(b, n) })
}

// write begins a write. held is whether this node has the majority that a claim needs.
func (m *Machine) write(now time.Duration, a *address, next Record, held bool) {
	a.writing = &write{Record: next, before: a.rec.Holder, begun: now, held: held}
	m.do(Write{next})
}

func (m *Machine) writeDone(now time.Duration, e WriteDone) {
	a := m.find(e.ID)
	if a == nil || a.writing == nil {
		return // the address was forgotten meanwhile
	}
	w := a.writing
	a.writing = nil
	if e.Outcome != Written {
		if e.Outcome == Unknown && w.Version == a.rec.Version {
			a.doubtful = append(a.doubtful, w)
		}
		a.retry, m.look = now+m.rules.retry, true
		return
	}
	m.observe(now, e.Written)
	if w.Holder == m.self && a.rec.Epoch == w.Epoch {
		a.confirmed = max(a.confirmed, w.begun)
		a.claimed = a.claimed || w.held
	}
	if w.before != w.Holder {
		for _, n := range []string{w.before, w.Holder} {
			if m.peers[n] != nil {
				m.send(now, n, Message{Kind: Notice})
			}
		}
	}
}

// sure is the last moment at which it was sure that this node has an address: by the API server or, while that is away, by a majority.
func (m *Machine) sure(now time.Duration, a *address) time.Duration {
	if !a.claimed {
		return a.confirmed
	}
	return max(a.confirmed, m.leaseOf(now, a)-m.rules.lease)
}

// answer tells how long to answer.
func (m *Machine) answer(now time.Duration, a *address) {
	until := never
	if a.heldBy(m.self) && a.ready && !a.barred() && m.reached(now, a.from) {
		until = a.confirmed + m.rules.lease
		if a.claimed {
			until = max(until, m.leaseOf(now, a))
		}
	}
	if until <= now {
		if a.until != never {
			m.do(Stop{a.rec.ID})
		}
		a.until = never
		return
	}
	m.reached(now, until)
	announce := a.until <= now || a.disputed != never && m.sure(now, a) >= a.disputed && m.reached(now, a.announced+m.rules.retry)
	if announce {
		a.announced, a.disputed = now, never
	}
	if announce || until != a.until {
		m.do(Answer{a.rec.ID, a.rec.Epoch, until, announce})
	}
	a.until = until
}
