package cloudaddress

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/kube/object"
	"github.com/coil-net/coil/pkg/openstack"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/reconcile"
)

// claim has the cloud provide the address of a claim, or take it back.
func (c *Controller) claim(ctx context.Context, name string) error {
	a := c.claims.Find(c.cfg.Namespace + "/" + name)
	if a == nil {
		return nil
	}
	mine := slices.Contains(a.Finalizers, Finalizer)
	if a.DeletionTimestamp != nil && !mine {
		return nil
	}
	k, err := c.cloudOf(ctx, a.Spec.Pool)
	switch {
	case err != nil:
		return c.refuse(ctx, a, err)
	case k == nil && !mine:
		return nil // of another kind of pool, or of one that doesn't exist
	case k == nil:
		return c.tell(ctx, a, a.Status.Provided, metav1.Condition{
			Type: v2.ClaimProvided, Status: metav1.ConditionFalse, Reason: v2.ReasonPoolNotFound,
			Message: fmt.Sprintf("Where its port is only AddressPool %s says: make that again, or delete the port and remove the finalizer %s", a.Spec.Pool, Finalizer),
		})
	}
	rest, why := k.resting()
	seen, ready := k.know(c.keyOf(k, a))
	if !ready || rest > 0 {
		if why != nil && a.Status.Provided == nil && a.DeletionTimestamp == nil {
			if err := c.refuse(ctx, a, why); openstack.ReasonOf(err) == "" {
				return err
			}
		}
		if !ready {
			return nil // the first list looks at all claims
		}
		return reconcile.Later(rest)
	}
	if a.DeletionTimestamp != nil {
		return c.remove(ctx, k, a, seen)
	}
	if !mine {
		_, err := kube.PatchMetadata(ctx, c.cfg.Coil.CoilV2().AddressClaims(a.Namespace), a, map[string]any{"finalizers": append(slices.Clone(a.Finalizers), Finalizer)})
		if apierrors.IsConflict(err) {
			return nil // its event comes
		}
		return err // the event of the finalizer comes
	}
	return c.provide(ctx, k, a, seen)
}

// provide has the cloud provide the address of a claim, and tells it.
func (c *Controller) provide(ctx context.Context, k *cloud, a *v2.AddressClaim, seen openstack.Address) error {
	pool := c.pools.Find(a.Spec.Pool)
	if pool == nil {
		return nil
	}
	got, pair, err := c.ensure(ctx, k, pool, a, seen)
	if got.PortID != "" {
		k.put(got)
	}
	k.done(err)
	if err != nil {
		return c.refuse(ctx, a, err)
	}
	k.forget(a.Name)
	faultpoint.At(faultpoint.CloudProvided)
	provided := &v2.ProvidedAddress{PortID: got.PortID}
	if pair.IPv4.IsValid() {
		provided.IPv4 = pair.IPv4.String()
	}
	if pair.IPv6.IsValid() {
		provided.IPv6 = pair.IPv6.String()
	}
	if k.spec.FloatingNetworkID != "" && got.Floating.IsValid() {
		provided.FloatingIP = got.Floating.String()
	}
	return c.tell(ctx, a, provided, metav1.Condition{
		Type: v2.ClaimProvided, Status: metav1.ConditionTrue, Reason: v2.ReasonAddressProvided, Message: "OpenStack has all that the address needs",
	})
}

// ensure makes the address of a claim, and returns it as the cloud has it, and as the pool has it.
func (c *Controller) ensure(ctx context.Context, k *cloud, pool *v2.AddressPool, a *v2.AddressClaim, seen openstack.Address) (openstack.Address, ipam.Address, error) {
	addresses, err := pools.Parse(pool.Spec)
	if err != nil {
		return seen, ipam.Address{}, wrong(v2.ReasonPoolInvalid, "AddressPool %s can't be used: %v", pool.Name, err)
	}
	first, err := addresses.Block(0)
	if err != nil {
		return seen, ipam.Address{}, wrong(v2.ReasonPoolInvalid, "AddressPool %s can't be used: %v", pool.Name, err)
	}
	like := first.At(0)
	want := openstack.Want{IPv4: like.IPv4.IsValid(), IPv6: like.IPv6.IsValid(), Floating: k.spec.FloatingNetworkID != "" && like.IPv4.IsValid()}
	known := namedBy(a)
	chose := len(known) == 0
	begins := chose && want.IPv4 && want.IPv6
	if chose {
		if a.Spec.Count == nil || *a.Spec.Count != 1 {
			return seen, ipam.Address{}, wrong(v2.ReasonAddressInvalid, "A claim in a pool of OpenStack asks for one address: set spec.count to 1, or list one in spec.addresses")
		}
		// The cloud chooses, of a pair the IPv4 address: the other one follows.
		chosen := want
		if begins {
			chosen = openstack.Want{IPv4: true}
		}
		if seen, err = k.Ensure(ctx, seen, chosen); err != nil {
			return seen, ipam.Address{}, err
		}
		known = slices.DeleteFunc(slices.Clone(seen.Fixed), func(addr netip.Addr) bool { return addr.Is4() != want.IPv4 })
	}
	index, ok := addresses.Containing(known[0])
	if !ok {
		return seen, ipam.Address{}, wrong(v2.ReasonAddressOutsidePool,
			"%s isn't in spec.subnets of AddressPool %s: these must have all that OpenStack gives out of its subnets", known[0], pool.Name)
	}
	if chose && addresses.Excluded(index) {
		return seen, ipam.Address{}, wrong(v2.ReasonAddressExcluded, "%s, which OpenStack gives, is in spec.exclude of AddressPool %s: take it out of the allocation pools of OpenStack's subnet", known[0], pool.Name)
	}
	b, err := addresses.Block(index)
	if err != nil {
		return seen, ipam.Address{}, err
	}
	pair := b.At(0)
	want.Addresses = pair.Addrs()
	got, err := k.Ensure(ctx, seen, want)
	if begins && openstack.IsTaken(err) {
		return c.another(ctx, k, begun{claim: a, pool: pool, addresses: addresses, seen: got, want: want, taken: err})
	}
	return got, pair, err
}

