package podnet

import (
	"context"
	"errors"
	"fmt"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
)

// Guard makes the rule of nftables by which pods send from their own addresses only, or removes it
// without Options.SourceGuard. A pod's addresses are those that its routes lead to, so that nothing
// has to be done for a single pod.
func (n *Network) Guard(ctx context.Context) (dataplane.Result, error) {
	res, err := n.guard.Sync(ctx, n.hostRules())
	if err != nil {
		return res, fmt.Errorf("guard the sources of pods' packets: %w", err)
	}
	return res, nil
}

func (n *Network) hostRules() dataplane.HostRules {
	return dataplane.HostRules{SourceGuard: n.opts.SourceGuard}
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
	if missing := n.guard.Check(ctx, n.hostRules()); missing != nil {
		err = errors.Join(err, fmt.Errorf("source guard: the pod can send from any address: %w", missing))
	}
	return err
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
