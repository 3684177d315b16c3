package egress

import (
	"cmp"
	"net/netip"
	"slices"
	"time"
)

// lingers is for how long packets are taken of a router, or a Service, that isn't listed any more:
// longer than they are on the way, and shorter than addresses of pods rest before others get them.
const lingers = 30 * time.Second

// mostLeft is how many addresses of an Egress linger, the latest ones: its EndpointSlices may list others again and
// again.
const mostLeft = 512

// left returns the addresses of an Egress's Service and routers that were listed a moment ago and aren't
// now. Each client follows when it is compared with the kernel the next time.
func (m *Manager) left(egress string, listed []netip.Addr, now time.Time) []netip.Addr {
	m.mu.Lock()
	defer m.mu.Unlock()
	known := m.departed[egress]
	if known == nil {
		known = map[netip.Addr]time.Time{}
	}
	for a, since := range known {
		if since.IsZero() {
			known[a] = now // unless it is listed still
		}
	}
	for _, a := range listed {
		known[a] = time.Time{}
	}
	var gone []netip.Addr
	for a, since := range known {
		switch {
		case since.IsZero():
		case now.Sub(since) < lingers:
			gone = append(gone, a)
		default:
			delete(known, a)
		}
	}
	if excess := len(gone) - mostLeft; excess > 0 {
		slices.SortFunc(gone, func(a, b netip.Addr) int { return cmp.Or(known[a].Compare(known[b]), a.Compare(b)) })
		for _, a := range gone[:excess] {
			delete(known, a)
		}
		gone = gone[excess:]
	}
	if m.departed[egress] = known; len(known) == 0 {
		delete(m.departed, egress)
	}
	slices.SortFunc(gone, netip.Addr.Compare)
	return gone
}
