package egress

import (
	"context"
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
)

// mostWork is for how long a sandbox is worked on before others have their turn: a program in the pod may make that
// take long. The rest is done later.
const mostWork = 30 * time.Second

// workOn makes the wanted states of a pod's sandboxes.
func (m *Manager) workOn(ctx context.Context, pod types.NamespacedName) error {
	if len(m.affected(isOf(pod))) == 0 {
		return nil // it waits for no turn
	}
	if faultpoint.Held() {
		return reconcile.Later(held)
	}
	return m.works.do(ctx, pod.Namespace, func() error {
		return each(m.affected(isOf(pod)), func(s *sandbox) error {
			work, cancel := context.WithTimeout(ctx, mostWork)
			defer cancel()
			return m.work(work, s)
		})
	})
}

// held is how often a test is asked whether repairs are held still.
const held = 100 * time.Millisecond

// work makes the wanted state of a sandbox.
func (m *Manager) work(ctx context.Context, s *sandbox) error {
	if err := s.lock(ctx); err != nil {
		return err
	}
	defer s.work.Release(1)
	work, cancel := context.WithCancel(ctx)
	defer cancel()
	m.mu.Lock()
	current := m.known[s.ID] == s && !s.leaving
	s.end = cancel
	m.mu.Unlock()
	w := m.wantedOf(s)
	if !current || w == nil {
		return nil
	}
	err := m.workTo(work, s, w)
	switch {
	case errors.Is(err, clientnet.ErrGone):
		logged(ctx, s).V(2).Info("The network namespace is gone without DEL")
		return m.drop(ctx, s)
	case work.Err() != nil && ctx.Err() == nil:
		return nil // there is a DEL
	}
	return err
}

// wantedOf returns the wanted state of a sandbox, as it was decided last.
func (m *Manager) wantedOf(s *sandbox) *wanted {
	s.deciding.Lock()
	defer s.deciding.Unlock()
	return s.want
}

// workTo makes the wanted state of a sandbox, whose work is held.
func (m *Manager) workTo(ctx context.Context, s *sandbox, w *wanted) error {
	if w.lost || len(w.missing) > 0 {
		if err := m.findOut(ctx, s, w); err != nil {
			return err
		}
		w = m.wantedOf(s)
	}
	switch {
	case w.router: // which has rules and tunnels of its own
		return m.syncRouter(ctx, s, w.floating)
	case w.client:
		return m.apply(ctx, s, w)
	case s.restored && !s.looked:
		return m.clearLost(ctx, s, w)
	}
	return nil
}

// clearLost removes, once in a process, the objects of a former one in a sandbox that uses no Egress
// any more and has no record.
func (m *Manager) clearLost(ctx context.Context, s *sandbox, w *wanted) error {
	overtaken := false
	err := s.decide(func() error {
		if overtaken = s.want.client || s.want.router; overtaken {
			return nil // that is done next
		}
		return m.aim(ctx, s, w)
	})
	if err != nil || overtaken {
		return err
	}
	made, err := m.lastMade(ctx, s)
	if err == nil && len(made) > 0 {
		_, err = m.applyKernel(ctx, s, w)
	}
	s.looked = err == nil
	return err
}

// syncRouter sets a router's parameters.
func (m *Manager) syncRouter(ctx context.Context, s *sandbox, floating bool) error {
	out, err := m.net.Router(ctx, s.Netns, s.IfName, floating)
	if err == nil && s.router && out.Others > 0 {
		m.cfg.Repaired(ctx, out)
	}
	s.router = s.router || err == nil
	return err
}

// apply makes the wanted state of a sandbox, whose work is held. A client is recorded before it
// is made, and forgotten after it is cleared: coild may end in between. A record that can't be
// written keeps nothing from the pod.
func (m *Manager) apply(ctx context.Context, s *sandbox, w *wanted) error {
	if len(w.known) > 0 {
		recordErr := m.remember(ctx, s, w.known)
		faultpoint.At(faultpoint.EgressRecorded)
		out, err := m.applyKernel(ctx, s, w)
		faultpoint.At(faultpoint.EgressMade)
		if err == nil && recordErr == nil {
			err = m.settle(ctx, s, w, out)
		}
		return errors.Join(err, recordErr)
	}
	last, _ := m.lastOf(s)
	if len(last) > 0 {
		if _, err := m.applyKernel(ctx, s, w); err != nil {
			return err
		}
		faultpoint.At(faultpoint.EgressCleared)
	}
	if !m.turn(s, w, nil) {
		return nil // it is a client again
	}
	err := m.remember(ctx, s, nil)
	if len(last) > 0 {
		faultpoint.At(faultpoint.EgressForgotten)
	}
	return err
}

// applyKernel narrows the node's guard even if the kernel refuses something.
func (m *Manager) applyKernel(ctx context.Context, s *sandbox, w *wanted) (clientnet.Outcome, error) {
	c := m.client(s, w)
	if s.restored && s.done == nil {
		m.recall(ctx, s, c)
	}
	c.Stale = s.done == nil || s.failed != nil
	out, err := m.net.Client(ctx, s.Netns, c)
	m.made(ctx, s, out, err)
	err = errors.Join(err, m.narrowTo(ctx, s, w))
	if s.failed = err; err != nil {
		return out, err
	}
	switch {
	case !out.Changed():
	case s.done != nil && reflect.DeepEqual(*s.done, out.State):
		m.cfg.Repaired(ctx, out)
	default:
		logged(ctx, s).V(2).Info("Egress of a pod changed", "tunnels", out.State.Tunnels, "rules", out.Rules, "routes", out.Routes, "nexthops", out.Nexthops)
	}
	s.done = &out.State
	s.deciding.Lock()
	defer s.deciding.Unlock()
	s.recalled = true
	return out, nil
}

