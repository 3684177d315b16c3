package loadbalancer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// plan decides which Service gets which address, and makes and deletes claims.
func (c *Controller) plan(ctx context.Context) error {
	began := time.Now()
	facts, services := c.facts()
	p := loadbalancer.Assign(facts)
	var placed []string
	given, users := make(map[types.UID]loadbalancer.Given, len(services)), make(map[string][]types.NamespacedName, len(services))
	var look []types.NamespacedName
	c.mu.Lock()
	c.without = 0
	for i, s := range services {
		g := p.Given[i]
		if facts.Services[i].Leaving {
			continue
		}
		if len(facts.Services[i].Has) == 0 {
			c.without++
		}
		given[s.UID] = g
		if g.Claim != "" {
			if was, key := c.users[g.Claim], keyOf(s); users[g.Claim] == nil && len(was) > 0 && was[0] == key {
				users[g.Claim] = was[:1:1]
			} else {
				users[g.Claim] = append(users[g.Claim], key)
			}
		}
		if was, ok := c.given[s.UID]; !ok || was != g {
			look = append(look, keyOf(s))
			if g.Claim != "" { // the Service may be another one of the same name
				placed = append(placed, g.Claim)
			}
		}
	}
	for _, keys := range users {
		if len(keys) > 1 { // the cache has no order
			slices.SortFunc(keys, func(a, b types.NamespacedName) int {
				return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
			})
		}
	}
	if c.users == nil {
		placed = c.blocks.Keys()
	}
	for claim := range users {
		if !slices.Equal(users[claim], c.users[claim]) {
			placed = append(placed, claim)
		}
	}
	for claim := range c.users {
		if users[claim] == nil {
			placed = append(placed, claim)
		}
	}
	c.given, c.users = given, users
	c.next.Store(new(time.Now().Add(pause(time.Since(began), c.without))))
	maps.DeleteFunc(c.waiting, func(uid types.UID, _ time.Time) bool { _, ok := given[uid]; return !ok })
	c.mu.Unlock()
	for _, key := range look {
		c.steps.Add(key)
	}
	for _, claim := range placed {
		c.places.Add(claim)
	}
	// The event of a claim that has its address, or is refused one, leads to the next plan.
	claims := c.toMake(p.Make)
	room := max(0, mostWaiting-c.claimsWaiting()-(len(p.Make)-len(claims)))
	return errors.Join(each(ctx, claims[:min(room, len(claims))], c.makeClaim), each(ctx, p.Idle, c.deleteClaim))
}

// pause is for how long no plan is made after one that took so long, while so many Services have no address.
func pause(took time.Duration, without int) time.Duration {
	if without > mostWaiting {
		return min(spareOfMany*took, mostSpareOfMany)
	}
	return min(spare*took, mostSpare)
}

// toMake leaves out claims that were made just now, and aren't in the cache yet.
func (c *Controller) toMake(all []loadbalancer.Address) []loadbalancer.Address {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.made, func(_ string, at time.Time) bool { return time.Since(at) >= unseen })
	return slices.DeleteFunc(slices.Clone(all), func(a loadbalancer.Address) bool { _, made := c.made[a.Claim]; return made })
}

// claimsWaiting counts the controller's claims that have no answer.
func (c *Controller) claimsWaiting() (n int) {
	for _, a := range c.claims.In(c.cfg.Namespace) {
		if isOurs(c.cfg.Namespace, a) && a.DeletionTimestamp == nil && len(a.Status.Addresses) == 0 && !meta.IsStatusConditionFalse(a.Status.Conditions, v2.ClaimReady) {
			n++
		}
	}
	return n
}

// facts are what a plan depends on, and the Services that it is about.
func (c *Controller) facts() (loadbalancer.Facts, []*corev1.Service) {
	f := loadbalancer.Facts{Pools: map[string]ipam.Pool{}, Default: c.cfg.DefaultPool}
	for _, p := range c.pools.All() {
		if parsed, err := pools.Parse(p.Spec); err == nil && parsed.BlockSize() == 1 && p.DeletionTimestamp == nil {
			f.Pools[p.Name] = parsed
		}
	}
	ours := c.ourClaims()
	f.Addresses = make([]loadbalancer.Address, len(ours))
	for i, a := range ours {
		f.Addresses[i] = loadbalancer.Address{
			Claim: a.Name, Pool: a.Spec.Pool, Address: asked(f.Pools[a.Spec.Pool], a), Asked: len(a.Spec.Addresses) > 0 && len(a.Status.Addresses) == 0,
		}
	}
	all := c.services.All()
	f.Services = make([]loadbalancer.Service, 0, len(all))
	services := make([]*corev1.Service, 0, len(all))
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range all {
		managed := loadbalancer.Managed(s, c.cfg.WithoutClass)
		if managed || loadbalancer.Taken(s) {
			asks := c.asks.of(s.UID, s, loadbalancer.Of)
			asks.Claim, asks.Leaving = c.given[s.UID].Claim, !managed
			f.Services, services = append(f.Services, asks), append(services, s)
		}
	}
	c.asks.keep(len(services))
	return f, services
}

