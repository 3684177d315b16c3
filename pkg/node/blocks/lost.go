package blocks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
)

const (
	// lookForLost is how often recorded blocks are looked for that the cache lacks.
	lookForLost = time.Minute
	// minClaimPause is the time between two claims of a block. It doubles with each refusal up to
	// maxClaimPause, which is less than pools.SuspendFor: a pool that is made again, as after a restore,
	// is suspended until all claims have come. A block that another node has is kept for a node that goes
	// on to claim it.
	minClaimPause = time.Minute
	maxClaimPause = 5 * time.Minute
)

// lostBlock has the facts about a recorded block with addresses in use that the API server doesn't
// have for the node.
type lostBlock struct {
	pool string
	// request is the name of the last claim; empty for none.
	request string
	// pause follows the last claim, and next is when it ends.
	pause time.Duration
	next  time.Time
	// holder is the UID of the block that had the name when the claim was made; empty for none.
	holder types.UID
	// spec tells the pool's spec from that of another time, when the claim was made.
	spec string
	// final says that another claim gets the same refusal as long as holder and spec are the same. Each
	// claim suspends the pool, so that repeating it would keep the pool from use.
	final bool
}

// syncAllLost looks for all recorded blocks that the cache lacks: events don't tell of blocks that
// were lost while coild was away.
func (m *Manager) syncAllLost(ctx context.Context, _ struct{}) error {
	usage, err := m.record.Usage(ctx)
	if err != nil {
		return err
	}
	for _, u := range usage {
		if m.blocks.Find(u.Name) == nil {
			m.supply.Add(u.Pool)
		}
	}
	return reconcile.Later(lookForLost)
}

