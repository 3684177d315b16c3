package routerhealth

import (
	"cmp"
	"context"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/echo"
	"github.com/coil-net/coil/pkg/plan/client"
)

// Only the goroutine of Run changes the states of routers, under Checker.mu, and it reads them without. ADD, DEL and
// failover of the node want the mutex, too, and the pods of one tenant may have thousands of routers. So nothing is done
// under the mutex that takes long.

// mostLocked is how many routers are looked up while the mutex is held.
const mostLocked = 1024

// circle is the routers of an Egress in a family, which are judged by each other.
type circle struct {
	members []*member
	// found is nil until it is counted.
	found *findings
}

// member is a router of a circle, and the pods that have tunnels to it.
type member struct {
	routerKey
	*router
	circle *circle
	ends   []end
	// proven says that it has answered one of them that can ask: silence to others is no proof.
	proven bool
}

// end is a pod that has a tunnel to a router.
type end struct {
	*sender
	source netip.Addr
	// draining says that the pod's routers had this one as one that isn't ready.
	draining bool
}

// sender is a pod as it was when a round began, with its questions and the answers.
type sender struct {
	*pod
	sends   []client.Group
	to      map[netip.Addr]int
	absent  bool // it asks still, and hasn't come back
	mute    bool // its namespace is muted
	late    bool // its round takes longer than longAsking
	about   []question
	answers []echo.Answer // Unknown if nothing could be asked
	err     error
}

// enquirers are the pods that can ask a router. The router has answered the old ones, and never the unknown ones. Of the
// old ones the takers ask in turn, and the mute ones don't, since they may be late.
type enquirers struct {
	old, takers, unknown, mute []end
}

// asksItself says whether an old one asks for itself: it misses an answer, or it is the mute one whose turn it is, since
// a taker may answer in the router's place.
func (e enquirers) asksItself(m *member, old end) bool {
	return !m.dead && old.missed[m.routerKey] > 0 || len(e.mute) > 0 && e.mute[m.turn%len(e.mute)].sender == old.sender
}

// sort makes them the enquirers of a router.
func (e *enquirers) sort(m *member) {
	e.old, e.takers, e.unknown, e.mute = e.old[:0], e.takers[:0], e.unknown[:0], e.mute[:0]
	for _, c := range m.ends {
		switch {
		case c.absent:
		case !c.answered[m.addr]:
			e.unknown = append(e.unknown, c)
		default:
			e.old = append(e.old, c)
			// A pod that lets answers get lost, or may be late, has no turn as long as another one hears some.
			switch {
			case c.missed[m.routerKey] >= deathMisses:
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

// question is that of a pod to a router.
type question struct {
	*member
	end end
	// known says that the router has answered the pod before, turn that it is the pod's turn: that it doesn't ask for
	// itself alone.
	known, turn bool
}

// questions chooses the pods that ask each router, and forgets routers to which no pod has a tunnel. It returns the pods
// that ask, and whether there is a router to ask.
func (c *Checker) questions(ctx context.Context) (asking []*sender, any bool) {
	members := c.meet(gather(c.senders()))
	c.forgetRouters(len(members))
	chosen := choose(members)
	c.tellWhether(ctx, len(chosen))
	if len(chosen) > mostQuestions {
		chosen = c.share(members)
	}
	for _, q := range chosen {
		s := q.end.sender
		if s.about == nil {
			asking = append(asking, s)
		}
		s.about = append(s.about, q)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range asking {
		s.asking = true
	}
	return asking, len(members) > 0
}

// senders begins a round, and returns the pods, in the order in which they have their turns.
func (c *Checker) senders() []*sender {
	now := time.Now()
	c.mu.Lock()
	c.round++
	all := make([]*sender, 0, len(c.pods))
	for _, p := range c.pods {
		if len(p.groups) > 0 {
			all = append(all, &sender{pod: p, sends: p.groups, to: p.links, absent: p.asking, mute: now.Before(c.muted[p.Namespace])})
		}
	}
	c.mu.Unlock()
	slices.SortFunc(all, func(a, b *sender) int {
		return cmp.Or(strings.Compare(a.ContainerID, b.ContainerID), strings.Compare(a.IfName, b.IfName))
	})
	return all
}

// gather returns the routers that pods have tunnels to.
func gather(all []*sender) (members []*member) {
	type circleName struct {
		egress string
		family dataplane.Family
	}
	circles, known := map[circleName]*circle{}, map[routerKey]*member{}
	for _, s := range all {
		for _, g := range s.sends {
			draining := len(g.Members) // Routers has them after these
			for i, addr := range g.Routers() {
				if s.to[addr] == 0 {
					continue
				}
				r := known[routerKey{g.Egress, addr}]
				if r == nil {
					name := circleName{g.Egress, dataplane.FamilyOf(addr)}
					if circles[name] == nil {
						circles[name] = &circle{}
					}
					r = &member{routerKey: routerKey{g.Egress, addr}, circle: circles[name]}
					known[r.routerKey] = r
					members = append(members, r)
				}
				r.ends = append(r.ends, end{s, g.Source, draining <= i && i < draining+len(g.Draining)})
			}
		}
	}
	return members
}

// meet adds the states of the routers, and returns the routers that can be asked. Routers that aren't ready and have
// never answered can't: they may not be up yet, and are asked as soon as they are to take flows.
func (c *Checker) meet(all []*member) []*member {
	met := all[:0]
	for chunk := range slices.Chunk(all, mostLocked) {
		c.mu.Lock()
		for _, r := range chunk {
			r.router = c.routers[r.routerKey]
			if r.router == nil || r.last.IsZero() {
				r.ends = slices.DeleteFunc(r.ends, func(e end) bool { return e.draining })
			}
			if len(r.ends) == 0 {
				continue
			}
			if r.router == nil {
				r.router = &router{}
				c.routers[r.routerKey] = r.router
			}
			r.seen = c.round
			r.circle.members = append(r.circle.members, r)
			met = append(met, r)
		}
		c.mu.Unlock()
	}
	return met
}

// forgetRouters forgets the routers that no pod has a tunnel to. met says how many have one.
func (c *Checker) forgetRouters(met int) {
	gone, addrs := map[routerKey]bool{}, map[netip.Addr]bool{}
	var all []*pod
	c.mu.Lock()
	if len(c.routers) > met {
		for key, r := range c.routers {
			if r.seen != c.round {
				delete(c.routers, key)
				gone[key], addrs[key.addr] = true, true
			}
		}
	}
	if len(gone) > 0 {
		all = slices.Collect(maps.Values(c.pods))
	}
	c.mu.Unlock()
	for _, p := range all {
		c.mu.Lock()
		p.forget(gone, addrs)
		c.mu.Unlock()
	}
}

// choose returns all that there is to ask: of each router one pod in turn, each that asks for itself, and one that it has
// never answered.
func choose(members []*member) (chosen []question) {
	var pods enquirers
	for _, r := range members {
		pods.sort(r)
		if r.proven = len(pods.old) > 0; r.proven {
			first := pods.takers[r.turn%len(pods.takers)]
			for _, e := range pods.old {
				if turn := e.sender == first.sender; turn || pods.asksItself(r, e) {
					chosen = append(chosen, question{r, e, true, turn})
				}
			}
		}
		if n := len(pods.unknown); n > 0 {
			chosen = append(chosen, question{r, pods.unknown[r.newTurn%n], false, true})
		}
	}
	return chosen
}
