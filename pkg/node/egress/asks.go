package egress

import (
	"cmp"
	"context"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/client"
)

// The goroutine of AskRouters alone changes what is known of routers, under Manager.mu, and reads it without. ADD, DEL and
// failover of the node want the mutex, too, and the pods of one tenant may have thousands of routers. So nothing is done
// under the mutex that takes long.

// mostLocked is how many routers are looked up while the mutex is held.
const mostLocked = 1024

// circle is the routers of an Egress in a family, which are judged by each other.
type circle struct {
	members []*member
	byAddr  map[netip.Addr]*member
	// found is nil until it is counted.
	found *findings
}

type circleName struct {
	egress string
	family dataplane.Family
}

// member is a router of a circle, and the clients that have tunnels to it.
type member struct {
	routerKey
	*router
	circle *circle
	ends   []end
	// proven says that it has answered one of them that can ask: silence to others is no proof.
	proven bool
	// chosen are its questions when there are too many. asked says whether a client in turn asks it: one that it has
	// never answered, and one that it has.
	chosen []*question
	asked  [2]bool
}

// end is a client that has a tunnel to a router.
type end struct {
	*sender
	source netip.Addr
	// draining says that the client's routers had this one as one that isn't ready.
	draining bool
}

// sender is what a client had when a round began.
type sender struct {
	*sandbox
	sends  []client.Group
	to     map[netip.Addr]int
	absent bool // it asks still, and hasn't come back
	mute   bool // its namespace is muted
}

// asks are all questions of a round.
type asks struct {
	circles map[circleName]*circle
	members []*member
	rounds  []*round
}

// each returns the members, and the clients of each that can ask, which are valid until the next member.
func (a *asks) each() iter.Seq2[*member, enquirers] {
	return func(yield func(*member, enquirers) bool) {
		var e enquirers
		for _, m := range a.members {
			if e.sort(m); !yield(m, e) {
				return
			}
		}
	}
}

// enquirers are the clients of a router that can ask. The router has answered the old ones, and never the unknown ones.
// Of the old ones the takers ask in turn, and the mute ones don't, since they may be late.
type enquirers struct {
	old, takers, unknown, mute []end
}

// own returns a mute client, which asks for itself: a taker may answer in the router's place.
func (e enquirers) own(turn int) (end, bool) {
	if len(e.mute) == 0 {
		return end{}, false
	}
	return e.mute[turn%len(e.mute)], true
}

func (e *enquirers) sort(m *member) {
	e.old, e.takers, e.unknown, e.mute = e.old[:0], e.takers[:0], e.unknown[:0], e.mute[:0]
	for _, c := range m.ends {
		switch {
		case c.absent:
		case !c.answered[m.addr]:
			e.unknown = append(e.unknown, c)
		default:
			e.old = append(e.old, c)
			// A client that lets answers get lost, or may be late, has no turn as long as another one hears some.
			switch {
			case c.missedOf(m.routerKey) >= deathMisses:
			case c.mute:
				e.mute = append(e.mute, c)
			default:
				e.takers = append(e.takers, c)
			}
		}
	}
	if len(e.takers) == 0 {
		e.takers = append(e.takers, e.old...)
	}
}

// missedOf is how many questions in a row a router didn't answer the sandbox.
func (s *sandbox) missedOf(key routerKey) int {
	if len(s.missed) == 0 {
		return 0
	}
	return s.missed[key]
}

