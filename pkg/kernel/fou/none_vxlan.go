//go:build coil_vxlan

package fou

import (
	"context"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Ensure does nothing: tunnels of VXLAN open their ports themselves.
func Ensure(context.Context, *netns.NS, uint16, ...dataplane.Family) error { return nil }

// Check does nothing.
func Check(context.Context, *netns.NS, uint16, ...dataplane.Family) error { return nil }

// Remove does nothing.
func Remove(context.Context, *netns.NS, uint16) error { return nil }
