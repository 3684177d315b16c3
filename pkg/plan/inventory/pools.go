package inventory

import (
	"cmp"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Pool is an AddressPool with its use.
type Pool struct {
	Name      string   `json:"name"`
	Blocks    v2.Usage `json:"blocks"`
	Addresses v2.Usage `json:"addresses"`
	// Floating and Cooling are how many floating addresses belong to an object, and how many were released and are given to nobody yet.
	Floating int64  `json:"floating"`
	Cooling  int64  `json:"cooling"`
	Announce string `json:"announce,omitempty"`
	// BlockSizeBits and Subnets are those of its spec.
	BlockSizeBits int32       `json:"blockSizeBits"`
	Subnets       []string    `json:"subnets"`
	Created       metav1.Time `json:"created"`
	// Attention are the messages of conditions that somebody should look at.
	Attention []string `json:"attention,omitempty"`
}

// Pools returns the AddressPools, sorted by name.
func Pools(o Objects) []Pool {
	all := make([]Pool, 0, len(o.Pools))
	for _, p := range o.Pools {
		all = append(all, pool(p))
	}
	slices.SortFunc(all, func(a, b Pool) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// pool says what there is to show of a pool.
func pool(p *v2.AddressPool) Pool {
	shown := Pool{
		Name: p.Name, Blocks: p.Status.Blocks, Addresses: p.Status.Addresses,
		Floating: p.Status.Floating.Used, Cooling: p.Status.Floating.Cooling, Announce: string(p.Spec.Announce),
		BlockSizeBits: p.Spec.BlockSizeBits, Subnets: []string{}, Created: p.CreationTimestamp,
	}
	for _, s := range p.Spec.Subnets {
		for _, family := range []*string{s.IPv4, s.IPv6} {
			if family != nil {
				shown.Subnets = append(shown.Subnets, *family)
			}
		}
	}
	for _, kind := range []string{v2.PoolExhausted, v2.PoolOverlapping, v2.PoolSuspended, v2.PoolTerminating, v2.PoolExcludedInUse} {
		if c := meta.FindStatusCondition(p.Status.Conditions, kind); c != nil && c.Status != metav1.ConditionFalse {
			shown.Attention = append(shown.Attention, c.Message)
		}
	}
	if c := meta.FindStatusCondition(p.Status.Conditions, v2.PoolDrained); c != nil {
		shown.Attention = append(shown.Attention, "drains: "+c.Message)
	}
	return shown
}