// ourClaims are the controller's claims that aren't being deleted, the oldest first.
func (c *Controller) ourClaims() []*v2.AddressClaim {
	all := slices.DeleteFunc(c.claims.In(c.cfg.Namespace), func(a *v2.AddressClaim) bool {
		return !isOurs(c.cfg.Namespace, a) || a.DeletionTimestamp != nil
	})
	slices.SortFunc(all, func(a, b *v2.AddressClaim) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	return all
}

// asked is the address that a claim has or, until it has one, that it asks for by name.
func asked(pool ipam.Pool, a *v2.AddressClaim) ipam.Address {
	if addr := loadbalancer.AddressOf(a); len(addr.Addrs()) > 0 || len(a.Spec.Addresses) == 0 {
		return addr
	}
	addr, err := netip.ParseAddr(a.Spec.Addresses[0])
	if err != nil {
		return ipam.Address{}
	}
	if index, ok := pool.Containing(addr); ok {
		if b, err := pool.Block(index); err == nil {
			return b.At(0)
		}
	}
	return ipam.AddressOf(addr)
}

// makeClaim makes a claim of an address.
func (c *Controller) makeClaim(ctx context.Context, a loadbalancer.Address) error {
	claim := &v2.AddressClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.cfg.Namespace, Name: a.Claim, Labels: map[string]string{loadbalancer.LabelClaim: "true"}},
		Spec:       v2.AddressClaimSpec{Pool: a.Pool, CoolDownSeconds: coolDown},
	}
	if addrs := a.Addrs(); len(addrs) > 0 {
		claim.Spec.Addresses = []string{addrs[0].String()}
	} else {
		claim.Spec.Count = new(int32(1))
	}
	if have := c.claims.Find(claim.Namespace + "/" + claim.Name); have != nil && isOurs(c.cfg.Namespace, have) {
		return nil // its event came while the plan was made, and leads to the next one
	}
	c.mu.Lock()
	c.made[claim.Name] = time.Now() // before its event can come
	c.mu.Unlock()
	_, err := c.cfg.Coil.CoilV2().AddressClaims(claim.Namespace).Create(ctx, claim, metav1.CreateOptions{})
	if err != nil {
		c.mu.Lock()
		delete(c.made, claim.Name)
		c.mu.Unlock()
	}
	switch {
	case apierrors.IsAlreadyExists(err):
		if have := c.claims.Find(claim.Namespace + "/" + claim.Name); have != nil && !isOurs(c.cfg.Namespace, have) {
			return fmt.Errorf("AddressClaim %s isn't coil-lb-controller's: give it the label %s=true, or delete it", klog.KObj(claim), loadbalancer.LabelClaim)
		}
		return nil // its event comes, or that of its end
	case err != nil:
		return fmt.Errorf("make AddressClaim %s: %w", klog.KObj(claim), err)
	}
	faultpoint.At(faultpoint.ServeClaimed)
	klog.FromContext(ctx).Info("Made a claim of an address for Services", "claim", klog.KObj(claim), "pool", a.Pool, "addresses", claim.Spec.Addresses)
	return nil
}

// deleteClaim deletes a claim of an address that no Service has.
func (c *Controller) deleteClaim(ctx context.Context, name string) error {
	claim := c.claims.Find(c.cfg.Namespace + "/" + name)
	if claim == nil {
		return nil
	}
	err := kube.DeleteAsRead(ctx, c.cfg.Coil.CoilV2().AddressClaims(c.cfg.Namespace), claim)
	switch {
	case apierrors.IsConflict(err):
		return nil // its event comes
	case err != nil:
		return fmt.Errorf("delete AddressClaim %s: %w", klog.KObj(claim), err)
	}
	faultpoint.At(faultpoint.ServeUnclaimed)
	klog.FromContext(ctx).Info("Deleted the claim of an address that no Service has any more", "claim", klog.KObj(claim), "address", loadbalancer.AddressOf(claim))
	return nil
}

// blockOf returns the block of a claim, nil if it has none yet. An earlier claim of the name may have one still.
func (c *Controller) blockOf(claim *v2.AddressClaim) *v2.AddressBlock {
	return loadbalancer.BlockOf(claim, c.blocks.Under(claim.Name))
}

// usersOf returns the Services that have the address of a claim, once there is a plan.
func (c *Controller) usersOf(claim string) (users []types.NamespacedName, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.users[claim], c.users != nil
}
