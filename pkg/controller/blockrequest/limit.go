package blockrequest

import (
	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// requireRoom refuses a block of a pool to a node that holds more addresses of it than its pods can need:
// coild's token, if stolen, would drain every pool. coild can't change labels, so it can neither hide a
// block nor reserve it. Requests at once can each get one more, one per worker.
func (c *Controller) requireRoom(n *corev1.Node, pool string, blockSize int) error {
	blocks := c.heldBy(n.Name, pool)
	held, limit := int64(blocks)*int64(blockSize), pools.NodeLimit(n, blockSize)
	if held <= limit {
		return nil
	}
	return refusef(v2.ReasonNodeLimit, "Node %s holds %d blocks of AddressPool %s with %d addresses, more than the %d that its %d pods can need: "+
		"raise maxPods of its kubelet, or find out from the log of its coild why it keeps them", n.Name, blocks, pool, held, limit, pools.MostPods(n))
}

// heldBy counts the blocks of a pool that a node holds or is about to get, but for reserved ones, which are
// an admin's.
func (c *Controller) heldBy(node, pool string) int {
	n := len(c.held.Under(holderKey(node, pool)))
	for _, name := range c.ledger.Unseen(pool, node) {
		if c.blocks.Find(name) == nil {
			n++
		}
	}
	return n
}

func holderOfBlock(b *v2.AddressBlock) []string {
	if b.Labels[v2.LabelReserved] == v2.ReservedValue {
		return nil
	}
	return []string{holderKey(b.Labels[v2.LabelNode], b.Labels[v2.LabelPool])}
}

// holderKey is the key of the blocks of a pool that a node holds. No name has a slash.
func holderKey(node, pool string) string { return node + "/" + pool }
