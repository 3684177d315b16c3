package dataplane

import (
	"fmt"
	"net/netip"
)

// Proxy is a proxy neighbour entry: the kernel answers on a link for an address that isn't the host's own, by ARP or NDP. It is
// identified by link and address.
type Proxy struct {
	// Link is the interface index.
	Link int
	Addr netip.Addr
	// Protocol is the owner's mark (NDA_PROTOCOL).
	Protocol int
}

// String prints the entry as "ip neighbour show proxy" does, with the index of the link.
func (p Proxy) String() string {
	return fmt.Sprintf("%s dev %d proxy proto %d", p.Addr, p.Link, p.Protocol)
}
