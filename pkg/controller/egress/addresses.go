package egress

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	coilinformers "github.com/coil-net/coil/generated/informers/externalversions/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/reconcile"
)

// FloatingInformers inform of what Egresses with floating addresses need.
type FloatingInformers struct {
	Claims coilinformers.AddressClaimInformer
	// Blocks informs of AddressBlocks with the label v2.LabelFloating.
	Blocks cache.SharedIndexInformer
	// Policies and ClusterPolicies inform of all policies, so that the status of Egresses can name them. They may be nil.
	Policies, ClusterPolicies cache.SharedIndexInformer
}

// addresses has the AddressClaims and the floating AddressBlocks of Egresses.
type addresses struct {
	claims kube.Index[v2.AddressClaim] // by their Egress
	blocks kube.Index[v2.AddressBlock] // by their Egress
	users  *users                      // nil if they aren't told
}

func newAddresses(i *FloatingInformers) *addresses {
	if i == nil {
		return nil
	}
	return &addresses{
		claims: kube.CacheOf[v2.AddressClaim](i.Claims.Informer()).IndexBy(egressOfClaim),
		blocks: kube.CacheOf[v2.AddressBlock](i.Blocks).IndexBy(egressOfBlock),
		users:  newUsers(i),
	}
}

func egressOfClaim(a *v2.AddressClaim) []string {
	if o := metav1.GetControllerOf(a); o != nil && o.Kind == kindEgress && o.APIVersion == v2.GroupVersion.String() {
		return []string{types.NamespacedName{Namespace: a.Namespace, Name: o.Name}.String()}
	}
	return nil
}

// egressOfBlock leaves out blocks that were released: their claim is gone, or asks for fewer.
func egressOfBlock(b *v2.AddressBlock) []string {
	if f := b.Floating; f != nil && f.Owner.Kind == kindEgress && f.ReleasedAt == nil && b.DeletionTimestamp == nil {
		return []string{types.NamespacedName{Namespace: f.Owner.Namespace, Name: f.Owner.Name}.String()}
	}
	return nil
}

const kindEgress = "Egress"

// blocksOf returns the floating addresses of an Egress, and of none that had its name before.
func (c *Controller) blocksOf(e *v2.Egress) []*v2.AddressBlock {
	if c.addresses == nil {
		return nil
	}
	return slices.DeleteFunc(c.addresses.blocks.Under(keyOf(e).String()), func(b *v2.AddressBlock) bool { return b.Floating.Owner.UID != e.UID })
}

// claimOf returns the claim of an Egress's addresses as the cache has it; nil if there is none.
func (c *Controller) claimOf(e *v2.Egress) *v2.AddressClaim {
	want := egress.AddressClaim(e)
	if c.addresses == nil || want == nil {
		return nil
	}
	for _, have := range c.addresses.claims.Under(keyOf(e).String()) {
		if have.Name == want.Name && metav1.IsControlledBy(have, e) {
			return have
		}
	}
	return nil
}

// ensureClaim makes the AddressClaim of an Egress, and deletes those that it had before.
func (c *Controller) ensureClaim(ctx context.Context, e *v2.Egress) error {
	if c.addresses == nil {
		return nil
	}
	want, have := egress.AddressClaim(e), c.claimOf(e)
	claims := writer(c.cfg.Coil.CoilV2().AddressClaims(e.Namespace), ownedBy[*v2.AddressClaim](e))
	var errs []error
	if want != nil {
		errs = append(errs, claims.Ensure(ctx, have, want))
	}
	for _, other := range c.addresses.claims.Under(keyOf(e).String()) {
		if other != have && metav1.IsControlledBy(other, e) && (want == nil || other.Name != want.Name) {
			errs = append(errs, claims.Remove(ctx, other))
		}
	}
	return errors.Join(errs...)
}

// syncPlaces says in the blocks of an Egress's addresses on which nodes they are to be.
func (c *Controller) syncPlaces(ctx context.Context, key types.NamespacedName) error {
	e := c.egresses.Find(key.String())
	if e == nil || e.DeletionTimestamp != nil || c.addresses == nil {
		return nil
	}
	blocks := c.blocksOf(e)
	places := egress.Places(e, blocks, c.routers.Under(key.String()), c.internalIPs)
	var errs []error
	for _, b := range blocks {
		if p, changed := places[b.Name]; changed {
			errs = append(errs, c.place(ctx, b, p))
		}
	}
	return errors.Join(errs...)
}

// place writes where an address is to be into its block, unless the block has changed since it was looked at.
func (c *Controller) place(ctx context.Context, b *v2.AddressBlock, p egress.Place) error {
	body, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": b.UID, "resourceVersion": b.ResourceVersion},
		"floating": map[string]any{"successors": p.Successors, "movingTo": p.MovingTo, "standby": p.Standby},
	})
	if err != nil {
		return err
	}
	_, err = c.cfg.Coil.CoilV2().AddressBlocks().Patch(ctx, b.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: egress.ControllerName})
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil // its event comes
	case err != nil:
		return fmt.Errorf("write into AddressBlock %s where its address is to be: %w", b.Name, err)
	}
	klog.FromContext(ctx).V(2).Info("Placed a floating address", "block", b.Name, "successors", len(p.Successors), "movingTo", p.MovingTo)
	return nil
}

// internalIPs returns the first InternalIP of each family of a Node.
func (c *Controller) internalIPs(node string) []string {
	n := cached[corev1.Node](c.cfg.Cluster.Core().V1().Nodes(), "", node)
	if n == nil {
		return nil
	}
	var all []string
	for _, a := range ipam.AddressOf(plan.NodeInternalIPs(n)...).Addrs() {
		all = append(all, a.String())
	}
	return all
}

// addressSources are the informers of addresses.
func (c *Controller) addressSources(i *FloatingInformers) []reconcile.Source {
	if i == nil {
		return nil
	}
	return append(c.userSources(i),
		reconcile.On(i.Claims.Informer(), reconcile.Handler(func(a *v2.AddressClaim) { c.addressesChanged(egressOfClaim(a)) })),
		reconcile.On(i.Blocks, reconcile.Changes(func(a, b *v2.AddressBlock) {
			for _, block := range []*v2.AddressBlock{a, b} {
				if block != nil {
					c.addressesChanged(egressOfBlock(block))
				}
			}
		})))
}

// settleRouters is for how long changes of addresses are collected that routers wait for: the status tells them which addresses are theirs.
const settleRouters = 100 * time.Millisecond

// addressesChanged looks at the places of an Egress's addresses at once, and soon at its status.
func (c *Controller) addressesChanged(egresses []string) {
	for _, name := range egresses {
		namespace, name, err := cache.SplitMetaNamespaceKey(name)
		if err != nil {
			continue
		}
		key := types.NamespacedName{Namespace: namespace, Name: name}
		c.places.Add(key)
		if e := c.egresses.Find(key.String()); e != nil && e.Spec.Addresses.For(v2.EgressAddressOfRouter) {
			c.objects.AddAfter(key, settleRouters)
		} else {
			c.objects.AddAfter(key, settle)
		}
	}
}
