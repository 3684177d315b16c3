//go:build coil_vxlan

package tunnel

import (
	"context"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// arrive lets packets arrive by a tunnel, before it comes up.
func (s *Syncer) arrive(ctx context.Context, index int) error {
	requests, err := rtnl.AcceptAll(index)
	if err != nil {
		return err
	}
	_, err = s.handle.Apply(ctx, rtnl.ErrExist, requests...)
	return err
}
