package egress

import (
	"cmp"
	"context"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/echo"
	"github.com/coil-net/coil/pkg/plan"
)

// Reasons of Events on Egresses.
const (
	RouterDead = "RouterDead"
	RouterBack = "RouterBack"
)

// Each router that a client of the node has a tunnel to is asked once in a while, through the tunnel
// of one client, and has so long to answer. Routers drop what a pod sends until they know it, which is
// seconds after its ADD: who never got an answer asks, too, until it does, and proves nothing.
const (
	askEvery = time.Second
	askWait  = 500 * time.Millisecond
)

// router is one at one of its addresses.
type router struct {
	liveness
	egress string // namespace/name
	// turn is whose it is to ask: another client's when the last one got no answer. Clients that the
	// router has never answered have turns of their own.
	turn, newTurn int
}

// routersOf returns the routers of an Egress; those that don't answer are dead. One that answers
// again, but not for long enough, keeps the flows that nobody has taken from it.
func (m *Manager) routersOf(egress types.NamespacedName) ([]plan.ClientRouter, error) {
	all, err := m.cluster.Routers(egress)
	if err != nil {
		return nil, err
	}
	all = slices.Clone(all)
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range all {
		switch r := m.routers[all[i].Addr]; {
		case r == nil || !r.dead:
		case r.answers > 0:
			all[i].State = plan.RouterDraining
		default:
			all[i].State = plan.RouterDead
		}
	}
	return all, nil
}

// AskRouters asks all routers again and again until ctx ends, and rests while there are none. What is
// told of a router changes at once what its clients do.
func (m *Manager) AskRouters(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.spreading:
			m.askWhileAny(ctx)
		}
	}
}

// askWhileAny asks until there is nobody to ask any more.
func (m *Manager) askWhileAny(ctx context.Context) {
	ticker := time.NewTicker(askEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if !m.askOnce(ctx) {
				return
			}
		}
	}
}

// round is what one client asks, and hears.
type round struct {
	client    *sandbox
	questions []echo.Question
	known     []bool        // whether the router of a question has answered the client before
	answers   []echo.Answer // none if nothing could be asked
	err       error
}

// askOnce asks each router once, and says whether there is any.
func (m *Manager) askOnce(ctx context.Context) bool {
	rounds := m.questions()
	var wg sync.WaitGroup
	for _, r := range rounds {
		wg.Go(func() { r.answers, r.err = m.cfg.Ask(ctx, r.client.Netns, askWait, r.questions) })
	}
	wg.Wait()
	if ctx.Err() != nil {
		return false
	}
	for _, r := range rounds {
		if r.err != nil {
			logged(ctx, r.client).V(2).Info("Can't ask routers through the pod, another one does", "reason", r.err)
		}
	}
	for _, addr := range m.hear(rounds) {
		m.tellRouter(ctx, addr)
	}
	return len(rounds) > 0
}

// questions chooses who asks which router, and forgets routers that nobody has a tunnel to.
func (m *Manager) questions() []*round {
	m.mu.Lock()
	defer m.mu.Unlock()
	type end struct {
		*sandbox
		source netip.Addr
		egress string
	}
	clients := map[netip.Addr][]end{}
	for _, s := range m.known {
		for _, g := range s.groups {
			for _, a := range g.Routers() {
				if s.links[a] != 0 && !m.starts(g, a) {
					clients[a] = append(clients[a], end{s, g.Source, g.Egress})
				}
			}
		}
	}
	for a := range m.routers {
		if len(clients[a]) == 0 {
			delete(m.routers, a)
			for _, s := range m.known {
				delete(s.answered, a)
			}
		}
	}
	bySandbox := map[*sandbox]*round{}
	var rounds []*round
	for a, ends := range clients {
		slices.SortFunc(ends, func(a, b end) int {
			return cmp.Or(strings.Compare(a.ContainerID, b.ContainerID), strings.Compare(a.IfName, b.IfName))
		})
		r := m.routers[a]
		if r == nil {
			r = &router{}
			m.routers[a] = r
		}
		r.egress = ends[0].egress
		ask := func(ends []end, turn int) {
			if len(ends) == 0 {
				return
			}
			asks := ends[turn%len(ends)]
			if bySandbox[asks.sandbox] == nil {
				bySandbox[asks.sandbox] = &round{client: asks.sandbox}
				rounds = append(rounds, bySandbox[asks.sandbox])
			}
			round := bySandbox[asks.sandbox]
			round.questions = append(round.questions, echo.Question{Link: asks.links[a], From: asks.source, To: a})
			round.known = append(round.known, asks.answered[a])
		}
		answered := func(e end) bool { return e.answered[a] }
		ask(slices.DeleteFunc(slices.Clone(ends), func(e end) bool { return !answered(e) }), r.turn)
		ask(slices.DeleteFunc(ends, answered), r.newTurn)
	}
	return rounds
}

