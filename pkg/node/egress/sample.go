package egress

import (
	"fmt"
	"hash/fnv"
	"math"
	"net/netip"

	"k8s.io/apimachinery/pkg/types"
)

// spokesmen is of how many clients of an Egress, in the whole cluster, the nodes tell of a router that
// died: without sampling one router makes an Event on each node. It is a mean; that of none with
// clients speaks happens to one router of 3000.
const spokesmen = 8

// speaks says whether the node of a client tells of a router of an Egress with so many clients. Each
// node finds out alone, by a hash that is even over clients and other for each router.
func speaks(router netip.Addr, container string, clients int) bool {
	if clients <= spokesmen {
		return true
	}
	h := fnv.New64a()
	fmt.Fprint(h, router, " ", container)
	return float64(mix(h.Sum64())) < spokesmen/float64(clients)*math.MaxUint64
}

// mix spreads the bits of a hash whose inputs differ little: the finalizer of MurmurHash3.
func mix(h uint64) uint64 {
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}

// tells says whether an Event on this node tells of a router: by one of its clients here that speaks.
func (m *Manager) tells(router netip.Addr, egress types.NamespacedName, clients int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.known {
		if usesEgress(egress.String())(s) && speaks(router, s.ContainerID, clients) {
			return true
		}
	}
	return false
}
