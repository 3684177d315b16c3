package nft

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Touched says whether anybody has, or may have, changed any table of the namespace since the
// last Sync. To ask costs next to nothing.
func (t *Table) Touched(ctx context.Context) (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now, err := t.currentGeneration(ctx)
	return t.known == nil || now != t.generation, err
}

// currentGeneration is another number after each change of any table of the namespace, whoever
// made it.
func (t *Table) currentGeneration(ctx context.Context) (uint32, error) {
	var id uint32
	r := rtnl.NewRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0, make([]byte, nfgenmsgSize),
		func() string { return "generation of nftables" })
	err := t.handle.Get(ctx, r, func(body []byte) error {
		var as rtnl.Attributes
		_, attributes := as.Cut(body, nfgenmsgSize)
		id = as.Find(attributes, unix.NFTA_GEN_ID).BE32()
		return as.Err
	})
	if err != nil {
		return 0, fmt.Errorf("read the generation of nftables: %w", err)
	}
	return id, nil
}