// starts says whether a router may be one that isn't up yet: not ready, and never heard of. It is
// asked when it is to take flows.
func (m *Manager) starts(g plan.ClientGroup, router netip.Addr) bool {
	r := m.routers[router]
	return slices.Contains(g.Draining, router) && (r == nil || r.last.IsZero())
}

// hear notes what routers have answered, and returns those that died or came back.
func (m *Manager) hear(rounds []*round) (changed []netip.Addr) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	proven := map[netip.Addr]bool{} // routers that were asked by who they know
	for _, round := range rounds {
		for i, q := range round.questions {
			proven[q.To] = proven[q.To] || round.known[i]
		}
	}
	var noted []netip.Addr
	// Answers first: who answers shows that others could.
	for _, pass := range []echo.Answer{echo.Given, echo.Missing, echo.Unknown} {
		for _, round := range rounds {
			for i, q := range round.questions {
				answer := echo.Unknown
				if i < len(round.answers) {
					answer = round.answers[i]
				}
				r := m.routers[q.To]
				if r == nil || answer != pass {
					continue
				}
				given, known := answer == echo.Given, round.known[i]
				switch {
				case given:
					round.client.heard(q.To)
				case known:
					r.turn++
				default:
					r.newTurn++
				}
				if answer == echo.Unknown {
					continue
				}
				// A router may not know a new client yet: its question counts only where nobody better
				// asks, and silence only if others answer that client.
				if !known && (proven[q.To] || !given && !m.answeredByOthers(round.client, q.To)) {
					continue
				}
				r.note(now, given)
				noted = append(noted, q.To)
			}
		}
	}
	for _, a := range noted {
		if m.routers[a].judge(now, m.othersAnswer(a, now), m.doubtful(a)) {
			changed = append(changed, a)
		}
	}
	return changed
}

// doubtful says whether all other routers of an Egress have become silent, one of them not for long
// enough: it had better not be given the flows of who has become so a moment before.
func (m *Manager) doubtful(addr netip.Addr) bool {
	doubt := false
	for _, r := range m.others(addr) {
		switch {
		case r.last.IsZero():
		case r.missed == 0:
			return false
		case !r.dead && r.missed < deathMisses:
			doubt = true
		}
	}
	return doubt
}

// heard notes that a router has answered the sandbox.
func (s *sandbox) heard(router netip.Addr) {
	if s.answered == nil {
		s.answered = map[netip.Addr]bool{}
	}
	s.answered[router] = true
}

// others returns the other routers of an Egress, in the same family.
func (m *Manager) others(addr netip.Addr) iter.Seq2[netip.Addr, *router] {
	return func(yield func(netip.Addr, *router) bool) {
		for a, r := range m.routers {
			if a != addr && r.egress == m.routers[addr].egress && dataplane.FamilyOf(a) == dataplane.FamilyOf(addr) && !yield(a, r) {
				return
			}
		}
	}
}

