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
	objs, err := c.blocks.ByIndex(byHolder, holderKey(node, pool))
	if err != nil {
		return 0 // the index exists
	}
	n := len(objs)
	for _, name := range c.ledger.unseen(pool, node) {
		if _, seen, err := c.blocks.GetByKey(name); err == nil && !seen {
			n++
		}
	}
	return n
}

func holderOfBlock(obj any) ([]string, error) {
	b, ok := obj.(*v2.AddressBlock)
	if !ok || b.Labels[v2.LabelReserved] == v2.ReservedValue {
		return nil, nil
	}
	return []string{holderKey(b.Labels[v2.LabelNode], b.Labels[v2.LabelPool])}, nil
}

// holderKey is that of byHolder. No name has a slash.
func holderKey(node, pool string) string { return node + "/" + pool }
