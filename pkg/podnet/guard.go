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

// guards says whether a pod may send from its own addresses only.
func (o Options) guards(p Pod) bool { return o.SourceGuard && !p.Unguarded }

// WatchGuard begins to watch for changes of the rule.
func (n *Network) WatchGuard() (*nft.Watch, error) { return nft.NewWatch(n.host) }

// Dropped returns how many packets of pods were dropped, as their sources weren't the pods', since
// the rule was made; nothing without it.
func (n *Network) Dropped(ctx context.Context) (map[dataplane.Family]uint64, error) {
	counters, err := n.guard.Counters(ctx)
	if err != nil {
		return nil, err
	}
	dropped := map[dataplane.Family]uint64{}
	for _, c := range counters {
		if c.Name == nft.Forged {
			dropped[c.Family] = c.Packets
		}
	}
	return dropped, nil
}
