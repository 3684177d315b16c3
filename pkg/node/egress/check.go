package egress

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/store"
)

// Check says what of a sandbox isn't as it was made last. Nothing is changed. What the API
// server wants by now, and isn't made yet, isn't missing.
func (m *Manager) Check(ctx context.Context, id store.ID) error {
	m.mu.Lock()
	s := m.known[id]
	m.mu.Unlock()
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

// checkGuard says whether the node's guard is that of what was made, unless another one is wanted by now.
func (m *Manager) checkGuard(ctx context.Context, s *sandbox) error {
	return s.decide(func() error {
		if s.guard == nil {
			return ErrUnguarded
		}
		made := s.done.ClientGuard()
		if s.wide != nil || !s.guard.Equal(made) {
			return nil
		}
		return m.net.CheckGuard(ctx, s.Netns, m.client(s, s.want), made)
	})
}

// Check implements Network. What there is beside what was made isn't looked at.
func (k *Kernel) Check(ctx context.Context, at store.Netns, c plan.Client, made plan.ClientState) error {
	return k.inside(ctx, at, func(in client) error { return in.check(ctx, c, made) })
}

func (in client) check(ctx context.Context, c plan.Client, made plan.ClientState) error {
	links, err := in.tunnels.Check(ctx, in.ns, in.handle, c.Port, made.Tunnels)
	errs := []error{err}
	indexes := map[netip.Addr]int{}
	var accepting group
	for peer, l := range links {
		indexes[peer] = l.Index
		accepting = append(accepting, accept(l.Name))
	}
	rules, err := in.rules.Missing(ctx, made.Rules)
	errs = append(errs, err)
	for _, r := range rules {
		errs = append(errs, fmt.Errorf("rule %s is missing", r))
	}
	sinks, err := in.sinks(ctx, made.Sinks()...)
	errs = append(errs, err)
	// The routes into a tunnel that is missing went with it.
	routes, err := in.routes.Missing(ctx, made.By(indexes, sinks))
	errs = append(errs, err)
	for _, r := range routes {
		errs = append(errs, fmt.Errorf("route %s is missing", r))
	}
	errs = append(errs, in.checkGroups(ctx, made, indexes))
	if made.Filter != nil {
		errs = append(errs, in.filters.Check(ctx, in.ns, *made.Filter))
	}
	_, err = in.linked(ctx, c)
	errs = append(errs, err)
	return errors.Join(append(errs, compare(in.ns, append(settingsOf(c.Link, spreadOf(made)), accepting)...))...)
}

// CheckRouter implements Network.
func (k *Kernel) CheckRouter(ctx context.Context, at store.Netns, link string) error {
	return visit(ctx, at, func(ns *netns.NS) error { return compare(ns, routerSettings(link)...) })
}

// compare says which parameters have another value; those that set leaves out may.
func compare(ns *netns.NS, groups ...group) error {
	var errs []error
	for _, g := range groups {
		for _, s := range g {
			value, err := sysctl.Get(ns, s.Key)
			switch {
			case errors.Is(err, sysctl.ErrNotExist):
			case err != nil:
				errs = append(errs, err)
			case value != s.Value:
				errs = append(errs, fmt.Errorf("kernel parameter %s is %s, not %s", s.Key, value, s.Value))
			}
		}
	}
	return errors.Join(errs...)
}
