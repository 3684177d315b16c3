package egress

import (
	"context"
	"errors"
	"fmt"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/node"
)

// Check returns an error if a sandbox isn't as it was made last. Nothing is changed. A change
// of the API's objects that isn't carried out yet is none.
func (m *Manager) Check(ctx context.Context, id attachment.ID) error {
	s := m.sandboxOf(id)
	if s == nil {
		return nil
	}
	err := s.lock(ctx)
	if err != nil {
		return fmt.Errorf("egress: %w", err)
	}
	defer s.work.Release(1)
	last, current := m.lastOf(s)
	switch {
	case !current:
	case s.router:
		err = m.net.CheckRouter(ctx, s.Netns, s.IfName)
	case len(last) == 0:
	case s.failed != nil:
		err = s.failed
	case s.done == nil:
		err = fmt.Errorf("%w: coild has started and not looked at the pod yet", node.ErrUnavailable)
	default:
		err = errors.Join(m.net.Check(ctx, s.Netns, m.client(s, &wanted{}), *s.done), m.checkGuard(ctx, s))
	}
	if err != nil {
		return fmt.Errorf("egress: %w", err)
	}
	return nil
}

// checkGuard returns an error if the node's guard isn't that of the client as it was made, unless another guard is wanted by now.
func (m *Manager) checkGuard(ctx context.Context, s *sandbox) error {
	return s.decide(func() error {
		if s.guard == nil {
			return clientnet.ErrUnguarded
		}
		made := s.done.Guard()
		if s.wide != nil || !s.guard.Equal(made) {
			return nil
		}
		return m.net.CheckGuard(ctx, s.Netns, m.client(s, s.want), made)
	})
}
