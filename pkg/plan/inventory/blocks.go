package inventory

import (
	"cmp"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// Block is an AddressBlock that a node holds, with its use.
type Block struct {
	Name string `json:"name"`
	Pool string `json:"pool"`
	// Index is its place in the pool.
	Index int32 `json:"index"`
	// Node is the node that holds it, empty if its end has begun.
	Node string `json:"node,omitempty"`
	// IPv4 and IPv6 are its ranges.
	IPv4 string `json:"ipv4,omitempty"`
	IPv6 string `json:"ipv6,omitempty"`
	// Allocated is how many of the Addresses pods have, and Cooling how many were freed and aren't reused yet.
	Allocated int64 `json:"allocated"`
	Cooling   int64 `json:"cooling"`
	Addresses int64 `json:"addresses"`
	// Reserved says that no new address is taken from it.
	Reserved bool `json:"reserved"`
	// Changed is when the object was last written.
	Changed metav1.Time `json:"changed"`
}

// Blocks returns the AddressBlocks that aren't floating addresses, in the order of their pools.
func Blocks(o Objects) []Block {
	all := make([]Block, 0, len(o.Blocks))
	for _, b := range o.Blocks {
		if pools.IsFloating(b) {
			continue
		}
		all = append(all, Block{
			Name: b.Name, Pool: b.Labels[v2.LabelPool], Index: b.Index, Node: b.Labels[v2.LabelNode], IPv4: text(b.IPv4), IPv6: text(b.IPv6),
			Allocated: int64(b.Status.Allocated), Cooling: int64(b.Status.Cooling), Addresses: size(b), Reserved: b.Labels[v2.LabelReserved] == v2.ReservedValue, Changed: Changed(b),
		})
	}
	slices.SortFunc(all, func(a, b Block) int {
		return cmp.Or(cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Index, b.Index), cmp.Compare(a.Name, b.Name))
	})
	return all
}

func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
