package podnet

import (
	"context"
	"fmt"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
)

// Guard makes the rule of nftables by which pods send from their own addresses only, or removes it
// without Options.SourceGuard. A pod's addresses are those that its routes lead to, so that nothing
// has to be done for a single pod.
func (n *Network) Guard(ctx context.Context) (dataplane.Result, error) {
	res, err := n.guard.Sync(ctx, dataplane.HostRules{SourceGuard: n.opts.SourceGuard})
	if err != nil {
		return res, fmt.Errorf("guard the sources of pods' packets: %w", err)
	}
	return res, nil
}

// WatchGuard begins to watch for changes of the rule.
func (n *Network) WatchGuard() (*nft.Watch, error) { return nft.NewWatch(n.host) }

// GuardTouched says whether anybody may have changed the rule since Guard made it.
func (n *Network) GuardTouched(ctx context.Context) (bool, error) { return n.guard.Touched(ctx) }

// Dropped returns how many packets of pods were dropped, as their sources weren't the pods'.
func (n *Network) Dropped() (map[dataplane.Family]uint64, error) { return n.guard.Dropped() }
