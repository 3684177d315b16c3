package blockrequest

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/pager"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// pageSize bounds the memory that reading all blocks takes.
const pageSize = 500

// survey compares the cache with the API server once, before this process carves
// its first block: a block that the former leader created just before its end must not
// be carved again. Blocks that the cache lacks are remembered. Nobody else writes afterwards,
// or both lead and the status of the request decides. The error is that of ctx.
func (c *Controller) survey(ctx context.Context) error {
	return wait.PollUntilContextCancel(ctx, time.Second, true, func(ctx context.Context) (bool, error) {
		c.unseen = map[types.UID][]string{}
		err := c.eachBlock(ctx, "", func(b *v2.AddressBlock) {
			if cached := c.blocks.Find(b.Name); cached != nil && cached.UID == b.UID {
				return
			}
			c.ledger.Found(b)
			if uid := b.Labels[v2.LabelRequest]; uid != "" {
				c.unseen[types.UID(uid)] = append(c.unseen[types.UID(uid)], b.Name)
			}
		})
		if err != nil {
			klog.FromContext(ctx).Error(err, "Requests wait until all blocks are known")
			return false, nil
		}
		return true, nil
	})
}

// readBlocks enters the blocks that the API server has of a pool into the ledger.
func (c *Controller) readBlocks(ctx context.Context, pool string) error {
	return c.eachBlock(ctx, v2.LabelPool+"="+pool, c.ledger.Found)
}

// eachBlock calls f for the blocks that the API server has.
func (c *Controller) eachBlock(ctx context.Context, selector string, f func(*v2.AddressBlock)) error {
	pages := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		return c.cfg.Coil.CoilV2().AddressBlocks().List(ctx, o)
	})
	pages.PageSize, pages.PageBufferSize = pageSize, 0
	err := pages.EachListItem(ctx, metav1.ListOptions{LabelSelector: selector}, func(obj runtime.Object) error {
		if b, ok := obj.(*v2.AddressBlock); ok {
			f(b)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list AddressBlocks: %w", err)
	}
	return nil
}
