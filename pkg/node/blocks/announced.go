package blocks

import v2 "github.com/coil-net/coil/pkg/apis/coil/v2"

// Announced says whether the addresses of a block are announced on links, as the block's label says. It isn't known of a block that the
// node hasn't any more, though its pods may have addresses of it.
func (m *Manager) Announced(block string) (is, known bool) {
	b := m.blocks.Find(block)
	return announced(b), b != nil
}

func announced(b *v2.AddressBlock) bool {
	return b != nil && b.Labels[v2.LabelAnnounce] == string(v2.AnnounceNeighbor)
}

// announcedChanged tells of blocks that are announced on links from now on, or aren't any more.
func (m *Manager) announcedChanged(before, after *v2.AddressBlock) {
	if m.cfg.AnnouncedChanged != nil && announced(before) != announced(after) {
		m.cfg.AnnouncedChanged()
	}
}
