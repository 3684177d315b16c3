// Package pools derives what there should be of AddressPools: their blocks, how much of them a node may have, their
// status.
//
// It must not know which block is free.
package pools

import (
	"fmt"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
)

// Parse returns the blocks that an AddressPool has. The error names each subnet
// that can't be used, and why, or an excluded range that can't. Host bits of a subnet are ignored: the API server
// refuses them in new pools, and those made under Coil 2.x mean the whole subnet.
func Parse(spec v2.AddressPoolSpec) (ipam.Pool, error) {
	subnets := make([]ipam.Subnet, 0, len(spec.Subnets))
	for i, s := range spec.Subnets {
		subnet, err := ipam.ParseSubnet(s.IPv4, s.IPv6)
		if err != nil {
			return ipam.Pool{}, fmt.Errorf("subnet %d: %w", i, err)
		}
		subnets = append(subnets, ipam.Subnet{IPv4: subnet.IPv4.Masked(), IPv6: subnet.IPv6.Masked()})
	}
	p, err := ipam.NewPool(int(spec.BlockSizeBits), subnets)
	if err != nil {
		return ipam.Pool{}, err
	}
	ranges, err := excluded(spec)
	if err != nil {
		return ipam.Pool{}, err
	}
	if p, err = p.Without(ranges); err != nil {
		return ipam.Pool{}, fmt.Errorf("exclude: %w", err)
	}
	return p, nil
}

// BlockName is the name of the block of a pool that has the index.
func BlockName(pool string, index int32) string {
	return pool + "-" + strconv.FormatInt(int64(index), 10)
}

// SplitBlockName returns the pool and the index in the name of a block, and false
// when BlockName doesn't make such a name.
func SplitBlockName(name string) (pool string, index int32, ok bool) {
	dash := strings.LastIndexByte(name, '-')
	if dash < 1 {
		return "", 0, false
	}
	n, err := strconv.ParseInt(name[dash+1:], 10, 32)
	if err != nil || BlockName(name[:dash], int32(n)) != name {
		return "", 0, false
	}
	return name[:dash], int32(n), true
}

// BlockPools returns the pools that a block counts for: the one of its label and,
// should that be another, the one whose name its own name has locked.
func BlockPools(b *v2.AddressBlock) []string {
	var pools []string
	if p := b.Labels[v2.LabelPool]; p != "" {
		pools = append(pools, p)
	}
	if p, _, ok := SplitBlockName(b.Name); ok && (len(pools) == 0 || pools[0] != p) {
		pools = append(pools, p)
	}
	return pools
}

var poolKind = schema.GroupVersionKind{Group: v2.GroupVersion.Group, Version: v2.GroupVersion.Version, Kind: "AddressPool"}

// Holder is the node that gets a block, and its request.
type Holder struct {
	NodeName   string
	NodeUID    types.UID
	RequestUID types.UID
}

// NewBlock returns the object of the block of a pool that has the index.
func NewBlock(pool *v2.AddressPool, index int32, b ipam.Block, h Holder) *v2.AddressBlock {
	o := newBlock(pool, index, b)
	o.Labels[v2.LabelNode] = h.NodeName
	o.Labels[v2.LabelRequest] = string(h.RequestUID)
	o.Annotations = map[string]string{v2.AnnotationNodeUID: string(h.NodeUID)}
	if label := NewCloser(pool).Label(o); label != "" { // a lost block that is made again
		o.Labels[v2.LabelClosed] = label
	}
	return o
}

// NewFloating returns the object of the floating address of a pool that has the index.
func NewFloating(pool *v2.AddressPool, index int32, b ipam.Block, f v2.Floating) *v2.AddressBlock {
	o := newBlock(pool, index, b)
	o.Labels[v2.LabelReserved] = v2.ReservedValue
	o.Labels[v2.LabelFloating] = v2.FloatingValue
	o.Floating = &f
	return o
}

// IsFloating says whether a block is a floating address. Both the label and the field say so, since a block may have lost one of them.
// A block that a node holds is none, whatever is written into it.
func IsFloating(b *v2.AddressBlock) bool {
	return b.Labels[v2.LabelNode] == "" && (b.Floating != nil || b.Labels[v2.LabelFloating] == v2.FloatingValue)
}

// AnnounceLabel returns the value of v2.LabelAnnounce that blocks of a pool should have; empty if they should have no such label.
func AnnounceLabel(pool *v2.AddressPool) string {
	if a := pool.Spec.Announce; a == v2.AnnounceNeighbor || a == v2.AnnounceGateway {
		return string(a)
	}
	return ""
}

func newBlock(pool *v2.AddressPool, index int32, b ipam.Block) *v2.AddressBlock {
	o := &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{
			Name:            BlockName(pool.Name, index),
			Labels:          map[string]string{v2.LabelPool: pool.Name},
			Finalizers:      []string{v2.Finalizer},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(pool, poolKind)},
		},
		Index: index,
	}
	if label := AnnounceLabel(pool); label != "" {
		o.Labels[v2.LabelAnnounce] = label
	}
	if b.IPv4.IsValid() {
		o.IPv4 = new(b.IPv4.String())
	}
	if b.IPv6.IsValid() {
		o.IPv6 = new(b.IPv6.String())
	}
	return o
}
