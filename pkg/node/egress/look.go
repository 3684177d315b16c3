package egress

import (
	"context"
	"errors"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// Look says what a sandbox uses Egresses for, and in which ways it isn't as it was made, for people. It is nil for one that uses none. Nothing is changed.
func (m *Manager) Look(ctx context.Context, id attachment.ID) (*inspection.Client, []inspection.Comparison) {
	s := m.sandboxOf(id)
	if s == nil {
		return nil, nil
	}
	last, current := m.lastOf(s)
	if !current {
		return nil, nil
	}
	made := inspection.Comparison{Topic: inspection.Tunnels, Object: "network of the client", Want: "as coild made it", Have: "as coild made it", OK: true}
	if err := m.Check(ctx, id); err != nil {
		if ctx.Err() != nil {
			made.Unknown = err.Error()
		}
		made.OK, made.Have = false, err.Error()
	}
	if len(last) == 0 {
		if made.OK {
			return nil, nil
		}
		return nil, []inspection.Comparison{made}
	}
	c := &inspection.Client{}
	for _, e := range last {
		c.Egresses = append(c.Egresses, inspection.UsedEgress{Name: e.Name, Policy: e.Policy, Destinations: len(e.Destinations), Former: e.Former})
	}
	if err := s.lock(ctx); err != nil {
		c.Trouble = err.Error()
		return c, []inspection.Comparison{made}
	}
	defer s.work.Release(1)
	if s.failed != nil && !errors.Is(s.failed, context.Canceled) {
		c.Trouble = s.failed.Error()
	}
	if s.done != nil {
		for _, t := range s.done.Tunnels {
			c.Tunnels = append(c.Tunnels, t.String())
		}
	}
	return c, []inspection.Comparison{made}
}