// othersAnswer says whether another router of an Egress has answered lately.
func (m *Manager) othersAnswer(addr netip.Addr, now time.Time) bool {
	for _, r := range m.others(addr) {
		if !r.last.IsZero() && now.Sub(r.last) < deathMisses*askEvery {
			return true
		}
	}
	return false
}

// answeredByOthers says whether another router of an Egress knows a client.
func (m *Manager) answeredByOthers(client *sandbox, addr netip.Addr) bool {
	for a := range m.others(addr) {
		if client.answered[a] {
			return true
		}
	}
	return false
}

// tellRouter tells of a router that died or came back: its clients, and on some nodes people.
func (m *Manager) tellRouter(ctx context.Context, addr netip.Addr) {
	m.mu.Lock()
	r := m.routers[addr]
	if r == nil {
		m.mu.Unlock()
		return
	}
	name, dead := r.egress, r.dead
	m.mu.Unlock()
	namespace, egress, _ := strings.Cut(name, "/")
	key := types.NamespacedName{Namespace: namespace, Name: egress}
	m.EgressChanged(key)
	klog.FromContext(ctx).Info("A router of an Egress died or came back", "egress", klog.KRef(namespace, egress), "router", addr, "dead", dead)
	ref := &corev1.ObjectReference{APIVersion: v2.GroupVersion.String(), Kind: "Egress", Namespace: namespace, Name: egress}
	clients := 0
	if e, err := m.cluster.Egress(ctx, key, false); err == nil {
		ref.UID, clients = e.UID, int(e.Status.Clients)
	}
	if !m.tells(addr, key, clients) {
		return
	}
	if dead {
		m.recorder.Eventf(ref, nil, corev1.EventTypeWarning, RouterDead, RouterDead, "router %s doesn't answer: pods of the node send no new flow to it", addr)
	} else {
		m.recorder.Eventf(ref, nil, corev1.EventTypeNormal, RouterBack, RouterBack, "router %s answers again", addr)
	}
}

// made notes what a client has of routers, and how long it took to leave those that died.
func (m *Manager) made(ctx context.Context, s *sandbox, out Outcome, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s.tunnels = len(out.State.Tunnels)
	m.counts.moved.Add(float64(out.Moved))
	if out.Unpinned > 0 {
		m.counts.unpinned.Add(float64(out.Unpinned))
		logged(ctx, s).Info("Flows of the pod may go on by other routers: they are too many to be kept", "pinned", sum(out.Pinned), "others", out.Unpinned)
	}
	if err == nil {
		for _, g := range out.State.Groups {
			for _, a := range g.Dead {
				if r := m.routers[a]; r != nil && !r.last.IsZero() && uses(s.groups, a) {
					m.counts.failover.Observe(time.Since(r.last).Seconds())
				}
			}
		}
	}
	for _, g := range out.State.Groups {
		for _, a := range g.Dead {
			if m.routers[a] == nil {
				m.routers[a] = &router{liveness: deadAlready(), egress: g.Egress}
			}
		}
	}
	if err == nil || out.Links != nil {
		s.groups, s.links, s.pinned = out.State.Groups, out.Links, out.Pinned
	}
	if len(s.groups) > 0 {
		select {
		case m.spreading <- struct{}{}:
		default: // it is told already
		}
	}
}

// sum is how many there are in all.
func sum(by map[int]int) int {
	n := 0
	for _, part := range by {
		n += part
	}
	return n
}

// former says whether flows of a sandbox still go where those of an Egress went before its peering
// changed.
func (m *Manager) former(s *sandbox, egress string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(s.groups, func(g plan.ClientGroup) bool {
		return g.Egress == egress && slices.ContainsFunc(g.Former, func(a netip.Addr) bool { return s.pinned[s.links[a]] > 0 })
	})
}

// uses says whether groups send to a router.
func uses(groups []plan.ClientGroup, router netip.Addr) bool {
	return slices.ContainsFunc(groups, func(g plan.ClientGroup) bool { return slices.Contains(g.Members, router) })
}
