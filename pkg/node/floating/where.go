package floating

import (
	"net/netip"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// peers returns where the nodes of all addresses are. The newest block that says so counts, and of one block its successors.
func (d *Driver) peers() map[string][]netip.Addr {
	type source struct {
		version   uint64
		successor bool
	}
	from, peers := map[string]source{}, map[string][]netip.Addr{}
	for _, k := range d.blocks {
		if k.block.Floating == nil || !k.concerns(d.cfg.Node) {
			continue
		}
		for i, nodes := range [][]v2.FloatingNode{k.block.Floating.Successors, k.block.Floating.Holding.Voters} {
			s := source{k.record.Version, i == 0}
			for _, n := range nodes {
				if f := from[n.Node]; n.Node == d.cfg.Node || f.successor && !s.successor || f.successor == s.successor && f.version > s.version {
					continue
				}
				from[n.Node], peers[n.Node] = s, addrsOf(n)
			}
		}
	}
	return peers
}

func addrsOf(n v2.FloatingNode) []netip.Addr {
	var addrs []netip.Addr
	for _, text := range n.Addresses {
		if a, err := netip.ParseAddr(text); err == nil {
			addrs = append(addrs, a.Unmap())
		}
	}
	return addrs
}
