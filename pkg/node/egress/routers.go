package egress

import (
	"cmp"
	"context"
	"iter"
	"net/netip"
	"slices"
	"strings"
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
// of one client after the other, and has so long to answer. Routers drop what a pod sends until they know it,
// which is seconds after its ADD: who never got an answer asks, too, until it does, and proves nothing.
//
// A program in a client can answer in a router's place, or lose the answer. A client that got none asks
// again until it does, and believes itself: what others hear keeps no dead router alive for it.
const (
	askEvery = time.Second
	askWait  = 500 * time.Millisecond
)

// routerKey is a router of an Egress at one of its addresses. Anybody who may write EndpointSlices can list
// the routers of another Egress.
type routerKey struct {
	egress string // namespace/name
	addr   netip.Addr
}

// router is what clients of the node have heard of one.
type router struct {
	liveness
	// turn is whose it is to ask. Clients that the router has never answered have turns of their own.
	turn, newTurn int
}

// routersOf returns the routers of an Egress for a client, or for a pod that is being added; those that
// don't answer are dead. One that answers again, but not for long enough, keeps the flows that nobody has
// taken from it.
func (m *Manager) routersOf(egress types.NamespacedName, s *sandbox) ([]plan.ClientRouter, error) {
	all, err := m.cluster.Routers(egress)
	if err != nil {
		return nil, err
	}
	all = slices.Clone(all)
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range all {
		key := routerKey{egress.String(), all[i].Addr}
		switch r := m.routers[key]; {
		case s != nil && s.alone[key]:
			all[i].State = plan.RouterDead
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

// askOnce asks each router once, and says whether there is any.
func (m *Manager) askOnce(ctx context.Context) bool {
	rounds, asked := m.questions()
	m.askAll(ctx, rounds)
	if ctx.Err() != nil {
		return false
	}
	for _, r := range rounds {
		if r.err != nil {
			logged(ctx, r.client).V(2).Info("Can't ask routers through the pod, another one does", "reason", r.err)
		}
	}
	for _, key := range m.hear(rounds) {
		m.tellRouter(ctx, key)
	}
	return asked
}

// end is a client that has a tunnel to a router.
type end struct {
	*sandbox
	source netip.Addr
}

// questions chooses who asks which router, and forgets routers that nobody has a tunnel to. It says whether there
// are others.
func (m *Manager) questions() (rounds []*round, asked bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	clients := map[routerKey][]end{}
	for _, s := range m.known {
		for _, g := range s.groups {
			for _, a := range g.Routers() {
				if key := (routerKey{g.Egress, a}); s.links[a] != 0 && !m.starts(g, a) {
					clients[key] = append(clients[key], end{s, g.Source})
				}
			}
		}
	}
	for key := range m.routers {
		if len(clients[key]) == 0 {
			delete(m.routers, key)
			for _, s := range m.known {
				s.forgetRouter(key)
			}
		}
	}
	bySandbox := map[*sandbox]*round{}
	for key, ends := range clients {
		slices.SortFunc(ends, func(a, b end) int {
			return cmp.Or(strings.Compare(a.ContainerID, b.ContainerID), strings.Compare(a.IfName, b.IfName))
		})
		r := m.routers[key]
		if r == nil {
			r = &router{}
			m.routers[key] = r
		}
		ask := func(asks end, turn bool) {
			if bySandbox[asks.sandbox] == nil {
				bySandbox[asks.sandbox] = &round{client: asks.sandbox}
				rounds = append(rounds, bySandbox[asks.sandbox])
			}
			bySandbox[asks.sandbox].ask(key, asks.source, turn)
		}
		answered := func(e end) bool { return e.answered[key.addr] }
		old := slices.DeleteFunc(slices.Clone(ends), func(e end) bool { return !answered(e) || e.asking })
		// A client that lets answers get lost has no turn as long as another one hears some.
		takers := slices.DeleteFunc(slices.Clone(old), func(e end) bool { return e.missed[key] >= deathMisses })
		if len(takers) == 0 {
			takers = old
		}
		for _, e := range old {
			turn := e.sandbox == takers[r.turn%len(takers)].sandbox
			if turn || e.missed[key] > 0 && !r.dead {
				ask(e, turn)
			}
		}
		if unknown := slices.DeleteFunc(ends, func(e end) bool { return answered(e) || e.asking }); len(unknown) > 0 {
			ask(unknown[r.newTurn%len(unknown)], true)
		}
	}
	for _, r := range rounds {
		r.client.asking = true
	}
	return rounds, len(clients) > 0
}

// starts says whether a router may be one that isn't up yet: not ready, and never heard of. It is
// asked when it is to take flows.
func (m *Manager) starts(g plan.ClientGroup, addr netip.Addr) bool {
	r := m.routers[routerKey{g.Egress, addr}]
	return slices.Contains(g.Draining, addr) && (r == nil || r.last.IsZero())
}

// hear notes what routers have answered, and returns those that died or came back.
func (m *Manager) hear(rounds []*round) (changed []routerKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	proven := map[routerKey]bool{} // routers that were asked by who they know
	for _, round := range rounds {
		for _, q := range round.about {
			proven[q.routerKey] = proven[q.routerKey] || q.known && q.turn
		}
	}
	var noted []routerKey
	// Answers first: who answers shows that others could.
	for _, pass := range []echo.Answer{echo.Given, echo.Missing, echo.Unknown} {
		for _, round := range rounds {
			for i, q := range round.about {
				answer := echo.Unknown
				if i < len(round.answers) {
					answer = round.answers[i]
				}
				if answer == pass && m.note(now, round.client, q, answer, proven[q.routerKey]) {
					noted = append(noted, q.routerKey)
				}
			}
		}
	}
	for _, key := range noted {
		if m.routers[key].judge(now, m.othersAnswer(key, now), m.doubtful(key)) {
			changed = append(changed, key)
		}
	}
	for _, round := range rounds {
		m.compare(round)
	}
	return changed
}

// note notes an answer, and says whether it counts for all clients.
func (m *Manager) note(now time.Time, s *sandbox, q about, answer echo.Answer, proven bool) bool {
	r := m.routers[q.routerKey]
	if r == nil {
		return false
	}
	given := answer == echo.Given
	if given || answer == echo.Missing && q.known {
		s.heard(q.routerKey, given)
	}
	if !q.turn {
		return false
	}
	switch {
	case q.known:
		r.turn++
	case !given:
		r.newTurn++
	}
	// A router may not know a new client yet: its question counts only where nobody better asks, and
	// silence only if others answer that client.
	if answer == echo.Unknown || !q.known && (proven || !given && !m.answeredByOthers(s, q.routerKey)) {
		return false
	}
	r.note(now, given)
	return true
}

// compare finds out which routers answer others but not the client of a round, whom other routers of the
// Egress do answer.
func (m *Manager) compare(round *round) {
	s := round.client
	for _, q := range round.about {
		alone := false
		if s.missed[q.routerKey] >= deathMisses {
			for key := range m.others(q.routerKey) {
				alone = alone || s.answered[key.addr] && s.missed[key] == 0
			}
		}
		if alone == s.alone[q.routerKey] {
			continue
		}
		if delete(s.alone, q.routerKey); alone {
			s.alone[q.routerKey] = true
		}
		m.loop.Add(podName(s))
	}
}

// doubtful says whether all other routers of an Egress have become silent, one of them not for long
// enough: it had better not be given the flows of who has become so a moment before.
func (m *Manager) doubtful(key routerKey) bool {
	doubt := false
	for _, r := range m.others(key) {
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

// heard notes whether a router has answered the sandbox.
func (s *sandbox) heard(key routerKey, given bool) {
	if s.answered == nil {
		s.answered, s.missed, s.alone = map[netip.Addr]bool{}, map[routerKey]int{}, map[routerKey]bool{}
	}
	if !given {
		s.missed[key]++
		return
	}
	s.answered[key.addr] = true
	delete(s.missed, key)
}

// forgetRouter forgets what the sandbox has heard of a router.
func (s *sandbox) forgetRouter(key routerKey) {
	delete(s.answered, key.addr)
	delete(s.missed, key)
	delete(s.alone, key)
}

// others returns the other routers of an Egress, in the same family.
func (m *Manager) others(key routerKey) iter.Seq2[routerKey, *router] {
	return func(yield func(routerKey, *router) bool) {
		for k, r := range m.routers {
			if k != key && k.egress == key.egress && dataplane.FamilyOf(k.addr) == dataplane.FamilyOf(key.addr) && !yield(k, r) {
				return
			}
		}
	}
}

// othersAnswer says whether another router of an Egress has answered lately.
func (m *Manager) othersAnswer(key routerKey, now time.Time) bool {
	for _, r := range m.others(key) {
		if !r.last.IsZero() && now.Sub(r.last) < deathMisses*askEvery {
			return true
		}
	}
	return false
}

// answeredByOthers says whether another router of an Egress knows a client.
func (m *Manager) answeredByOthers(client *sandbox, key routerKey) bool {
	for k := range m.others(key) {
		if client.answered[k.addr] {
			return true
		}
	}
	return false
}

// tellRouter tells of a router that died or came back: its clients, and on some nodes people.
func (m *Manager) tellRouter(ctx context.Context, router routerKey) {
	m.mu.Lock()
	r := m.routers[router]
	if r == nil {
		m.mu.Unlock()
		return
	}
	dead := r.dead
	m.mu.Unlock()
	namespace, egress, _ := strings.Cut(router.egress, "/")
	key := types.NamespacedName{Namespace: namespace, Name: egress}
	m.EgressChanged(key)
	klog.FromContext(ctx).Info("A router of an Egress died or came back", "egress", klog.KRef(namespace, egress), "router", router.addr, "dead", dead)
	ref := &corev1.ObjectReference{APIVersion: v2.GroupVersion.String(), Kind: "Egress", Namespace: namespace, Name: egress}
	clients := 0
	if e, err := m.cluster.Egress(ctx, key, false); err == nil {
		ref.UID, clients = e.UID, int(e.Status.Clients)
	}
	if !m.tells(router.addr, key, clients) {
		return
	}
	if dead {
		m.recorder.Eventf(ref, nil, corev1.EventTypeWarning, RouterDead, RouterDead, "router %s doesn't answer: pods of the node send no new flow to it", router.addr)
	} else {
		m.recorder.Eventf(ref, nil, corev1.EventTypeNormal, RouterBack, RouterBack, "router %s answers again", router.addr)
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
				if r := m.routers[routerKey{g.Egress, a}]; r != nil && !r.last.IsZero() && uses(s.groups, a) {
					m.counts.failover.Observe(time.Since(r.last).Seconds())
				}
			}
		}
	}
	for _, g := range out.State.Groups {
		for _, a := range g.Dead {
			if key := (routerKey{g.Egress, a}); m.routers[key] == nil {
				m.routers[key] = &router{liveness: deadAlready()}
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
