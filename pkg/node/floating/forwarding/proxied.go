package forwarding

import (
	"net/netip"

	"github.com/coil-net/coil/pkg/node/floating/place"
)

// Proxied finds out from the kernel's counters whether a Service proxy of the node translates packets to addresses of Services. A probe isn't sent, since an endpoint would
// get it.
type Proxied struct {
	seen map[netip.Addr]looked
}

// looked is what was seen of an address at the last look.
type looked struct {
	place.Count
	// failing says that most packets before that look were translated by nobody.
	failing bool
}

// Look takes what is counted of the addresses of Services that the node has, and says of which of them packets were translated since the last look, as far as that is
// known. They weren't if most of them reached the node itself before two looks, one after the other: a Service proxy learns of a Service some time after coild does.
func (p *Proxied) Look(now map[netip.Addr]place.Count) map[netip.Addr]bool {
	seen, proxied := map[netip.Addr]looked{}, map[netip.Addr]bool{}
	for a, c := range now {
		before, known := p.seen[a]
		received, untranslated := c.Received-before.Received, c.NoProxy-before.NoProxy
		l := looked{Count: c, failing: before.failing}
		if anew := c.Received < before.Received || c.NoProxy < before.NoProxy; known && !anew && received > 0 {
			l.failing = 2*untranslated > received
			if l.failing == before.failing || !l.failing {
				proxied[a] = !l.failing
			}
		}
		seen[a] = l
	}
	p.seen = seen
	return proxied
}
