package egress

import (
	"context"
	"errors"
	"time"

	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/client"
)

// The node's guard of a client changes in three steps. First, all is allowed that was allowed or is to be. Then the client
// changes. Then the rest is forbidden. The last step comes in time, whatever a program in the pod does and whether the
// client can be changed or not. A destination that it forbids too early is unreachable for a moment.

// widest is how long the node's guard stays wide while a client changes.
const widest = 5 * time.Second

// aim makes w the goal of a sandbox, and widens the node's guard to it. It must be called with deciding held.
func (m *Manager) aim(ctx context.Context, s *sandbox, w *wanted) error {
	c := m.client(s, w)
	if !w.planned {
		state := client.StateOf(c)
		w.own, w.conflicts, w.planned = state.Guard(), state.Conflicts, true
	}
	s.want = w
	if len(w.known) > 0 {
		// EgressChanged concerns the pod from now on, whatever the disk does.
		m.mu.Lock()
		s.egresses = w.known
		m.mu.Unlock()
	}
	var from dataplane.ClientGuard
	if s.guard != nil {
		from = *s.guard
	} else {
		var err error
		if from, err = m.net.Guard(ctx, s.Netns, c); err != nil {
			return here(err)
		}
	}
	to, err := s.keeping(w, from)
	if err != nil {
		return err
	}
	w.guard = to
	if s.guard != nil && from.Equal(to) {
		if s.wide != nil {
			return nil
		}
		return m.give(ctx, s, c, to)
	}
	// Destinations that were to be forbidden already are forbidden now: repeated changes of an Egress keep nothing
	// open.
	wide, err := client.WidenGuard(from, to)
	if err != nil {
		return err
	}
	s.guard = &to
	m.narrowLater(ctx, s)
	return m.give(ctx, s, c, wide)
}

// give gives a client a guard. It must be called with deciding held.
func (m *Manager) give(ctx context.Context, s *sandbox, c client.Client, g dataplane.ClientGuard) error {
	err := here(m.net.SetGuard(ctx, s.Netns, c, g))
	s.given = err == nil && g.Equal(*s.guard)
	return err
}

// keeping returns the guard that a client is to have: the guard for its Egresses. A former process may have closed more.
// The guard that the client had when this process began is joined to it then, until it is known where all packets of the
// client go. The pod isn't asked: a program there may have changed what it tells.
func (s *sandbox) keeping(w *wanted, from dataplane.ClientGuard) (dataplane.ClientGuard, error) {
	switch {
	case len(w.unknown) == 0:
		s.former = nil
	case s.former == nil && (w.lost || s.restored && s.guard == nil): // records are written later than guards
		s.former = &from
	}
	if s.former == nil {
		return w.own, nil
	}
	return client.NarrowGuard(*s.former, w.own)
}

// here leaves out the error that a network namespace is gone: the work on the sandbox forgets it.
func here(err error) error {
	if errors.Is(err, clientnet.ErrGone) {
		return nil
	}
	return err
}

// narrowLater must be called with deciding held.
func (m *Manager) narrowLater(ctx context.Context, s *sandbox) {
	s.stopTimer()
	var timer *time.Timer
	timer = time.AfterFunc(widest, func() {
		s.deciding.Lock()
		defer s.deciding.Unlock()
		if _, current := m.lastOf(s); current && s.wide == timer && m.narrow(ctx, s) != nil {
			m.loop.Add(podName(s)) // which tries again
		}
	})
	s.wide = timer
}

// stopTimer must be called with deciding held.
func (s *sandbox) stopTimer() {
	if s.wide != nil {
		s.wide.Stop()
		s.wide = nil
	}
}

// narrow must be called with deciding held. It doesn't end with coild, whose successor takes the kernel's guard for
// the wanted one at first.
func (m *Manager) narrow(ctx context.Context, s *sandbox) error {
	s.stopTimer()
	if s.given {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return m.give(ctx, s, m.client(s, s.want), *s.guard)
}

// narrowTo narrows the guard of a sandbox when the work on it has ended, well or not.
func (m *Manager) narrowTo(ctx context.Context, s *sandbox, w *wanted) error {
	return s.decide(func() error {
		if s.guard == nil || !s.guard.Equal(w.guard) {
			return nil // something else was decided meanwhile
		}
		return m.narrow(ctx, s)
	})
}

// narrowAll narrows all wide guards when coild ends.
func (m *Manager) narrowAll(ctx context.Context) error {
	all := m.affected(func(*sandbox) bool { return true })
	return each(all, func(s *sandbox) error {
		return s.decide(func() error {
			if s.wide == nil {
				return nil
			}
			return m.narrow(ctx, s)
		})
	})
}
