package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Check says which of the wanted tunnels, and of the receivers of their families, isn't as
// Sync and EnsureReceivers make it, and returns the links of the tunnels that there are.
// Nothing is changed.
func Check(ctx context.Context, h *rtnl.Handle, want []dataplane.Tunnel) (map[netip.Addr]Link, error) {
	links := make(map[netip.Addr]Link, len(want))
	var errs []error
	for _, f := range families {
		have, err := h.Tunnels(ctx, f)
		if err != nil {
			errs = append(errs, fmt.Errorf("list tunnels: %w", err))
			continue
		}
		byEnds := make(map[ends]rtnl.Tunnel, len(have))
		received := false
		for _, t := range have {
			if t.Receiver {
				received = t.Name == receivers[f] && t.Up
			} else {
				byEnds[endsOf(t.Spec)] = t
			}
		}
		needed := false
		for _, w := range want {
			if dataplane.FamilyOf(w.Remote) != f {
				continue
			}
			needed = true
			t, exists := byEnds[endsOf(w)]
			if exists {
				links[w.Remote] = Link{Index: t.Index, Name: t.Name, Alias: t.Alias}
			}
			switch {
			case !exists:
				errs = append(errs, fmt.Errorf("tunnel %s is missing", w))
			case !t.Up:
				errs = append(errs, fmt.Errorf("tunnel %s is down: link %s", w, t.Name))
			case !t.Exact || t.Spec != w:
				errs = append(errs, fmt.Errorf("tunnel %s is changed: link %s is %s", w, t.Name, t.Spec))
			}
		}
		if needed && !received {
			errs = append(errs, fmt.Errorf("receiver %s is missing or down", receivers[f]))
		}
	}
	return links, errors.Join(errs...)
}
