package lbgateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/nft"
	plan "github.com/coil-net/coil/pkg/plan/lbgateway"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/reconcile"
)

// apply does what the caches say, and compares the table if somebody else may have changed it.
func (g *Gateway) apply(ctx context.Context, _ struct{}) error {
	keys, version := g.keys()
	next, changes := g.next(keys)
	next.version = version
	err := g.change(ctx, next, changes)
	if err != nil && len(keys) > 0 {
		err = fmt.Errorf("change what is done for Service %s: %w", few(keys), err)
	}
	if err == nil {
		err = g.unguard(ctx)
	}
	g.mu.Lock()
	g.refused = err
	g.mu.Unlock()
	g.statuses.Add(struct{}{})
	if g.cfg.Health != nil {
		g.cfg.Health(err)
	}
	if err != nil {
		g.again(keys)
		return err
	}
	return reconcile.Later(lookAgain)
}

// few has the names of the first of some Services.
func few(keys []string) string {
	const most = 3
	if len(keys) <= most {
		return strings.Join(keys, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(keys[:most], ", "), len(keys)-most)
}

// change has the table, and after it keepalived, do what a state says. An address that isn't at the machine yet meets no rule; one that keepalived may still have is guarded,
// so that nothing else of the machine is reached by it. So neither waits for the other one, and endpoints are followed whatever keepalived does.
func (g *Gateway) change(ctx context.Context, next state, changes []dataplane.SetChange) error {
	next.guarded = maps.Clone(next.addresses)
	maps.Copy(next.guarded, g.does.guarded)
	if err := g.write(ctx, next, append(changes, ruleset.ChangeAddresses(nil, missing(next.guarded, g.does.guarded))...)); err != nil {
		return err
	}
	g.mu.Lock()
	for _, a := range missing(g.does.addresses, next.addresses) {
		g.gone[a] = true
	}
	changed := next.changes != g.does.changes
	g.does = next
	g.mu.Unlock()
	if changed {
		g.saves.AddAfter(struct{}{}, saveAfter)
		g.forgets.AddAfter(struct{}{}, max(forgetAfter, idle*time.Duration(g.forgetting.Load())))
	}
	if g.cfg.VRRP != nil {
		g.elects.Add(struct{}{})
	}
	return nil
}

// unguard takes away what guards addresses that the machine hasn't any more.
func (g *Gateway) unguard(ctx context.Context) error {
	g.mu.Lock()
	next, gone := g.does, g.unneeded()
	g.mu.Unlock()
	if len(gone) == 0 {
		return nil
	}
	next.guarded = maps.Clone(next.guarded)
	for _, a := range gone {
		delete(next.guarded, a)
	}
	if err := g.write(ctx, next, ruleset.ChangeAddresses(gone, nil)); err != nil {
		return err
	}
	g.mu.Lock()
	g.does = next
	g.mu.Unlock()
	return nil
}

// unneeded are addresses that are guarded without a need: no Service has them, so that keepalived isn't told to take them, and it is known not to have them. g.mu must be held.
func (g *Gateway) unneeded() (all []netip.Addr) {
	if g.cfg.VRRP != nil && g.vrrp.has == nil {
		return nil
	}
	for a := range g.does.guarded {
		if !g.does.addresses[a] && !g.vrrp.has[a] {
			all = append(all, a)
		}
	}
	return all
}

// write makes the table what a state says. changes lead there from the present one.
func (g *Gateway) write(ctx context.Context, next state, changes []dataplane.SetChange) error {
	if next.shape.Equal(g.does.shape) && g.refused == nil && next.needsTable() && g.does.needsTable() {
		err := g.cfg.Table.Change(ctx, changes...)
		if err == nil {
			return nil
		}
		if !errors.Is(err, nft.ErrUnknown) {
			klog.FromContext(ctx).Error(err, "The table is made anew")
		}
	}
	did, err := g.cfg.Table.Sync(ctx, next.ruleset())
	if err == nil && did.Changed() {
		klog.FromContext(ctx).V(1).Info("The table was made as it is to be", "did", did)
	}
	return err
}

// needsTable says whether the gateway has a table: not one of no pool that has no address any more.
func (s state) needsTable() bool { return len(s.spec.Pools)+len(s.guarded) > 0 }

// ruleset is the whole table.
func (s state) ruleset() dataplane.Ruleset {
	if !s.needsTable() {
		return dataplane.Ruleset{}
	}
	l := ruleset.LoadBalancer{Addresses: slices.SortedFunc(maps.Keys(s.guarded), netip.Addr.Compare), LoadBalancerShape: s.shape}
	for _, key := range slices.Sorted(maps.Keys(s.services)) {
		for _, f := range s.services[key].forwards {
			l.Frontends = append(l.Frontends, f.Frontend)
		}
	}
	return l.Ruleset()
}

// next returns the state after Services were looked at, and the changes of sets that lead there.
func (g *Gateway) next(keys []string) (state, []dataplane.SetChange) {
	next := g.does
	if own := g.gateways.Find(g.cfg.Name); own != nil {
		next.spec, next.generation = own.Spec, own.Generation
	} else {
		next.spec, next.generation = v2.LoadBalancerGatewaySpec{}, 0
	}
	next.shape.Masquerade = next.spec.Masquerade != v2.MasqueradeNever
	next.shape.Refuse = next.spec.UnknownPorts == v2.UnknownPortsRefuse
	next.services, next.forwards = maps.Clone(g.does.services), maps.Clone(g.does.forwards)
	facts := plan.Facts{Spec: next.spec, Nodes: plan.NodesOf(g.nodes.All())}
	before, after := map[front]plan.Forward{}, map[front]plan.Forward{}
	for _, key := range keys {
		was := next.services[key]
		is, wanted := g.look(key, facts)
		next.hash += is.hash(key) - was.hash(key)
		if delete(next.services, key); wanted {
			next.services[key] = is
		}
		for _, f := range was.forwards {
			before[frontOf(f)] = f
		}
		for _, f := range is.forwards {
			after[frontOf(f)] = f
			next.shape = next.shape.With(f.Frontend)
		}
	}
	var changes []dataplane.SetChange
	moves, drains := false, false
	for at, was := range before {
		if _, ok := after[at]; !ok {
			changes = append(changes, ruleset.Change(&was.Frontend, nil)...)
			delete(next.forwards, at)
			moves = true
		}
	}
	for at, is := range after {
		if was, ok := before[at]; ok {
			changes = append(changes, ruleset.Change(&was.Frontend, &is.Frontend)...)
			drains = drains || !slices.Equal(was.Draining, is.Draining)
		} else {
			changes = append(changes, ruleset.Change(nil, &is.Frontend)...)
			moves = true
		}
		next.forwards[at] = is
	}
	if len(changes) > 0 || drains || !equality.Semantic.DeepEqual(next.spec, g.does.spec) {
		next.changes++
	}
	if moves {
		next.moves++
		next.addresses = map[netip.Addr]bool{}
		for at := range next.forwards {
			next.addresses[at.to.Addr()] = true
		}
	}
	return next, changes
}

// missing are the addresses of one set that another one hasn't.
func missing(of, in map[netip.Addr]bool) (all []netip.Addr) {
	for a := range of {
		if !in[a] {
			all = append(all, a)
		}
	}
	return all
}

// look says what the gateway is to do for a Service, and whether it has anything to do with that.
func (g *Gateway) look(key string, facts plan.Facts) (s service, wanted bool) {
	for _, b := range g.blocks.Under(key) {
		if !slices.Contains(facts.Spec.Pools, b.Labels[v2.LabelPool]) {
			continue
		}
		block, err := ipam.ParseBlock(b.IPv4, b.IPv6)
		if err != nil {
			return service{err: fmt.Errorf("AddressBlock %s can't be understood: %w", b.Name, err)}, true
		}
		for _, a := range block.At(0).Addrs() {
			for _, p := range b.Floating.Ports {
				if p.Service == key {
					facts.Places = append(facts.Places, plan.Place{Address: a, Protocol: p.Protocol, Port: p.Port})
				}
			}
		}
	}
	facts.Service, facts.Slices = g.services.Find(key), g.slices.Under(key)
	if len(facts.Places) == 0 || facts.Service == nil || facts.Service.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return service{}, false
	}
	s.forwards, s.err = plan.Forwards(facts)
	return s, true
}

// hash is another one for other forwards.
func (s service) hash(key string) uint64 {
	if len(s.forwards) == 0 {
		return 0
	}
	h := fnv.New64a()
	fmt.Fprint(h, key)
	for _, f := range s.forwards {
		fmt.Fprint(h, f.Frontend)
	}
	return h.Sum64()
}

// newer returns the newer one of two resource versions of one resource.
func newer(a, b string) string {
	if order, err := resourceversion.CompareResourceVersion(a, b); err == nil && order >= 0 {
		return a
	}
	return cmp.Or(b, a)
}
