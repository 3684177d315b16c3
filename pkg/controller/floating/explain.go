package floating

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/claims"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// explain says who has an address that the claim lists. A block that has lost the field floating, and that the claim's
// status has, is taken back.
func (k *carver) explain(ctx context.Context, index int32, block ipam.Block) error {
	name := pools.BlockName(k.pool.Name, index)
	address := strings.Join(texts(block), ",")
	names, nodes := k.cfg.Ledger.Within(block)
	if !slices.Contains(names, name) {
		names = append([]string{name}, names...)
	}
	for _, n := range names {
		b, err := k.cfg.Coil.CoilV2().AddressBlocks().Get(ctx, n, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return fmt.Errorf("read AddressBlock %s: %w", n, err)
		}
		k.cfg.Ledger.Found(b)
		switch {
		case n == name && b.Floating == nil && pools.IsFloating(b) && k.had(n):
			if b, err = k.take(ctx, k.g, b); err != nil {
				return err
			}
			k.g.has = append(k.g.has, b)
			return nil
		case b.Floating != nil && claims.Key(b) == k.g.claim.Namespace+"/"+k.g.claim.Name:
			if b.DeletionTimestamp == nil && b.Floating.ReleasedAt == nil {
				return fmt.Errorf("AddressBlock %s was made just now", n)
			}
			k.g.problem(v2.ReasonAddressTaken, "%s is in AddressBlock %s, which is being deleted", address, n)
		case b.Floating != nil && b.Floating.ReleasedAt != nil:
			until := b.Floating.ReleasedAt.Add(time.Duration(b.Floating.CoolDownSeconds) * time.Second)
			k.g.problem(v2.ReasonAddressTaken, "%s cools down until %s: %s had it", address, until.UTC().Format(time.RFC3339), b.Floating.Owner.Summary)
		case b.Floating != nil:
			k.g.problem(v2.ReasonAddressTaken, "%s belongs to %s", address, b.Floating.Owner.Summary)
		default:
			holder, err := k.holder(ctx, b, block)
			if err != nil {
				return err
			}
			k.g.problem(v2.ReasonAddressInUse, "%s is in AddressBlock %s of %s", address, n, holder)
		}
		return nil
	}
	switch {
	case len(nodes) > 0:
		k.g.problem(v2.ReasonAddressInUse, "%s is an address of Node %s", address, strings.Join(nodes, ", "))
	case k.cfg.Ledger.Contested(name):
		k.g.problem(v2.ReasonAddressInUse, "%s may be in use: a node claims AddressBlock %s, which doesn't exist any more", address, name)
	default:
		return fmt.Errorf("AddressBlock %s was taken, and is gone again", name)
	}
	return nil
}

// had says whether the status of the claim has a block.
func (k *carver) had(name string) bool {
	return slices.ContainsFunc(k.g.claim.Status.Addresses, func(a v2.ClaimedAddress) bool { return a.Block == name })
}

// holder says which pod has an address of a block that a node holds, as far as can be told.
func (k *carver) holder(ctx context.Context, b *v2.AddressBlock, block ipam.Block) (string, error) {
	node := b.Labels[v2.LabelNode]
	if node == "" {
		return "no node: an admin reserved it", nil
	}
	for _, ip := range texts(block) {
		// An index of the API server's cache has the first address of each pod.
		pods, err := k.cfg.Core.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("status.podIP", ip).String()})
		if err != nil {
			return "", fmt.Errorf("look for the pod that has %s: %w", ip, err)
		}
		for _, p := range pods.Items {
			if p.Spec.NodeName == node {
				return fmt.Sprintf("Node %s, where Pod %s/%s has it", node, p.Namespace, p.Name), nil
			}
		}
	}
	return fmt.Sprintf("Node %s, for its pods", node), nil
}

// texts are the first address of each family of a block.
func texts(b ipam.Block) []string {
	var all []string
	for _, a := range b.At(0).Addrs() {
		all = append(all, a.String())
	}
	return all
}
