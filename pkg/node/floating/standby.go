package floating

import (
	"fmt"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Follower returns the node to which this one copies the connections of a block's address all the time, and the address as it is here. ok is false
// if this node doesn't have the address, or if there is no node to copy to. While the address moves on purpose, that copies the connections.
func Follower(self string, b *v2.AddressBlock) (a Address, to v2.FloatingNode, ok bool) {
	k, err := parse(self, b)
	if err != nil || k.record.Holder != self || k.address.Pod == "" {
		return Address{}, to, false
	}
	to = follower(b)
	return k.address, to, to.Node != ""
}

// Following returns the address of a block whose connections a node copies to this one all the time. If the node isn't to do so, that is an error.
func Following(self, from string, b *v2.AddressBlock) (Address, error) {
	k, err := parse(self, b)
	if err != nil {
		return Address{}, err
	}
	switch {
	case k.record.Holder != from || follower(b).Node != self:
		return Address{}, fmt.Errorf("AddressBlock %s: its holder is %q, and connections are copied to %q", b.Name, k.record.Holder, follower(b).Node)
	case k.address.Pod == "":
		return Address{}, fmt.Errorf("AddressBlock %s: no pod of node %s may have the address", b.Name, self)
	}
	return k.address, nil
}

// Stale returns the address of a block of which this node may keep connections that are of no use any more, since another node has the address and
// copies them elsewhere. While no node has the address, none is stale: any of the nodes may take it.
func Stale(self string, b *v2.AddressBlock) (a Address, stale bool) {
	k, err := parse(self, b)
	if err != nil || k.record.Holder == "" || k.record.Holder == self || k.record.MovingTo == self || follower(b).Node == self {
		return Address{}, false
	}
	return k.address, true
}

// follower is the node that takes an address first if its holder fails. It has no name if connections aren't copied to it.
func follower(b *v2.AddressBlock) v2.FloatingNode {
	if b.Floating == nil || !b.Floating.Standby || !offered(b) {
		return v2.FloatingNode{}
	}
	holder, to := b.Floating.Holding.Holder, b.Floating.MovingTo
	if holder == "" || to != "" && to != holder {
		return v2.FloatingNode{}
	}
	for _, n := range b.Floating.Successors {
		if n.Node != holder {
			return n
		}
	}
	return v2.FloatingNode{}
}
