package podnet

import (
	"context"
	"errors"
	"fmt"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// Guard makes the host's ruleset what it should be. With Options.SourceGuard pods send from their own
// addresses only: those that the host's routes lead to, so that nothing has to be done for a single
// pod. Clients of Egresses have the guards that GuardClient gave them. Guards of links that are gone
// are removed. The result counts what was missing, not this removal.
func (n *Network) Guard(ctx context.Context) (dataplane.Result, error) {
	n.clients.mu.Lock()
	defer n.clients.mu.Unlock()
	if err := n.recallGuards(ctx); err != nil {
		return dataplane.Result{}, err
	}
	result, err := n.syncGuard(ctx)
	if err != nil {
		return result, err
	}
	forgotten, err := n.forgetGuards(ctx)
	if forgotten {
		_, failed := n.syncGuard(ctx)
		err = errors.Join(err, failed)
	}
	return result, err
}

// CheckGuard says why a pod can send from addresses of others, or why it can't though it may; the link is
// that of the attachment. Nothing is changed. Check doesn't ask this: what is wrong isn't the pod's
// alone, and to attach the pod again wouldn't help.
func (n *Network) CheckGuard(ctx context.Context, p Pod, a Attachment) error {
	if !n.opts.SourceGuard {
		return nil
	}
	l, err := n.handle.LinkByIndex(ctx, a.HostIfIndex)
	if err != nil {
		return fmt.Errorf("link %s: %w", a.HostIfName, err)
	}
	p.learn(l)
	if l.Group != p.group() {
		err = fmt.Errorf("source guard: group of %s is %#x, not %#x", l.Name, l.Group, p.group())
	}
	if p.Unguarded {
		return err
	}
	if missing := n.checkTable(ctx); missing != nil {
		err = errors.Join(err, fmt.Errorf("source guard: the pod can send from any address: %w", missing))
	}
	return err
}

// guards says whether a pod may send from its own addresses only.
func (o Options) guards(p Pod) bool { return o.SourceGuard && !p.Unguarded }

// WatchGuard begins to watch for changes of the rule.
func (n *Network) WatchGuard() (*nft.Watch, error) { return n.guard.Watch() }

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
		switch name, family, _ := dataplane.CutFamily(c.Name); name {
		case ruleset.Forged:
			d.Forged[family] = c.Packets
		case ruleset.PastTunnel:
			d.PastTunnel[family] = c.Packets
		}
	}
	return d, nil
}
