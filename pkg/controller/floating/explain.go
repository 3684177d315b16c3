package floating

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/claims"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// explain says who has an address that the claim lists. A block that has lost the field floating, and that the claim's
// status has, is taken back. After as many problems as are told, nobody is asked any more.
func (k *carver) explain(ctx context.Context, index int32, block ipam.Block) error {
	name := pools.BlockName(k.pool.Name, index)
	address := strings.Join(texts(block), ",")
	if len(k.g.problems) >= claims.MaxMessages && !k.g.had(name) {
		k.g.problem(v2.ReasonAddressInUse, "%s isn't free", address)
		return nil
	}
	b, err := k.find(ctx, name)
	if err != nil {
		return err
	}
	if b != nil {
		return k.told(ctx, b, block, name)
	}
	names, nodes := k.cfg.Ledger.Within(block)
	for _, n := range names {
		if n == name {
			continue
		}
		if b, err = k.find(ctx, n); err != nil {
			return err
		}
		if b != nil {
			return k.told(ctx, b, block, name)
		}
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

// find returns a block, nil if it isn't there.
func (k *carver) find(ctx context.Context, name string) (*v2.AddressBlock, error) {
	b, err := k.cfg.Coil.CoilV2().AddressBlocks().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read AddressBlock %s: %w", name, err)
	}
	k.cfg.Ledger.Found(b)
	return b, nil
}

// told says whose a block is that has addresses of the block of the name own.
func (k *carver) told(ctx context.Context, b *v2.AddressBlock, block ipam.Block, own string) error {
	address := strings.Join(texts(block), ",")
	switch {
	case b.Name == own && b.Floating == nil && pools.IsFloating(b) && k.g.had(own):
		b, err := k.take(ctx, k.g, b)
		if err != nil {
			return err
		}
		k.g.has = append(k.g.has, b)
	case claims.Key(b) == keyOf(k.g.claim):
		if b.DeletionTimestamp == nil && b.Floating.ReleasedAt == nil {
			return fmt.Errorf("AddressBlock %s was made just now", b.Name)
		}
		k.g.problem(v2.ReasonAddressTaken, "%s is in AddressBlock %s, which was deleted: the claim gets it again after its cool-down of %d s", address, b.Name, b.Floating.CoolDownSeconds)
	case claims.Key(b) != "" && b.Floating.ReleasedAt != nil:
		until := b.Floating.ReleasedAt.Add(time.Duration(b.Floating.CoolDownSeconds) * time.Second)
		k.g.problem(v2.ReasonAddressTaken, "%s cools down until %s: %s had it", address, until.UTC().Format(time.RFC3339), b.Floating.Owner.Summary)
	case claims.Key(b) != "":
		k.g.problem(v2.ReasonAddressTaken, "%s belongs to %s", address, b.Floating.Owner.Summary)
	default:
		k.g.problem(v2.ReasonAddressInUse, "%s is in AddressBlock %s of %s", address, b.Name, k.holder(ctx, b, block))
	}
	return nil
}

// holder says which pod has an address of a block that a node holds, as far as can be told.
func (k *carver) holder(ctx context.Context, b *v2.AddressBlock, block ipam.Block) string {
	node := b.Labels[v2.LabelNode]
	if node == "" {
		return "no node: an admin reserved it"
	}
	pods, ok := k.pods[node]
	if !ok {
		// The API server has an index of this field.
		list, err := k.cfg.Core.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String()})
		if err != nil {
			klog.FromContext(ctx).Error(err, "The pod that has an address can't be named", "node", node)
		} else {
			pods = list.Items
		}
		k.pods[node] = pods
	}
	addrs := texts(block)
	for _, p := range pods {
		if slices.ContainsFunc(p.Status.PodIPs, func(ip corev1.PodIP) bool { return slices.Contains(addrs, ip.IP) }) {
			return fmt.Sprintf("Node %s, where Pod %s/%s has it", node, p.Namespace, p.Name)
		}
	}
	return fmt.Sprintf("Node %s, for its pods", node)
}

// texts are the first address of each family of a block.
func texts(b ipam.Block) []string {
	var all []string
	for _, a := range b.At(0).Addrs() {
		all = append(all, a.String())
	}
	return all
}
