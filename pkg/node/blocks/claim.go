package blocks

import (
	"context"
	"net/netip"
	"slices"

	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/store"
)

// Past has the facts about earlier processes that are known at the start.
type Past struct {
	// Usage are the blocks of the record.
	Usage []store.Usage
	// Fresh says that the record is made anew: it doesn't tell which blocks the node had.
	Fresh bool
	// Earlier is the UID of the Node that the record was kept for on this machine; empty if it is the same Node.
	Earlier string
}

// has says whether the record has a block.
func (p Past) has(b *v2.AddressBlock) bool {
	return slices.ContainsFunc(p.Usage, func(u store.Usage) bool { return u.Name == b.Name })
}

// ClaimAll returns the blocks with the node's name that this machine uses, and marks them as this Node's. Blocks of
// another machine, which had the name before, are disowned: that machine and its pods may still run. The caches must be
// filled. A block is this machine's if
//
//	an admin has reserved it for the node's name, or
//	a pod of this machine has an address of it, or
//	the block names      and
//	this Node            the record has it, or is made anew, or the node asked for it
//	the record's Node    the record has it, or is made anew
//	no Node              the record has it, or it is younger than this Node
//
// Others may have been given back: etcd was restored from a backup since, and another node has got them meanwhile.
func (m *Manager) ClaimAll(ctx context.Context, p Past) ([]store.Block, error) {
	var claimed []store.Block
	for _, b := range m.blocks.All() {
		// A first list may be of an earlier time, when the node hadn't given the block back yet.
		if !p.has(b) {
			var err error
			if b, err = m.heldNow(ctx, b); err != nil {
				return nil, err
			}
			if b == nil {
				continue
			}
		}
		rec, damaged := Recorded(b)
		ours := m.known(b, p)
		if !ours {
			var err error
			if ours, err = m.cfg.Uses(ctx, b); err != nil {
				return nil, err
			}
		}
		switch {
		case ours:
			if err := m.claim(ctx, b); err != nil {
				return nil, err
			}
			if damaged != nil {
				klog.FromContext(ctx).Error(damaged, "Block can't be used", "block", b.Name)
				continue
			}
			claimed = append(claimed, rec)
		case m.foreign(b):
			if err := m.disown(ctx, b); err != nil {
				return nil, err
			}
		} // a block of this Node that isn't this machine's is given back
	}
	return claimed, nil
}

// known says whether a block is this machine's whatever addresses its pods have; see ClaimAll.
func (m *Manager) known(b *v2.AddressBlock, p Past) bool {
	of, recorded := b.Annotations[v2.AnnotationNodeUID], p.has(b)
	return reserved(b) ||
		!m.foreign(b) && (recorded || p.Fresh || m.requested(b)) ||
		of == "" && recorded ||
		of != "" && of == p.Earlier && (recorded || p.Fresh)
}

// Has says whether one of the addresses is of a block. One that is damaged has none.
func Has(b *v2.AddressBlock, addrs ...netip.Addr) bool {
	rec, damaged := Recorded(b)
	return damaged == nil && slices.ContainsFunc(addrs, func(a netip.Addr) bool { return rec.IPv4.Contains(a) || rec.IPv6.Contains(a) })
}
