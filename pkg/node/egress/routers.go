package egress

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/plan/client"
)

// Reasons of Events on Egresses.
const (
	// RouterDead: a router doesn't answer, and pods of the node with peering Direct send it no new flow.
	RouterDead = "RouterDead"
	// RouterBack: a router answers again.
	RouterBack = "RouterBack"
)

// Each router to which a client of the node has a tunnel is asked every askEvery, through the tunnels of its clients in
// turn, and has askWait to answer. A router drops packets of a pod until it knows the pod, which is seconds after the
// pod's ADD. So a client that has never had an answer asks, too, until it has one; its silence proves nothing.
//
// A program in a client can answer in the place of a router, or drop the answer. A client without an answer asks again
// until it has one, and believes itself: answers to other clients keep no dead router alive for it.
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
	// waited is in how many rounds since it last answered it had to wait, since there were too many questions.
	waited int
	// seen is the last round in which a client had a tunnel to it.
	seen uint64
}

// routersOf returns the routers of an Egress for a client, or for a pod that is being added; those that
// don't answer are dead. One that answers again, but not for long enough, keeps the flows that nobody has
// taken from it.
func (m *Manager) routersOf(egress types.NamespacedName, s *sandbox) ([]client.Router, error) {
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
			all[i].State = client.RouterDead
		case r == nil || !r.dead:
		case r.answers > 0:
			all[i].State = client.RouterDraining
		default:
			all[i].State = client.RouterDead
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
	a := m.questions(ctx)
	m.askAll(ctx, a.rounds)
	if ctx.Err() != nil {
		return false
	}
	for _, r := range a.rounds {
		if r.err != nil {
			logged(ctx, r.client).V(2).Info("Can't ask routers through the pod, another one does", "reason", r.err)
		}
	}
	changed := m.hear(a)
	told := map[string]bool{}
	for _, key := range changed {
		if !told[key.egress] {
			told[key.egress] = true
			m.EgressChanged(key.name())
		}
	}
	for _, key := range changed {
		m.tellRouter(ctx, key)
	}
	return len(a.members) > 0
}

// name is that of the Egress.
func (k routerKey) name() types.NamespacedName {
	namespace, name, _ := strings.Cut(k.egress, "/")
	return types.NamespacedName{Namespace: namespace, Name: name}
}

// tellRouter tells people of a router that died or came back, on some nodes.
func (m *Manager) tellRouter(ctx context.Context, router routerKey) {
	m.mu.Lock()
	r := m.routers[router]
	if r == nil {
		m.mu.Unlock()
		return
	}
	dead := r.dead
	m.mu.Unlock()
	key := router.name()
	klog.FromContext(ctx).Info("A router of an Egress died or came back", "egress", klog.KRef(key.Namespace, key.Name), "router", router.addr, "dead", dead)
	ref := &corev1.ObjectReference{APIVersion: v2.GroupVersion.String(), Kind: "Egress", Namespace: key.Namespace, Name: key.Name}
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
func (m *Manager) made(ctx context.Context, s *sandbox, out clientnet.Outcome, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s.tunnels = len(out.State.Tunnels)
	m.counts.moved.Add(float64(out.Moved))
	if out.Unpinned > 0 {
		m.counts.unpinned.Add(float64(out.Unpinned))
		logged(ctx, s).Info("Flows of the pod may go on by other routers: they are too many to be kept", "pinned", out.AllPinned(), "others", out.Unpinned)
	}
	used := map[netip.Addr]bool{}
	for _, g := range s.groups {
		for _, a := range g.Members {
			used[a] = true
		}
	}
	for _, g := range out.State.Groups {
		for _, a := range g.Dead {
			key := routerKey{g.Egress, a}
			switch r := m.routers[key]; {
			case r == nil:
				m.routers[key] = &router{liveness: deadAlready()}
			case err == nil && !r.last.IsZero() && used[a]:
				m.counts.failover.Observe(time.Since(r.last).Seconds())
			}
		}
		for _, a := range g.Routers() {
			if r := m.routers[routerKey{g.Egress, a}]; r != nil {
				r.seen = m.asker.round // which may have begun before
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

// former says whether flows of a sandbox still go where those of an Egress went before its peering
// changed.
func (m *Manager) former(s *sandbox, egress string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(s.groups, func(g client.Group) bool {
		return g.Egress == egress && slices.ContainsFunc(g.Former, func(a netip.Addr) bool { return s.pinned[s.links[a]] > 0 })
	})
}
