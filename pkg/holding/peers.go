package holding

import (
	"maps"
	"slices"
	"time"
)

// peer is another node that may have one of the addresses that this node may have.
type peer struct {
	// met is when this node began to send it heartbeats.
	met time.Duration
	// heard is when a message of it came.
	heard time.Duration
	// stamp is the newest one of it.
	stamp Stamp
	// leased is when this node sent the last heartbeat for which the peer has granted it a lease.
	leased time.Duration
	// withheld is until when this node grants the peer no lease.
	withheld time.Duration
}

// round is a question to all about a node.
type round struct {
	asked  time.Duration
	silent map[string]bool // what each voter has answered
}

// meet brings the peers in line with the records.
func (m *Machine) meet(now time.Duration) {
	want := map[string]bool{}
	for _, a := range m.addresses {
		nodes := slices.Concat(a.rec.Voters, a.rec.Successors, []string{a.rec.Holder, a.rec.MovingTo})
		if !slices.Contains(nodes, m.self) {
			continue
		}
		for _, n := range nodes {
			want[n] = true
		}
	}
	delete(want, "")
	delete(want, m.self)
	for n := range want {
		if m.peers[n] == nil {
			m.peers[n] = &peer{met: now, heard: never, leased: never, withheld: never}
		}
	}
	maps.DeleteFunc(m.peers, func(n string, p *peer) bool {
		// A promise is kept, whatever happens meanwhile.
		return !want[n] && now >= p.withheld && now-p.heard >= m.rules.silence
	})
	maps.DeleteFunc(m.rounds, func(n string, _ *round) bool { return m.peers[n] == nil })
	m.names = slices.Sorted(maps.Keys(m.peers))
}

// heartbeat asks all peers for leases.
func (m *Machine) heartbeat(now time.Duration) {
	if !m.reached(now, m.sent+m.rules.heartbeat) {
		return
	}
	m.sent = now
	for _, n := range m.names {
		m.send(now, n, Message{Kind: Heartbeat})
	}
}

// send completes a message, and sends it. It has an echo of the newest stamp unless it has one already.
func (m *Machine) send(now time.Duration, to string, msg Message) {
	msg.Stamp = Stamp{m.life, now}
	if msg.Echo == (Stamp{}) {
		msg.Echo = m.peers[to].stamp
	}
	m.do(Send{to, msg})
}

func (m *Machine) receive(now time.Duration, from string, msg Message) {
	p := m.peers[from]
	if p == nil {
		return
	}
	if msg.Echo.Life != m.life || now-msg.Echo.Sent >= m.rules.silence {
		if msg.Kind == Heartbeat {
			m.send(now, from, Message{Kind: Ack, Echo: msg.Stamp})
		}
		return
	}
	p.heard = now
	if p.stamp.Life != msg.Stamp.Life || p.stamp.Sent < msg.Stamp.Sent {
		p.stamp = msg.Stamp
	}
	switch msg.Kind {
	case Heartbeat:
		grant := now >= p.withheld && now-m.began >= m.rules.silence
		m.send(now, from, Message{Kind: Ack, Echo: msg.Stamp, Grant: grant})
	case Ack:
		if msg.Grant {
			p.leased = max(p.leased, msg.Echo.Sent)
		}
	case VoteRequest:
		if about := m.peers[msg.About]; about != nil {
			m.send(now, from, Message{Kind: Vote, Echo: msg.Stamp, About: msg.About, Round: msg.Round, Silent: m.vote(now, about)})
		}
	case Vote:
		if r := m.rounds[msg.About]; r != nil && r.asked == msg.Round {
			r.silent[from] = msg.Silent
		}
	case Notice:
		m.look = true
	}
}

// hears reports whether a peer was heard within the silence.
func (m *Machine) hears(now time.Duration, name string) bool {
	p := m.peers[name]
	return p != nil && now-p.heard < m.rules.silence
}

// silentSince returns since when a peer would have been heard if it lived.
func (m *Machine) silentSince(p *peer) time.Duration {
	return max(p.heard, p.met, m.listening)
}

// vote says whether a peer is silent. If so, this node grants it no lease for the time of a promise.
func (m *Machine) vote(now time.Duration, about *peer) (silent bool) {
	if now-m.silentSince(about) < m.rules.silence {
		return false
	}
	about.withheld = now + m.rules.promise
	return true
}

// ask returns the round of questions about a peer, and begins one if the last one is old.
func (m *Machine) ask(now time.Duration, name string, about *peer) *round {
	r := m.rounds[name]
	if r != nil && !m.reached(now, r.asked+m.rules.heartbeat) {
		return r
	}
	r = &round{asked: now, silent: map[string]bool{m.self: m.vote(now, about)}}
	m.rounds[name] = r
	for _, n := range m.names {
		if n != name {
			m.send(now, n, Message{Kind: VoteRequest, About: name, Round: now})
		}
	}
	return r
}

// agreed returns how many of the voters have said in a round that the holder is silent, and whether these are enough and nobody has
// heard it.
func (m *Machine) agreed(now time.Duration, r *round, voters []string) (silent int, enough bool) {
	for _, v := range voters {
		says, ok := r.silent[v]
		switch {
		case ok && !says:
			return 0, false
		case ok:
			silent++
		case m.hears(now, v) && !m.reached(now, r.asked+m.rules.votes):
			return 0, false
		}
	}
	// All promises have to last still: a tenth is for clocks that differ.
	return silent, silent >= m.rules.quorum(len(voters)) && now-r.asked < m.rules.promise*9/10
}

// leaseOf returns until when this node has leases of more than half of the voters of an address. It is never or past if it
// hasn't.
func (m *Machine) leaseOf(now time.Duration, a *address) time.Duration {
	until := m.majority(now, a.rec.Voters)
	for _, w := range a.writes() {
		if len(w.Voters) > 0 {
			until = min(until, m.majority(now, w.Voters))
		}
	}
	return until
}

// majority returns until when this node has leases of more than half of some voters.
func (m *Machine) majority(now time.Duration, voters []string) time.Duration {
	var room [8]time.Duration
	until := room[:0]
	for _, v := range voters {
		if v == m.self {
			until = append(until, now+m.rules.lease)
		} else if p := m.peers[v]; p != nil && p.leased != never {
			until = append(until, p.leased+m.rules.lease)
		}
	}
	need := len(voters)/2 + 1
	if len(until) < need {
		return never
	}
	slices.Sort(until)
	return until[len(until)-need]
}
