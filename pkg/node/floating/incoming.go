package floating

import (
	"fmt"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Incoming returns the address of a block that a node hands over to this one. It is an error if the block doesn't say that the other node has
// the address and that it is to move to this one, which has a pod for it. An address that is to move nowhere may come to each successor: the
// holder's coild ends, or its pod isn't ready. If the hand-over has begun, this node may also have the address by now.
func Incoming(self, from string, b *v2.AddressBlock, begun bool) (Address, error) {
	k, err := parse(self, b)
	if err != nil {
		return Address{}, err
	}
	comes := k.record.Holder == from && (k.record.MovingTo == self || k.record.MovingTo == "" && from != self && offered(b))
	came := begun && k.record.Holder == self && offered(b)
	switch {
	case !comes && !came:
		return Address{}, fmt.Errorf("AddressBlock %s: its holder is %q, and it moves to %q", b.Name, k.record.Holder, k.record.MovingTo)
	case k.address.Pod == "":
		return Address{}, fmt.Errorf("AddressBlock %s: no pod of node %s may have the address", b.Name, self)
	}
	return k.address, nil
}
