package cloudaddress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/openstack"
	"github.com/coil-net/coil/pkg/reconcile"
)

// pairs are the address pairs that a gateway's port is to have, and why it hasn't.
type pairs struct {
	gateway string
	want    []netip.Prefix // sorted
	err     error
	// stale says that others may have changed them since.
	stale bool
	// left says that the gateway isn't one of the pool any more.
	left bool
}

// allows says whether a gateway's port may use an address.
func (p pairs) allows(addrs ...netip.Addr) bool {
	return !slices.ContainsFunc(addrs, func(a netip.Addr) bool {
		return !slices.ContainsFunc(p.want, func(o netip.Prefix) bool { return o.Contains(a) })
	})
}

// gatewaysOf are the gateways of a pool that have a port in its cloud, sorted.
func (c *Controller) gatewaysOf(pool string) []*v2.LoadBalancerGateway {
	all := slices.DeleteFunc(c.gateways.All(), func(g *v2.LoadBalancerGateway) bool {
		return g.Spec.OpenStack == nil || g.DeletionTimestamp != nil || !slices.Contains(g.Spec.Pools, pool)
	})
	slices.SortFunc(all, func(a, b *v2.LoadBalancerGateway) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// allow writes the address pairs of the gateways of a pool, and tells its claims.
func (c *Controller) allow(ctx context.Context, pool string) error {
	k, err := c.cloudOf(ctx, pool)
	if k == nil || err != nil {
		return err
	}
	if _, ready := k.know(""); !ready {
		return nil // the first list leads here
	}
	var errs []error
	changed := false
	for port, want := range c.wanted(k, pool) {
		k.mu.Lock()
		has, known := k.pairs[port]
		k.mu.Unlock()
		if known && !has.stale && has.err == nil && slices.Equal(has.want, want.want) {
			continue
		}
		if rest, _ := k.resting(); rest > 0 {
			return reconcile.Later(rest)
		}
		want.err = k.EnsurePairs(ctx, []string{port}, want.want, c.owned(k, pool))
		k.done(want.err)
		if want.err != nil {
			errs = append(errs, fmt.Errorf("let LoadBalancerGateway %s use the addresses of AddressPool %s: %w", want.gateway, pool, want.err))
		}
		k.mu.Lock()
		if k.pairs[port] = want; want.left && (want.err == nil || gone(want.err)) {
			delete(k.pairs, port)
		}
		k.mu.Unlock()
		changed = true
	}
	if changed {
		faultpoint.At(faultpoint.CloudAllowed)
	}
	for _, a := range c.of(pool) {
		if a.DeletionTimestamp != nil {
			c.each.Add(a.Name)
			continue
		}
		if is := c.isAllowed(k, a); is != nil {
			errs = append(errs, c.tell(ctx, a, a.Status.Provided, *is))
		}
	}
	return errors.Join(errs...)
}

// gone says whether a gateway's port isn't there, and uses no address.
func gone(err error) bool { return openstack.ReasonOf(err) == openstack.NotFound }

// wanted are the address pairs that gateways are to have, by their ports. One that has left the pool is to have none.
func (c *Controller) wanted(k *cloud, pool string) map[string]pairs {
	var addrs []netip.Addr
	for _, a := range c.of(pool) {
		if a.DeletionTimestamp == nil && a.Status.Provided != nil {
			addrs = append(addrs, namedBy(a)...)
		}
	}
	all := map[string]pairs{}
	k.mu.Lock()
	for port, has := range k.pairs {
		all[port] = pairs{gateway: has.gateway, left: true}
	}
	k.mu.Unlock()
	for _, g := range c.gatewaysOf(pool) {
		all[g.Spec.OpenStack.PortID] = pairs{gateway: g.Name, want: prefixes(addrs, g.Spec.OpenStack.AddressPairs)}
	}
	return all
}

// prefixes are the address pairs for addresses: ranges, and the addresses that aren't in these.
func prefixes(addrs []netip.Addr, ranges []string) (all []netip.Prefix) {
	for _, text := range ranges {
		if p, err := netip.ParsePrefix(text); err == nil {
			all = append(all, p.Masked())
		}
	}
	named := len(all)
	for _, a := range addrs {
		if !(pairs{want: all[:named]}).allows(a) {
			all = append(all, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}

// owned are the addresses whose pairs are the pool's: of two pools of one project, each has its own.
func (c *Controller) owned(k *cloud, pool string) (all []openstack.Address) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for key, a := range k.seen {
		if claim := c.claims.Find(c.cfg.Namespace + "/" + key); claim == nil || claim.Spec.Pool == pool {
			all = append(all, a)
		}
	}
	return all
}

// isAllowed says whether gateways may use the address of a claim, nil if that isn't known yet.
func (c *Controller) isAllowed(k *cloud, a *v2.AddressClaim) *metav1.Condition {
	if a.Status.Provided == nil {
		return nil
	}
	addrs := namedBy(a)
	is := &metav1.Condition{Type: v2.ClaimAllowed, Status: metav1.ConditionTrue, Reason: v2.ReasonPairsWritten}
	var can, cannot []string
	gateways := c.gatewaysOf(a.Spec.Pool)
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, g := range gateways {
		has, known := k.pairs[g.Spec.OpenStack.PortID]
		switch {
		case !known || has.err == nil && !has.allows(addrs...):
			return nil
		case has.err != nil:
			cannot = append(cannot, fmt.Sprintf("the port of gateway %s may not use it: %v", g.Name, has.err))
		default:
			can = append(can, g.Name)
		}
	}
	is.Message = strings.Join(cannot, "; ")
	if len(can) == 0 && len(cannot) > 0 {
		// Those that could before still can, for all that is known.
		if meta.IsStatusConditionTrue(a.Status.Conditions, v2.ClaimAllowed) {
			return is
		}
		is.Status, is.Reason = metav1.ConditionFalse, v2.ReasonPairsRefused
	}
	return is
}

// disallowed says whether no gateway of a pool may use some addresses any more. A port that is gone uses none.
func (c *Controller) disallowed(k *cloud, pool string, addrs []netip.Addr) bool {
	if len(addrs) == 0 {
		return true
	}
	gateways := c.gatewaysOf(pool)
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, g := range gateways {
		has, known := k.pairs[g.Spec.OpenStack.PortID]
		if known && gone(has.err) {
			continue
		}
		if !known || has.err != nil || slices.ContainsFunc(addrs, func(a netip.Addr) bool { return slices.Contains(has.want, netip.PrefixFrom(a, a.BitLen())) }) {
			return false
		}
	}
	return true
}
