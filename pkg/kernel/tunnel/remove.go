package tunnel

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// RemoveReceivers removes what EnsureReceivers makes, but for some families; none is no error.
func (s *Syncer) RemoveReceivers(ctx context.Context, keep ...dataplane.Family) error {
	var errs []error
	for f, name := range receivers {
		if slices.Contains(keep, f) {
			continue
		}
		l, err := s.handle.LinkByName(ctx, name)
		if err == nil {
			err = s.handle.Do(ctx, rtnl.DelLink(l.Index))
		}
		if err != nil && !errors.Is(err, rtnl.ErrNotExist) {
			errs = append(errs, fmt.Errorf("receiver of %s: %w", f, err))
		}
	}
	return errors.Join(errs...)
}