// questions chooses who asks which router, and forgets routers that nobody has a tunnel to.
func (m *Manager) questions(ctx context.Context) *asks {
	a := gather(m.senders())
	m.meet(a)
	m.forgetRouters(a)
	chosen := a.choose()
	m.asker.tellWhether(ctx, len(chosen))
	if len(chosen) > mostQuestions {
		chosen = m.asker.share(a)
	}
	bySandbox := map[*sandbox]*round{}
	for _, q := range chosen {
		r := bySandbox[q.end.sandbox]
		if r == nil {
			r = &round{client: q.end.sandbox, mute: q.end.mute}
			bySandbox[q.end.sandbox] = r
			a.rounds = append(a.rounds, r)
		}
		r.ask(q)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range a.rounds {
		r.client.asking = true
	}
	return a
}

// senders begins a round, and returns the clients, in the order in which they have their turns.
func (m *Manager) senders() []*sender {
	now := time.Now()
	m.mu.Lock()
	m.asker.round++
	all := make([]*sender, 0, len(m.known))
	for _, s := range m.known {
		if len(s.groups) > 0 {
			all = append(all, &sender{s, s.groups, s.links, s.asking, now.Before(m.muted[s.Namespace])})
		}
	}
	m.mu.Unlock()
	slices.SortFunc(all, func(a, b *sender) int {
		return cmp.Or(strings.Compare(a.ContainerID, b.ContainerID), strings.Compare(a.IfName, b.IfName))
	})
	return all
}

// gather finds the routers that clients have tunnels to.
func gather(all []*sender) *asks {
	a := &asks{circles: map[circleName]*circle{}}
	for _, s := range all {
		for _, g := range s.sends {
			draining := len(g.Members) // Routers has them after these
			for i, addr := range g.Routers() {
				if s.to[addr] == 0 {
					continue
				}
				name := circleName{g.Egress, dataplane.FamilyOf(addr)}
				c := a.circles[name]
				if c == nil {
					c = &circle{byAddr: map[netip.Addr]*member{}}
					a.circles[name] = c
				}
				r := c.byAddr[addr]
				if r == nil {
					r = &member{routerKey: routerKey{g.Egress, addr}, circle: c}
					c.byAddr[addr] = r
					a.members = append(a.members, r)
				}
				r.ends = append(r.ends, end{s, g.Source, draining <= i && i < draining+len(g.Draining)})
			}
		}
	}
	return a
}

// meet adds what is known of the routers. Routers that aren't ready and have never answered are left out: they may not be
// up yet, and are asked as soon as they are to take flows.
func (m *Manager) meet(a *asks) {
	met := a.members[:0]
	for chunk := range slices.Chunk(a.members, mostLocked) {
		m.mu.Lock()
		for _, r := range chunk {
			r.router = m.routers[r.routerKey]
			if r.router == nil || r.last.IsZero() {
				r.ends = slices.DeleteFunc(r.ends, func(e end) bool { return e.draining })
			}
			if len(r.ends) == 0 {
				continue
			}
			if r.router == nil {
				r.router = &router{}
				m.routers[r.routerKey] = r.router
			}
			r.seen = m.asker.round
			met = append(met, r)
		}
		m.mu.Unlock()
	}
	a.members = met
	for _, r := range met {
		r.circle.members = append(r.circle.members, r)
	}
}

// forgetRouters forgets the routers that no client has a tunnel to.
func (m *Manager) forgetRouters(a *asks) {
	gone, addrs := map[routerKey]bool{}, map[netip.Addr]bool{}
	m.mu.Lock()
	if len(m.routers) > len(a.members) {
		for key, r := range m.routers {
			if r.seen != m.asker.round {
				delete(m.routers, key)
				gone[key], addrs[key.addr] = true, true
			}
		}
	}
	var all []*sandbox
	if len(gone) > 0 {
		for _, s := range m.known {
			all = append(all, s)
		}
	}
	m.mu.Unlock()
	for _, s := range all {
		m.mu.Lock()
		s.forgetRouters(gone, addrs)
		m.mu.Unlock()
	}
}

// choose returns all that there is to ask: of each router one client in turn, each that misses an answer of it, and
// one that it has never answered.
func (a *asks) choose() (chosen []question) {
	for r, clients := range a.each() {
		if r.proven = len(clients.old) > 0; r.proven {
			first := clients.takers[r.turn%len(clients.takers)]
			own, any := clients.own(r.turn)
			for _, e := range clients.old {
				if turn := e.sandbox == first.sandbox; turn || r.missedBy(e) || any && e.sandbox == own.sandbox {
					chosen = append(chosen, question{r, e, true, turn})
				}
			}
		}
		if n := len(clients.unknown); n > 0 {
			chosen = append(chosen, question{r, clients.unknown[r.newTurn%n], false, true})
		}
	}
	return chosen
}

// missedBy says whether a client asks a router for itself, until it gets an answer.
func (r *member) missedBy(e end) bool { return !r.dead && e.missedOf(r.routerKey) > 0 }

// question is that of a client to a router.
type question struct {
	*member
	end end
	// known says that the router has answered the client before, turn that it is the client's turn: that it doesn't
	// ask for itself alone.
	known, turn bool
}
