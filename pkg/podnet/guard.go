package podnet

import (
	"context"
	"errors"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
)

// Guard makes the host's ruleset what it should be. With Options.SourceGuard pods send from their own
// addresses only: those that the host's routes lead to, so that nothing has to be done for a single
// pod. Clients of Egresses have the guards that GuardClient gave them.
func (n *Network) Guard(ctx context.Context) (dataplane.Result, error) {
	n.clients.mu.Lock()
	defer n.clients.mu.Unlock()
	if err := errors.Join(n.recallGuards(ctx), n.forgetGuards(ctx)); err != nil {
		return dataplane.Result{}, err
	}
	return n.syncGuard(ctx)
}

// guards says whether a pod may send from its own addresses only.
func (o Options) guards(p Pod) bool { return o.SourceGuard && !p.Unguarded }

// WatchGuard begins to watch for changes of the rule.
func (n *Network) WatchGuard() (*nft.Watch, error) { return nft.NewWatch(n.host) }

// Dropped are packets of pods that the host's ruleset dropped since it was made, by family.
type Dropped struct {
	// Forged had sources that weren't the pods', PastTunnel were for destinations of Egresses.
	Forged, PastTunnel map[dataplane.Family]uint64
}

// Dropped returns how many packets were dropped; nothing without rules.
func (n *Network) Dropped(ctx context.Context) (Dropped, error) {
	d := Dropped{Forged: map[dataplane.Family]uint64{}, PastTunnel: map[dataplane.Family]uint64{}}
	counters, err := n.guard.Counters(ctx)
	if err != nil {
		return d, err
	}
	for _, c := range counters {
		switch c.Name {
		case nft.Forged:
			d.Forged[c.Family] = c.Packets
		case nft.PastTunnel:
			d.PastTunnel[c.Family] = c.Packets
		}
	}
	return d, nil
}
