package announce

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/announce"
)

// Rival is another host on a link that says that an address for which this node answers is at it.
type Rival struct {
	netip.Addr
	// Pool is the address's. Link is the name of the link, and MAC the host's address on it.
	Pool, Link, MAC string
}

// ours is what the node answers for: on which links, and the pools of the addresses.
type ours struct {
	spots map[spot]bool
	links map[int]link
	pools map[netip.Addr]string
}

// own says whether a MAC address is this node's: of two links in one network, each hears what the other one says.
func (o *ours) own(mac string) bool {
	for _, l := range o.links {
		if l.mac.String() == mac {
			return true
		}
	}
	return false
}

// publish makes known what the node answers for, to those who hear what others say. It must be called with mu held.
func (k *Keeper) publish(pools map[netip.Addr]string) {
	o := &ours{map[spot]bool{}, map[int]link{}, pools}
	for s := range k.held {
		if l, ok := k.links[s.link]; ok {
			o.links[s.link], o.spots[s] = l, true
		}
	}
	k.ours.Store(o)
	k.awake()
}

func poolsOf(addrs []Address) map[netip.Addr]string {
	pools := map[netip.Addr]string{}
	for _, a := range addrs {
		pools[a.Addr] = a.Pool
	}
	return pools
}

// heard tells of a rival if what a host says on a link is about an address for which the node answers there.
func (k *Keeper) heard(index int, c announce.Claim) {
	o := k.ours.Load()
	mac := c.MAC.String()
	if !o.spots[spot{index, c.Addr}] || o.own(mac) {
		return
	}
	k.rivals.WithLabelValues(dataplane.FamilyOf(c.Addr).String()).Inc()
	k.cfg.Rival(Rival{Addr: c.Addr, Pool: o.pools[c.Addr], Link: o.links[index].name, MAC: mac})
}

// ears are the links on which it is heard what others say, and what ends that.
type ears struct {
	group sync.WaitGroup
	open  map[int]context.CancelFunc
}

// listenAgain is the time after which a link is listened to again on which that failed.
const listenAgain = 10 * time.Second

// listen hears on the links on which the node answers for addresses.
func (k *Keeper) listen(ctx context.Context, e *ears) {
	o := k.ours.Load()
	for index, cancel := range e.open {
		if _, ok := o.links[index]; !ok {
			cancel()
			delete(e.open, index)
		}
	}
	for index, l := range o.links {
		if e.open[index] != nil {
			continue
		}
		within, cancel := context.WithCancel(ctx)
		e.open[index] = cancel
		e.group.Go(func() {
			for {
				err := k.cfg.Watch(within, index, func(c announce.Claim) { k.heard(index, c) })
				if within.Err() != nil {
					return
				}
				klog.FromContext(ctx).Error(err, "It isn't noticed if another host has an address that this node announces", "link", l.name)
				select {
				case <-time.After(listenAgain):
				case <-within.Done():
					return
				}
			}
		})
	}
}
