package natgateway

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// Nft is the Filter of a router, and its Counters, in a table of nftables.
type Nft struct{ *nft.Table }

// Sync implements Filter.
func (n Nft) Sync(ctx context.Context, want ruleset.Gateway) (dataplane.Result, error) {
	return n.Table.Sync(ctx, want.Ruleset())
}

// AtLimit implements Counters. The addresses are sorted, and the time is less than ruleset.FullFor.
func (n Nft) AtLimit(ctx context.Context, within time.Duration) ([]netip.Addr, error) {
	var clients []netip.Addr
	for _, set := range ruleset.FullSets() {
		elements, err := n.Expiring(ctx, set)
		if err != nil {
			return nil, err
		}
		for key, expires := range elements {
			if a, ok := netip.AddrFromSlice([]byte(key)); ok && ruleset.FullFor-expires < within {
				clients = append(clients, a)
			}
		}
	}
	slices.SortFunc(clients, netip.Addr.Compare)
	return clients, nil
}
