package nexthop

import (
	"context"
	"errors"
	"fmt"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Groups returns the groups that the Syncer owns.
func (s *Syncer) Groups(ctx context.Context) ([]dataplane.NexthopGroup, error) {
	all, err := s.handle.Nexthops(ctx, s.protocol)
	if err != nil {
		return nil, fmt.Errorf("read nexthops: %w", err)
	}
	var groups []dataplane.NexthopGroup
	for _, n := range all {
		if n.ID >= dataplane.FirstNexthop && len(n.Group.Members) > 0 {
			groups = append(groups, n.Group)
		}
	}
	return groups, nil
}

// Check says which of the wanted objects aren't as Ensure makes them. Nothing is changed.
func (s *Syncer) Check(ctx context.Context, want Set) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	all, err := s.handle.Nexthops(ctx, 0)
	if err != nil {
		return fmt.Errorf("read nexthops: %w", err)
	}
	compare(want, all, s.protocol, func(r rtnl.Request, exists bool, err error) {
		switch {
		case err != nil:
			errs = append(errs, err)
		case exists:
			errs = append(errs, fmt.Errorf("%s is needed: what has its ID differs", r))
		default:
			errs = append(errs, fmt.Errorf("%s is needed: there is none", r))
		}
	})
	return errors.Join(errs...)
}