// made notes the tunnels, groups and pins of a client.
func (m *Manager) made(ctx context.Context, s *sandbox, out clientnet.Outcome, err error) {
	m.moved.Add(float64(out.Moved))
	if out.Unpinned > 0 {
		m.unpinned.Add(float64(out.Unpinned))
		logged(ctx, s).Info("Flows of the pod may go on by other routers: they are too many to be kept", "pinned", out.AllPinned(), "others", out.Unpinned)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s.tunnels = len(out.State.Tunnels)
	if m.known[s.ID] == s && (err == nil || out.Links != nil) {
		s.pinned = out.AllPinned()
		m.cfg.Health.Update(s.Sandbox, out.State.Groups, out.Links, err != nil)
	}
}

// idle is as long as routers remember connections that send nothing, but for TCP's: these have
// pins (nf_conntrack_udp_timeout_stream).
const idle = 2 * time.Minute

// remember records the Egresses that a sandbox uses.
func (m *Manager) remember(ctx context.Context, s *sandbox, egresses []store.KnownEgress) error {
	m.mu.Lock()
	same := slices.EqualFunc(s.record, egresses, sameEgress)
	recorded := s.recorded
	m.mu.Unlock()
	keep := len(egresses) > 0 || m.cfg.RecordAll
	if recorded == keep && (same || !keep) {
		return nil
	}
	var err error
	if keep {
		err = m.record.SetClient(ctx, store.Client{Sandbox: s.Sandbox, Egresses: egresses})
	} else {
		err = m.record.ForgetClients(ctx, s.ID)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	// A write that failed is repeated: a record that may be there is taken for a missing one as
	// long as it should be there, and the other way round.
	s.recorded, s.record = keep == (err == nil), egresses
	return err
}

func sameEgress(a, b store.KnownEgress) bool {
	return sameUse(a, b) && a.Direct == b.Direct && a.Open == b.Open && a.Switched == b.Switched && a.Former == b.Former && a.OriginatingOnly == b.OriginatingOnly &&
		slices.Equal(a.Destinations, b.Destinations) && slices.Equal(a.InCluster, b.InCluster)
}

// sameUse says whether two are one Egress by the same policy, or both by annotations.
func sameUse(a, b store.KnownEgress) bool { return a.Name == b.Name && a.Policy == b.Policy }

// settle forgets that Egresses have switched as soon as no flow goes the former way. The next sync
// removes the rest of the former way.
func (m *Manager) settle(ctx context.Context, s *sandbox, w *wanted, out clientnet.Outcome) error {
	settled := slices.Clone(w.known)
	for i, k := range settled {
		settled[i].Switched = k.Switched && slices.ContainsFunc(out.State.Groups, func(g client.Group) bool {
			return g.Egress == k.Name && slices.ContainsFunc(g.Former, func(a netip.Addr) bool { return out.Pinned[out.Links[a]] > 0 })
		})
	}
	if slices.EqualFunc(w.known, settled, sameEgress) || !m.turn(s, w, settled) {
		return nil
	}
	m.loop.Add(podName(s))
	return m.remember(ctx, s, settled)
}

// turn notes other Egresses as those that a sandbox uses, unless another wanted state than w was decided
// meanwhile.
func (m *Manager) turn(s *sandbox, w *wanted, egresses []store.KnownEgress) bool {
	s.deciding.Lock()
	defer s.deciding.Unlock()
	if s.want != nil && s.want != w && len(egresses)+len(s.want.known) > 0 {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s.egresses = egresses
	return true
}

// Which routers are dead is known to the process that asks them, and to the groups that it made: a
// process that starts doesn't give new flows to a router that is listed still, and that the last one found
// dead. One that was draining then, and isn't now, is held to be dead until it has answered.

// recall makes the routers of a client dead that take none of its flows. Without an answer of the kernel
// they count as living, as in a client that is new.
func (m *Manager) recall(ctx context.Context, s *sandbox, c client.Client) {
	if !slices.ContainsFunc(c.Egresses, func(e client.Egress) bool { return e.Direct && len(e.Routers) > 0 }) {
		return
	}
	silent, err := m.net.Silent(ctx, s.Netns, c)
	if err != nil {
		logged(ctx, s).V(2).Info("It isn't known which routers were dead", "reason", err)
	}
	for i, e := range c.Egresses {
		// An object of the cache must not be changed.
		c.Egresses[i].Routers = slices.Clone(e.Routers)
		for j, r := range e.Routers {
			if r.State == client.RouterLive && slices.Contains(silent, r.Addr) && !m.cfg.Health.Answered(e.Name, r.Addr) {
				c.Egresses[i].Routers[j].State = client.RouterDead
			}
		}
	}
}
