package egress

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/store"
)

// sandbox is one that Coil is responsible for.
type sandbox struct {
	node.Sandbox

	// deciding is held while the wanted state of the sandbox is decided, and while the node's guard of it changes,
	// never while something is asked in the pod. It may be taken while work is held. It guards the next eight.
	deciding sync.Mutex
	want     *wanted                // nil as long as nothing was decided
	guard    *dataplane.ClientGuard // the guard that the node is to have; nil as long as that isn't known
	former   *dataplane.ClientGuard // the node's guard when this process began, as long as that matters
	wide     *time.Timer            // narrows the guard; nil if nothing waits for that
	given    bool                   // the node has the guard that it is to have
	recalled bool                   // the Egresses of a former process are known, or there was none
	told     map[string]bool        // Events that hold
	// asked are the API server's answers about Egresses that the cache didn't have.
	asked map[types.NamespacedName]said

	// work is held while the namespace is worked on; it guards the next four.
	work   *semaphore.Weighted
	done   *client.State // the state that this process made last
	failed error         // why the state that was wanted last isn't there
	router bool          // its parameters were set by this process
	looked bool          // this process has looked for objects of a former one
	// The rest is guarded by Manager.mu.

	// egresses are the Egresses that it uses, as they were when they were last there.
	egresses []store.KnownEgress
	// recorded says that there is a record, of these Egresses.
	recorded bool
	record   []store.KnownEgress
	// end cancels the current or last work on the sandbox; nil if there was none. leaving says that no other work begins.
	end     context.CancelFunc
	leaving bool
	// restored says that a former process may have made it.
	restored bool
	// tunnels and pinned are how many tunnels it should have, and how many flows are pinned.
	tunnels, pinned int
}

func newSandbox(at node.Sandbox) *sandbox {
	return &sandbox{Sandbox: at, work: semaphore.NewWeighted(1), recalled: true, asked: map[types.NamespacedName]said{}}
}

// decide does something with deciding held.
func (s *sandbox) decide(f func() error) error {
	s.deciding.Lock()
	defer s.deciding.Unlock()
	return f()
}

// lock waits for the sandbox's work until ctx ends.
func (s *sandbox) lock(ctx context.Context) error {
	if err := s.work.Acquire(ctx, 1); err != nil {
		return fmt.Errorf("%w: the pod's network namespace is worked on: %w", node.ErrUnavailable, err)
	}
	return nil
}

// enter returns the sandbox of an attachment with its work held. It is a new one if the attachment has another network
// namespace or pod by now, or if a DEL has ended meanwhile.
func (m *Manager) enter(ctx context.Context, at node.Sandbox) (*sandbox, error) {
	for {
		m.mu.Lock()
		s := m.known[at.ID]
		if s != nil && s.Sandbox == at {
			s.leaving = false // its DEL has given up
		} else {
			old := s
			s = newSandbox(at)
			if old != nil {
				s.recorded, s.record = old.recorded, old.record // until it is recorded anew
				m.cfg.Health.Forget(at.ID)
			}
			m.known[at.ID] = s
		}
		m.mu.Unlock()
		if err := s.lock(ctx); err != nil {
			return nil, err
		}
		if _, current := m.lastOf(s); current {
			return s, nil
		}
		s.work.Release(1)
	}
}

// lastOf returns the Egresses that a sandbox uses, as they were known last, and whether the sandbox is the
// one that is known by its ID.
func (m *Manager) lastOf(s *sandbox) (last []store.KnownEgress, current bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return s.egresses, m.known[s.ID] == s
}

// sandboxOf returns the sandbox of an attachment, or nil if it isn't known.
func (m *Manager) sandboxOf(id attachment.ID) *sandbox {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.known[id]
}

// affected returns the sandboxes that a change concerns.
func (m *Manager) affected(concerns func(*sandbox) bool) (all []*sandbox) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.known {
		if concerns(s) {
			all = append(all, s)
		}
	}
	return all
}

// each does work on sandboxes. It goes on after a failure.
func each(all []*sandbox, work func(*sandbox) error) error {
	var errs []error
	for _, s := range all {
		if err := work(s); err != nil {
			errs = append(errs, fmt.Errorf("sandbox %s of pod %s: %w", s.ContainerID, podName(s), err))
		}
	}
	return errors.Join(errs...)
}

// Forget ends the responsibility for a sandbox: there was a DEL.
func (m *Manager) Forget(ctx context.Context, id attachment.ID) error {
	s := m.sandboxOf(id)
	if s == nil {
		return nil
	}
	return m.forget(ctx, s)
}

// forget ends the work that is done on a sandbox, and forgets it.
func (m *Manager) forget(ctx context.Context, s *sandbox) error {
	m.mu.Lock()
	s.leaving = true
	if s.end != nil {
		s.end()
	}
	m.mu.Unlock()
	if err := s.lock(ctx); err != nil {
		return err
	}
	defer s.work.Release(1)
	return m.drop(ctx, s)
}

// drop forgets a sandbox, whose work is held.
func (m *Manager) drop(ctx context.Context, s *sandbox) error {
	m.mu.Lock()
	recorded := s.recorded
	if m.known[s.ID] == s {
		delete(m.known, s.ID)
		m.cfg.Health.Forget(s.ID)
	}
	m.mu.Unlock()
	s.deciding.Lock()
	s.stopTimer()
	s.deciding.Unlock()
	if !recorded {
		return nil
	}
	return m.record.ForgetClients(ctx, s.ID)
}

// Sweep forgets the sandboxes whose network namespace is gone: their DEL never came.
func (m *Manager) Sweep(ctx context.Context) error {
	m.mu.Lock()
	all := slices.Collect(maps.Values(m.known))
	maps.DeleteFunc(m.departed, func(egress string, _ map[netip.Addr]time.Time) bool {
		return !slices.ContainsFunc(all, usesEgress(egress))
	})
	m.mu.Unlock()
	return each(all, func(s *sandbox) error {
		exists, err := m.net.Exists(s.Netns)
		if err != nil || exists {
			return err
		}
		return m.forget(ctx, s)
	})
}
