package cloudaddress

import (
	"context"
	"fmt"
	"iter"
	"net/netip"

	"go4.org/netipx"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/openstack"
)

// tries is how many other pairs of addresses are asked for in one pass.
const tries = 4

// begun is a claim whose port has one address of a pair, while somebody has the other one.
type begun struct {
	claim     *v2.AddressClaim
	pool      *v2.AddressPool
	addresses ipam.Pool // of the pool
	seen      openstack.Address
	want      openstack.Want
	taken     error // says in the cloud's words that somebody has the other address
}

// another gives the port of a claim another pair of addresses, and returns what ensure does. One call replaces the addresses of the port: it has those of
// before, or the other pair. So it may end at any time; it goes on after the pair that was asked for last.
//
// The pairs are of the pool, the cloud would choose their IPv4 addresses, and neither ports nor other claims have one of their addresses.
func (c *Controller) another(ctx context.Context, k *cloud, b begun) (openstack.Address, ipam.Address, error) {
	// Nobody may have been told of what the port has. The cache may be late.
	live, err := c.cfg.Coil.CoilV2().AddressClaims(b.claim.Namespace).Get(ctx, b.claim.Name, metav1.GetOptions{})
	if err != nil {
		return b.seen, ipam.Address{}, fmt.Errorf("read whether AddressClaim %s has an address: %w", klog.KObj(b.claim), err)
	}
	if live.UID != b.claim.UID || live.DeletionTimestamp != nil || len(namedBy(live)) > 0 {
		return b.seen, ipam.Address{}, b.taken
	}
	room, err := k.Room(ctx)
	if err != nil {
		return b.seen, ipam.Address{}, err
	}
	free, used, err := c.free(b.pool, b.claim, room)
	if err != nil {
		return b.seen, ipam.Address{}, fmt.Errorf("find a pair of addresses of AddressPool %s: %w", b.pool.Name, err)
	}
	asked := 0
	for pair := range pairsAfter(b.addresses, free, used, k.last(b.claim.Name, b.want.Addresses[0])) {
		if asked++; asked > tries {
			break
		}
		k.try(b.claim.Name, pair.IPv4)
		want := b.want
		want.Addresses, want.Replace = pair.Addrs(), true
		got, err := k.Ensure(ctx, b.seen, want)
		if got.PortID != "" {
			b.seen = got
		}
		if err == nil {
			klog.FromContext(ctx).Info("OpenStack gave another pair of addresses", "claim", klog.KObj(b.claim), "addresses", pair, "since", b.taken.Error())
		}
		if !openstack.IsTaken(err) {
			return b.seen, pair, err
		}
	}
	if asked > 0 {
		return b.seen, ipam.Address{}, b.taken // the same words each time: a status that changes leads here at once
	}
	return b.seen, ipam.Address{}, wrong(string(openstack.AddressesExhausted), "No pair of addresses of AddressPool %s is free in OpenStack: %v", b.pool.Name, b.taken)
}

// free are the IPv4 addresses of a pool that the cloud may choose, and used those of both families that ports or other claims have: the port of a claim may
// be gone for the moment.
func (c *Controller) free(pool *v2.AddressPool, a *v2.AddressClaim, room openstack.Room) (free, used *netipx.IPSet, err error) {
	var all, of, taken netipx.IPSetBuilder
	taken.AddSet(room.Taken)
	for _, other := range c.claims.In(c.cfg.Namespace) {
		if p := c.pools.Find(other.Spec.Pool); other.Name != a.Name && p != nil && p.Spec.OpenStack != nil && sameSubnets(*p.Spec.OpenStack, *pool.Spec.OpenStack) {
			for _, addr := range namedBy(other) {
				taken.Add(addr)
			}
		}
	}
	if used, err = taken.IPSet(); err != nil {
		return nil, nil, err
	}
	for _, s := range pool.Spec.Subnets {
		for _, p := range ipam.Prefixes(s.IPv4) {
			of.AddPrefix(p)
		}
	}
	ours, err := of.IPSet()
	if err != nil {
		return nil, nil, err
	}
	all.AddSet(room.Given)
	all.RemoveSet(used)
	all.Intersect(ours)
	free, err = all.IPSet()
	return free, used, err
}

func sameSubnets(a, b v2.PoolOpenStack) bool {
	return a.Cloud == b.Cloud && equality.Semantic.DeepEqual(a.SubnetIDs, b.SubnetIDs)
}

// pairsAfter yields the pairs of a pool that it doesn't exclude, whose IPv4 address is free and whose IPv6 address isn't used: those after an address, then those before it.
func pairsAfter(addresses ipam.Pool, free, used *netipx.IPSet, after netip.Addr) iter.Seq[ipam.Address] {
	return func(yield func(ipam.Address) bool) {
		for _, later := range []bool{true, false} {
			for _, r := range free.Ranges() {
				for addr := r.From(); addr.IsValid() && addr.Compare(r.To()) <= 0; addr = addr.Next() {
					if after.Less(addr) != later {
						continue
					}
					index, ok := addresses.Containing(addr)
					if !ok || addresses.Excluded(index) {
						continue
					}
					b, err := addresses.Block(index)
					if err != nil {
						continue
					}
					if pair := b.At(0); !used.Contains(pair.IPv6) && !yield(pair) {
						return
					}
				}
			}
		}
	}
}
