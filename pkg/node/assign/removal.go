package assign

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
)

const (
	// maxBatch bounds how many links are removed together: meanwhile the kernel
	// changes no other link.
	maxBatch = 100
	// minRetry and maxRetry bound the pause before a removal that failed is tried again.
	minRetry, maxRetry = 100 * time.Millisecond, 10 * time.Second
	// drainTimeout is for how long links are removed still when coild ends.
	drainTimeout = 3 * time.Second
)

// errEnding: the links that are left are removed when coild starts again.
var errEnding = errors.New("coild is ending")

// removal is the rest of a DEL whose address is releasing and has no route any more:
// its link is removed and its flows are forgotten, then the address cools.
type removal struct {
	podnet.Target
	addr  ipam.Address
	pool  string
	tries int
	// unrecorded says that the address isn't releasing yet: the record couldn't be
	// written. Nobody else can get it.
	unrecorded bool
	// leave ends the step of the attachment.
	leave func()
	// result gets the outcome of the first try.
	result chan error
}

// removals are done in groups, for one link takes the kernel as long as a hundred.
// Removals that come while a group is removed make the next one.
type removals struct {
	mu      sync.Mutex
	queue   []*removal
	ended   bool
	pending map[string]int           // removals that aren't done, by pool
	idle    map[string]chan struct{} // closed when a pool has none any more
	wake    chan struct{}
}

func newRemovals() *removals {
	return &removals{pending: map[string]int{}, idle: map[string]chan struct{}{}, wake: make(chan struct{}, 1)}
}

// add queues a removal, which is tried until it succeeds; its leave is called then, or
// when coild ends.
func (q *removals) add(r *removal) {
	q.mu.Lock()
	if q.pending[r.pool]++; q.pending[r.pool] == 1 {
		q.idle[r.pool] = make(chan struct{})
	}
	q.mu.Unlock()
	q.push(r)
}

// push puts a removal into the queue, or ends it when coild ends.
func (q *removals) push(r *removal) {
	q.mu.Lock()
	ended := q.ended
	if !ended {
		q.queue = append(q.queue, r)
	}
	q.mu.Unlock()
	if ended {
		q.finish(r, errEnding)
		return
	}
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// again queues a removal that failed, after a pause.
func (q *removals) again(r *removal) {
	pause := min(minRetry<<min(r.tries, 16), maxRetry)
	r.tries++
	time.AfterFunc(pause, func() { q.push(r) })
}

// finish says that a removal is over.
func (q *removals) finish(r *removal, err error) {
	r.tell(err)
	r.leave()
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pending[r.pool]--; q.pending[r.pool] == 0 {
		close(q.idle[r.pool])
		delete(q.pending, r.pool)
		delete(q.idle, r.pool)
	}
}

// tell gives the outcome of the first try to a caller that waits for it.
func (r *removal) tell(err error) {
	select {
	case r.result <- err:
	default:
	}
}

// take returns the removals to do next; none when there are none.
func (q *removals) take() []*removal {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := min(len(q.queue), maxBatch)
	batch := slices.Clone(q.queue[:n])
	q.queue = slices.Delete(q.queue, 0, n)
	return batch
}

// end refuses further removals, and ends the removals that weren't begun.
func (q *removals) end() {
	q.mu.Lock()
	left := q.queue
	q.queue, q.ended = nil, true
	q.mu.Unlock()
	for _, r := range left {
		q.finish(r, errEnding)
	}
}

// settled waits, for a while, until no link of a pool's address is being removed.
func (q *removals) settled(ctx context.Context, pool string, atMost time.Duration) {
	q.mu.Lock()
	idle := q.idle[pool]
	q.mu.Unlock()
	if idle == nil {
		return
	}
	select {
	case <-idle:
	case <-time.After(atMost):
	case <-ctx.Done():
	}
}

// Run removes the links of detached pods until ctx ends, then the links that are left, as
// far as there is time. Attachments whose links stay are releasing in the record: the next
// start removes them.
func (a *Assigner) Run(ctx context.Context) error {
	defer a.removals.end()
	work := context.WithoutCancel(ctx) // a group is removed as a whole
	for ctx.Err() == nil {
		if batch := a.removals.take(); len(batch) > 0 {
			a.removeAll(work, batch)
			continue
		}
		select {
		case <-a.removals.wake:
		case <-ctx.Done():
		}
	}
	for ending := time.Now(); time.Since(ending) <= drainTimeout; {
		batch := a.removals.take()
		if len(batch) == 0 {
			break
		}
		a.removeAll(work, batch)
	}
	return nil
}

// removeAll removes links, and lets their addresses cool. The kernel forgets their flows,
// which would lead others to the next pod with such an address.
func (a *Assigner) removeAll(ctx context.Context, batch []*removal) {
	targets := make([]podnet.Target, 0, len(batch))
	for _, r := range batch {
		targets = append(targets, r.Target)
	}
	results := a.net.RemoveAll(ctx, targets...)
	var addrs []ipam.Address
	for i, r := range batch {
		if results[i] == nil {
			addrs = append(addrs, r.addr)
		}
	}
	forgetErr := a.net.Forget(ctx, addrs...)
	var unlinked []attachment.ID
	for i, r := range batch {
		results[i] = cmp.Or(results[i], forgetErr)
		if results[i] == nil {
			results[i] = a.recordRelease(ctx, r)
		}
		if results[i] == nil {
			unlinked = append(unlinked, r.ID)
		}
	}
	faultpoint.At(faultpoint.DelUnlinked)
	coolErr := a.store.Cool(ctx, unlinked...)
	if coolErr != nil {
		coolErr = fmt.Errorf("cool the address: %w", coolErr)
	}
	pools := map[string]bool{}
	for i, r := range batch {
		err := cmp.Or(results[i], coolErr)
		if err == nil {
			a.removals.finish(r, nil)
			pools[r.pool] = true
			continue
		}
		if r.tries == 0 || !errors.Is(err, store.ErrReadOnly) { // which may last, and is told by STATUS
			klog.FromContext(ctx).Error(err, "Completing a DEL failed, trying again", "containerID", r.ContainerID, "ifname", r.IfName)
		}
		r.tell(err)
		a.removals.again(r)
	}
	for pool := range pools {
		a.blocks.Changed(pool)
	}
}

// recordRelease makes the address of a removal releasing if it isn't yet.
func (a *Assigner) recordRelease(ctx context.Context, r *removal) error {
	if !r.unrecorded {
		return nil
	}
	if _, err := a.store.Release(ctx, r.ID); err != nil && !errors.Is(err, store.ErrNotFound) {
		return fmt.Errorf("release the address: %w", err)
	}
	r.unrecorded = false
	return nil
}
