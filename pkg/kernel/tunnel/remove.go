package tunnel

import (
	"context"
	"errors"
	"fmt"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// RemoveReceivers removes what EnsureReceivers makes; none is no error.
func RemoveReceivers(ctx context.Context, h *rtnl.Handle) error {
	var errs []error
	for f, name := range receivers {
		l, err := h.LinkByName(ctx, name)
		if err == nil {
			err = h.Do(ctx, rtnl.DelLink(l.Index))
		}
		if err != nil && !errors.Is(err, rtnl.ErrNotExist) {
			errs = append(errs, fmt.Errorf("receiver of %s: %w", f, err))
		}
	}
	return errors.Join(errs...)
}
