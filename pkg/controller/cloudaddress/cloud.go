package cloudaddress

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/openstack"
	"github.com/coil-net/coil/pkg/reconcile"
)

// A cloud that fails is left alone for the first time, then twice as long each time, up to the second.
const (
	firstPause   = time.Second
	longestPause = time.Minute
)

// cloud is that of a pool, with what is known of it. It is safe for concurrent use.
type cloud struct {
	Cloud
	spec v2.PoolOpenStack

	mu sync.Mutex
	// seen are the addresses that there are, by key. It is nil before the first list.
	seen map[string]openstack.Address
	// pairs are the address pairs that gateways have, by their ports. What isn't known isn't there.
	pairs map[string]pairs
	// tried are the IPv4 addresses of the pairs that claims have asked for last, by name. They only spare calls.
	tried map[string]netip.Addr
	// err is why the cloud doesn't answer, nil if it does. Until then it is left alone.
	err   error
	until time.Time
	pause time.Duration
}

// cloudOf returns the cloud of a pool, nil if it has none. A pool that is gone has the one that it had.
func (c *Controller) cloudOf(ctx context.Context, name string) (*cloud, error) {
	pool := c.pools.Find(name)
	c.mu.Lock()
	k := c.clouds[name]
	c.mu.Unlock()
	switch {
	case pool == nil:
		return k, nil
	case pool.Spec.OpenStack == nil:
		return nil, nil
	case k.isOf(*pool.Spec.OpenStack):
		return k, nil
	}
	opened, err := c.cfg.Open(ctx, *pool.Spec.OpenStack)
	if err != nil {
		return nil, fmt.Errorf("open the cloud of AddressPool %s: %w", name, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if k = c.clouds[name]; !k.isOf(*pool.Spec.OpenStack) { // nobody else has opened it meanwhile
		k = &cloud{Cloud: opened, spec: *pool.Spec.OpenStack, pairs: map[string]pairs{}, tried: map[string]netip.Addr{}}
		c.clouds[name] = k
	}
	return k, nil
}

// isOf says whether a cloud is the one that a pool names.
func (k *cloud) isOf(spec v2.PoolOpenStack) bool {
	return k != nil && equality.Semantic.DeepEqual(k.spec, spec)
}

// list lists the cloud of a pool, has what others have changed repaired, and sweeps.
func (c *Controller) list(ctx context.Context, pool string) error {
	k, err := c.cloudOf(ctx, pool)
	if k == nil || err != nil {
		return err
	}
	if rest, _ := k.resting(); rest > 0 {
		return reconcile.Later(rest)
	}
	all, err := k.List(ctx)
	if err != nil {
		k.failed(err)
		c.look(pool)
		rest, _ := k.resting()
		return reconcile.Retry(fmt.Errorf("list the addresses of AddressPool %s in OpenStack: %w", pool, err), rest)
	}
	k.listed(all)
	c.look(pool)
	c.pairs.Add(pool)
	deleted, err := k.Sweep(ctx, c.keep(k))
	for _, o := range deleted {
		klog.FromContext(ctx).Info("Deleted an object of OpenStack that no AddressClaim has", "pool", pool, "object", o.String(), "addresses", o.Addresses)
	}
	if err != nil {
		return reconcile.Retry(fmt.Errorf("sweep OpenStack for AddressPool %s: %w", pool, err), c.cfg.Resync)
	}
	return reconcile.Later(c.cfg.Resync)
}

// keep are the keys of all claims, whatever their pools are: these may be of one project.
func (c *Controller) keep(k *cloud) map[string]bool {
	keep := map[string]bool{}
	for _, a := range c.claims.In(c.cfg.Namespace) {
		keep[a.Name] = true
		keep[c.keyOf(k, a)] = true
	}
	return keep
}

// keyOf is the key of a claim's address: the name of the claim. The address of a claim that was lost has the key of that one still: the claim that comes in its place takes it.
func (c *Controller) keyOf(k *cloud, a *v2.AddressClaim) string {
	named := namedBy(a)
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, ok := k.seen[a.Name]; ok || len(named) == 0 {
		return a.Name
	}
	for _, key := range slices.Sorted(maps.Keys(k.seen)) {
		if slices.Contains(k.seen[key].Fixed, named[0]) && c.claims.Find(c.cfg.Namespace+"/"+key) == nil {
			return key
		}
	}
	return a.Name
}

// listed notes what a list has found. Address pairs may have been changed, too.
func (k *cloud) listed(all []openstack.Address) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.seen = map[string]openstack.Address{}
	for _, a := range all {
		k.seen[a.Key] = a
	}
	for port, has := range k.pairs {
		has.stale = true
		k.pairs[port] = has
	}
	k.answered()
}

// answered must be called with mu held.
func (k *cloud) answered() { k.err, k.until, k.pause = nil, time.Time{}, 0 }

// done notes how a call ended.
func (k *cloud) done(err error) {
	if err != nil {
		k.failed(err)
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.answered()
}

// failed notes an error. After one that is the cloud's as a whole it is left alone for a while.
func (k *cloud) failed(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch openstack.ReasonOf(err) {
	case openstack.Temporary, openstack.AuthFailed:
	default:
		if k.seen != nil {
			return // of one address
		}
	}
	k.pause = min(max(firstPause, 2*k.pause), longestPause)
	if e := new(openstack.Error); errors.As(err, &e) {
		k.pause = max(k.pause, e.RetryAfter)
	}
	k.err, k.until = err, time.Now().Add(k.pause)
}

// resting says for how long the cloud is left alone, and why.
func (k *cloud) resting() (time.Duration, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return max(0, time.Until(k.until)), k.err
}

// know returns what is known of an address. ready says whether the cloud was listed.
func (k *cloud) know(key string) (a openstack.Address, ready bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	a, ok := k.seen[key]
	if !ok {
		a = openstack.Address{Key: key}
	}
	return a, k.seen != nil
}

// put notes an address.
func (k *cloud) put(a openstack.Address) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.seen[a.Key] = a
}

// drop forgets an address.
func (k *cloud) drop(key string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.seen, key)
}

// last returns the IPv4 address of the pair that a claim has asked for last, or the one that the cloud has begun with.
func (k *cloud) last(claim string, begun netip.Addr) netip.Addr {
	k.mu.Lock()
	defer k.mu.Unlock()
	if addr, ok := k.tried[claim]; ok {
		return addr
	}
	return begun
}

// try notes which pair a claim asks for.
func (k *cloud) try(claim string, ipv4 netip.Addr) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.tried[claim] = ipv4
}

// forget notes that a claim asks for no pair any more.
func (k *cloud) forget(claim string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.tried, claim)
}
