package announce

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/kernel/announce"
)

// Run repeats announcements, and hears those of others, until ctx ends.
func (k *Keeper) Run(ctx context.Context) error {
	ears := &ears{open: map[int]context.CancelFunc{}}
	defer ears.group.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for {
		k.listen(ctx, ears)
		k.mu.Lock()
		next := k.turns.next()
		k.mu.Unlock()
		var due <-chan time.Time
		if !next.IsZero() {
			due = time.After(time.Until(next))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-k.wake:
		case <-due:
			k.mu.Lock()
			k.send(ctx, k.turns.due(time.Now()))
			k.mu.Unlock()
		}
	}
}

// tell announces new spots now and later, and found ones once.
func (k *Keeper) tell(ctx context.Context, fresh, found []spot) {
	k.send(ctx, append(found, fresh...))
	if len(fresh) == 0 {
		return
	}
	k.turns.add(time.Now(), fresh)
	k.awake()
}

func (k *Keeper) awake() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// Repeat announces addresses once again, if the node answers for them.
func (k *Keeper) Repeat(ctx context.Context, addrs ...netip.Addr) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var spots []spot
	for s := range k.held {
		if slices.Contains(addrs, s.addr) {
			spots = append(spots, s)
		}
	}
	k.send(ctx, spots)
}

// send announces those of the spots that have entries.
func (k *Keeper) send(ctx context.Context, spots []spot) {
	var all []announce.Announcement
	for _, s := range spots {
		l, there := k.links[s.link]
		if _, held := k.held[s]; held && there {
			all = append(all, announce.Announcement{Link: s.link, MAC: l.mac, Addr: s.addr})
		}
	}
	if len(all) == 0 {
		return
	}
	if err := k.cfg.Send(all); err != nil {
		klog.FromContext(ctx).Error(err, "Some addresses couldn't be announced to neighbours")
	}
}

// warn tells, once for each pool, of addresses that can't be announced.
func (k *Keeper) warn(homeless []Address) {
	now := map[string]bool{}
	for _, a := range homeless {
		if !now[a.Pool] && !k.told[a.Pool] {
			k.cfg.Warn("NoLinkForAddress", "AddressPool %s says announce: Neighbor, but its address %s is in the subnet of no link of this node, "+
				"so that no neighbour learns where it is: give a link that is up an address of that subnet, keep pods of the pool off this node, "+
				"or set spec.announce of the pool to Route and let a routing daemon announce it", a.Pool, a.Addr)
		}
		now[a.Pool] = true
	}
	k.told = now
}