// syncLost deals with the recorded blocks of a pool that the API server doesn't have for the node
// any more: somebody removed their finalizers, or etcd was restored from a backup. Another node may
// get them.
//
//	no address allocated   forget it, when its addresses have cooled down
//	addresses allocated    claim it, so that it is made again
//
// claimed says that a claim was made, wait that addresses cool down.
func (m *Manager) syncLost(ctx context.Context, pool string, usage []store.Usage) (claimed, wait bool, err error) {
	var errs []error
	missing := map[string]bool{}
	cached := m.ofPool(pool)
	for _, u := range usage {
		if u.Pool != pool || slices.ContainsFunc(cached, func(b *v2.AddressBlock) bool { return b.Name == u.Name }) {
			continue
		}
		live, err := m.client.AddressBlocks().Get(ctx, u.Name, metav1.GetOptions{})
		switch {
		case err == nil && live.Labels[v2.LabelNode] == m.cfg.NodeName:
			m.takeBack(live)
			continue // its event will come
		case apierrors.IsNotFound(err):
			live = &v2.AddressBlock{}
		case err != nil:
			errs = append(errs, fmt.Errorf("read AddressBlock %s: %w", u.Name, err))
			missing[u.Name] = true // as far as is known
			continue
		}
		if u.Allocated > 0 {
			missing[u.Name] = true
			now, err := m.claimLost(ctx, u, live.UID)
			claimed = claimed || now
			errs = append(errs, err)
			continue
		}
		err = m.record.ForgetBlock(ctx, u.Name)
		if errors.Is(err, store.ErrInUse) {
			wait = true
			m.export.Add(struct{}{}) // the last pod may have gone since: see allHeld
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		klog.FromContext(ctx).Info("A block isn't this node's any more", "block", u.Name)
		m.forget(u.Name)
		errs = append(errs, m.Export(ctx))
	}
	m.lost.DeleteFunc(func(name string, l lostBlock) bool { return l.pool == pool && !missing[name] })
	return claimed, wait, errors.Join(errs...)
}

// claimLost asks for a block that pods here have addresses of, and for no other one, and says
// whether it did. holder is the block that has its name.
func (m *Manager) claimLost(ctx context.Context, u store.Usage, holder types.UID) (bool, error) {
	m.offered.Delete(u.Name) // it is news again when it is back
	l, known := m.lost.Find(u.Name)
	if !known {
		l = lostBlock{pool: u.Pool, pause: minClaimPause}
		m.lost.Set(u.Name, l)
	}
	if time.Now().Before(l.next) && l.holder == holder {
		return false, nil
	}
	spec, err := m.specOf(ctx, u.Pool)
	if err != nil || l.final && l.holder == holder && l.spec == spec {
		return false, err
	}
	made, fresh, err := m.makeClaim(ctx, u, l.request)
	if err != nil {
		return false, err
	}
	first := l.next.IsZero()
	l.request, l.next, l.holder, l.spec, l.final = made.Name, time.Now().Add(l.pause), holder, spec, false
	m.lost.Set(u.Name, l)
	if !fresh {
		return true, nil // the claim of before is there still
	}
	m.asked.created(u.Pool, made.UID)
	if first {
		m.cfg.Warn("BlockClaimed", "pods of this node have addresses of AddressBlock %s, which doesn't exist for this node any more, as after etcd was restored from a backup: it is asked for", u.Name)
	}
	klog.FromContext(ctx).Info("Claimed a lost block", "block", u.Name, "request", made.Name)
	return true, nil
}

// makeClaim makes the BlockRequest that claims a block, by the name of the last claim if there was one. fresh is
// false if it was there already.
func (m *Manager) makeClaim(ctx context.Context, u store.Usage, last string) (made *v2.BlockRequest, fresh bool, err error) {
	first := claimName(m.cfg.NodeName, m.cfg.NodeUID, u.Name)
	r := m.newRequest(cmp.Or(last, first), u.Pool)
	r.Spec.Claim = u.Name
	for range maxTaken {
		made, fresh, err = m.create(ctx, r)
		switch {
		case err != nil:
			return nil, false, fmt.Errorf("create BlockRequest %s: %w", r.Name, err)
		case made == nil: // its name is free again
		case m.isOwn(made):
			return made, fresh, nil
		default:
			r.Name = fmt.Sprintf("%s-%d", first, rand.Int())
		}
	}
	return nil, false, fmt.Errorf("claim AddressBlock %s: %d names of BlockRequests are taken", u.Name, maxTaken)
}

// specOf tells the spec of a pool from those of other times; it is empty without the pool.
func (m *Manager) specOf(ctx context.Context, pool string) (string, error) {
	p, err := m.client.AddressPools().Get(ctx, pool, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read AddressPool %s: %w", pool, err)
	}
	return fmt.Sprintf("%s/%d", p.UID, p.Generation), nil
}

// claimAnswered takes note of the answer to a claim; refused is nil when the block is the node's
// again.
func (m *Manager) claimAnswered(ctx context.Context, r *v2.BlockRequest, refused *v2.BlockRequestCondition) {
	if refused == nil {
		klog.FromContext(ctx).Info("A lost block is this node's again", "block", r.Spec.Claim)
		return
	}
	klog.FromContext(ctx).Info("A lost block wasn't made again", "block", r.Spec.Claim, "reason", refused.Reason, "message", refused.Message)
	l, ok := m.lost.Find(r.Spec.Claim)
	if !ok {
		l = lostBlock{pool: r.Spec.PoolName, pause: minClaimPause}
	}
	l.next = time.Now().Add(l.pause)
	l.pause = min(2*l.pause, maxClaimPause)
	l.final = refused.Reason == v2.ReasonPoolInvalid
	m.lost.Set(r.Spec.Claim, l)
}

// Missing counts the blocks of which pods have addresses and that the API server doesn't have for
// the node.
func (m *Manager) Missing() int {
	return len(m.lost.Copy())
}

// vanished makes the node not use a block of the cache that the API server doesn't have any more.
// The cache needn't learn of that: the watch of a server whose etcd was restored from a backup may go
// on without events for lost blocks.
func (m *Manager) vanished(ctx context.Context, b *v2.AddressBlock) error {
	live, err := m.live(ctx, b)
	if live != nil || err != nil {
		return err
	}
	m.gone.Set(b.UID, true)
	m.supply.Add(b.Labels[v2.LabelPool])
	return nil
}

// takeBack makes the node use a block again that wasn't there for a while, as when etcd was restored twice.
func (m *Manager) takeBack(b *v2.AddressBlock) {
	if m.unsure.Get(b.UID) == nil && !m.disowned(b) {
		m.gone.Delete(b.UID)
	}
}
