package floating

import (
	"slices"
	"time"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/claims"
)

// patience is for how long a block that exists is believed to exist while the cache doesn't show it. Then the API server is asked.
const patience = time.Second

// unseen are blocks that exist, and that the cache hasn't shown yet. Together with the cache they are all blocks of the pools that this process has listed since it
// leads, since nobody else carves floating addresses.
type unseen struct {
	listed map[string]bool        // pools
	blocks map[string]unseenBlock // by name
}

type unseenBlock struct {
	*v2.AddressBlock
	since time.Time
}

// made notes a block that this process has made.
func (c *Controller) made(b *v2.AddressBlock) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.note(b)
}

// note must be called with mu held.
func (c *Controller) note(b *v2.AddressBlock) {
	if c.blocks.Find(b.Name) == nil {
		c.unseen.blocks[b.Name] = unseenBlock{b, c.now()}
	}
}

// shown notes that the cache has shown a block, or its end.
func (c *Controller) shown(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.unseen.blocks, name)
}

// list notes all floating blocks of a pool that the API server has.
func (c *Controller) list(pool string, all []v2.AddressBlock) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unseen.listed[pool] = true
	for i := range all {
		c.note(&all[i])
	}
}

// blocksOf returns the blocks of a claim. They may be others if old is set.
func (c *Controller) blocksOf(key string) (all []*v2.AddressBlock, old bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	all = c.of.Under(key) // under the lock: a block is here, or unseen
	for name, b := range c.unseen.blocks {
		switch {
		case claims.Key(b.AddressBlock) != key || slices.ContainsFunc(all, func(o *v2.AddressBlock) bool { return o.Name == name }):
		case c.now().Sub(b.since) > patience:
			delete(c.unseen.blocks, name)
			old = true
		default:
			all = append(all, b.AddressBlock)
		}
	}
	return all, old
}

// isNew says that a claim has no block, nor had any, and that the API server needn't be asked for that.
func (c *Controller) isNew(claim *v2.AddressClaim, blocks []*v2.AddressBlock) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.unseen.listed[claim.Spec.Pool] && len(blocks) == 0 && len(claim.Status.Addresses) == 0 && len(c.attempts[keyOf(claim)]) == 0
}