// namedBy are the addresses that a claim has from the cloud or, before it has any, asks for by name.
func namedBy(a *v2.AddressClaim) (all []netip.Addr) {
	texts := a.Spec.Addresses
	if p := a.Status.Provided; p != nil {
		texts = []string{p.IPv4, p.IPv6}
	} else if len(texts) != 1 {
		return nil
	}
	for _, text := range texts {
		if addr, err := netip.ParseAddr(text); err == nil {
			all = append(all, addr)
		}
	}
	return all
}

// problem is one that only the claim or its pool can solve.
type problem struct{ reason, message string }

func (p *problem) Error() string { return p.message }

func wrong(reason, format string, args ...any) error {
	return &problem{reason, fmt.Sprintf(format, args...)}
}

// remove takes back what the cloud has for a claim that is being deleted. Its address goes from the gateways first: as long as the port exists, nobody else gets the address.
func (c *Controller) remove(ctx context.Context, k *cloud, a *v2.AddressClaim, seen openstack.Address) error {
	if !c.disallowed(k, a.Spec.Pool, seen.Fixed) {
		return nil // the event that has led here leads to the address pairs, too, and these here again
	}
	err := k.Delete(ctx, seen.Key)
	k.done(err)
	if err != nil {
		return fmt.Errorf("delete the port of AddressClaim %s: %w", klog.KObj(a), err)
	}
	k.drop(seen.Key)
	k.forget(a.Name)
	faultpoint.At(faultpoint.CloudDeleted)
	rest := slices.DeleteFunc(slices.Clone(a.Finalizers), func(f string) bool { return f == Finalizer })
	_, err = kube.PatchMetadata(ctx, c.cfg.Coil.CoilV2().AddressClaims(a.Namespace), a, map[string]any{"finalizers": rest})
	switch {
	case apierrors.IsConflict(err):
		return nil // its event comes
	case err != nil:
		return fmt.Errorf("remove the finalizer of AddressClaim %s: %w", klog.KObj(a), err)
	}
	klog.FromContext(ctx).Info("Gave an address back to OpenStack", "claim", klog.KObj(a), "port", seen.PortID, "addresses", seen.Fixed)
	return nil
}

// refuse tells why the cloud doesn't provide an address, and returns the error, so that it is tried again.
func (c *Controller) refuse(ctx context.Context, a *v2.AddressClaim, err error) error {
	is := metav1.Condition{Type: v2.ClaimProvided, Status: metav1.ConditionFalse, Reason: string(openstack.ReasonOf(err)), Message: err.Error()}
	if p, ok := err.(*problem); ok {
		is.Reason = p.reason
	} else if is.Reason == "" {
		is.Reason = string(openstack.Misconfigured)
	}
	if e := c.tell(ctx, a, a.Status.Provided, is); e != nil {
		return e
	}
	return err
}

// tell writes what the cloud provides, and conditions, into the status of a claim.
func (c *Controller) tell(ctx context.Context, a *v2.AddressClaim, provided *v2.ProvidedAddress, conditions ...metav1.Condition) error {
	after := a.DeepCopy()
	after.Status.Provided = provided
	for _, is := range conditions {
		is.ObservedGeneration, is.LastTransitionTime = a.Generation, metav1.Now()
		meta.SetStatusCondition(&after.Status.Conditions, is)
	}
	if equality.Semantic.DeepEqual(a.Status, after.Status) {
		return nil
	}
	wrote, err := object.WriteStatus(ctx, c.cfg.Coil.CoilV2().AddressClaims(a.Namespace), after, metav1.UpdateOptions{})
	switch {
	case apierrors.IsConflict(err):
		return nil // its event comes
	case !wrote:
		return err
	}
	faultpoint.At(faultpoint.CloudTold)
	for _, is := range conditions {
		if was := meta.FindStatusCondition(a.Status.Conditions, is.Type); is.Status == metav1.ConditionFalse && (was == nil || was.Reason != is.Reason || was.Status != is.Status) {
			c.cfg.Recorder.Eventf(a, nil, corev1.EventTypeWarning, is.Reason, "ProvideAddress", "%s", is.Message)
			klog.FromContext(ctx).Info("OpenStack doesn't provide an address", "claim", klog.KObj(a), "reason", is.Reason, "message", is.Message)
		}
	}
	return nil
}
