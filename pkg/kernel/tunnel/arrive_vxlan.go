//go:build coil_vxlan

package tunnel

import (
	"context"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// arrive lets packets arrive by a new tunnel.
func (s *Syncer) arrive(ctx context.Context, index int) error {
	requests, err := rtnl.AcceptAll(index)
	if err != nil {
		return err
	}
	return s.handle.Do(ctx, requests...)
}
