package blocks

import (
	"context"
	cryptorand "crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/syncmap"
)

// requestName is the name of a BlockRequest for a block of a pool.
func requestName(node string, uid types.UID, pool string, sequence int) string {
	return fmt.Sprintf("%s-%d", namePrefix(node, uid, pool), sequence)
}

// claimName is the name of the BlockRequest that claims a block: a node has one for each at a time.
func claimName(node string, uid types.UID, block string) string {
	return namePrefix(node, uid, block) + "-claim"
}

// namePrefix is the first part of the name of a node's BlockRequest about an object. The hash tells nodes and objects
// apart whose names joined by hyphens are the same.
func namePrefix(node string, uid types.UID, object string) string {
	const maxReadable = 200
	readable := object + "-" + node
	sum := sha256.Sum256([]byte(node + "/" + string(uid) + "/" + object))
	return readable[:min(len(readable), maxReadable)] + "-" + hex.EncodeToString(sum[:4])
}

// asked has the facts about the node's BlockRequests beyond the cache, which
// lags behind: the next sequence, the request that the cache doesn't show yet, and
// requests that it still shows though they are dealt with.
type asked struct {
	sequence syncmap.Map[string, int]    // by pool
	attempts syncmap.Map[string, string] // by pool: AnnotationAttempt of the next request, until it is known to exist
	latest   syncmap.Map[string, latest]
	handled  syncmap.Map[types.UID, handled]
	// own are the requests that this process made, or saw without an answer, until the block that
	// answered one is given back. Others may have come back with a restore of etcd.
	own syncmap.Map[types.UID, string] // the block; empty as long as there is no answer
}

// handled is a request that is dealt with.
type handled struct {
	answer string // the block; "" if it was refused
	at     time.Time
}

type latest struct {
	uid types.UID
	at  time.Time
}

// unseen says whether the cache may not show the request yet.
func (l latest) unseen() bool { return time.Since(l.at) < cacheLag }

// cacheLag is how long the cache is believed to lag at most; then what it shows is
// true.
const cacheLag = 10 * time.Second

// answered says whether a request of the cache is dealt with, and that the cache
// shows it.
func (a *asked) answered(pool string, r *v2.BlockRequest) bool {
	if a.latest.Get(pool).uid == r.UID {
		a.latest.Delete(pool)
	}
	_, ok := a.handled.Find(r.UID)
	return ok || r.DeletionTimestamp != nil
}

func (a *asked) done(r *v2.BlockRequest) {
	a.handled.DeleteFunc(func(_ types.UID, h handled) bool { return time.Since(h.at) > time.Hour })
	a.handled.Set(r.UID, handled{r.Status.AddressBlockName, time.Now()})
	if r.Status.AddressBlockName == "" {
		a.own.Delete(r.UID)
	} else if a.isOwn(r.UID) {
		a.own.Set(r.UID, r.Status.AddressBlockName)
	}
}

// isOwn says whether a request is one of own.
func (a *asked) isOwn(uid types.UID) bool {
	_, ok := a.own.Find(uid)
	return ok
}

// gaveBack forgets the requests that a block answered.
func (a *asked) gaveBack(block string) {
	a.own.DeleteFunc(func(_ types.UID, b string) bool { return b == block })
}

// isLatest says whether a request is one that the cache doesn't show yet.
func (a *asked) isLatest(pool string, uid types.UID) bool {
	l := a.latest.Get(pool)
	return l.uid == uid && l.unseen()
}

// unseen says whether the cache doesn't show the latest request of a pool yet.
func (a *asked) unseen(pool string) bool { return a.latest.Get(pool).unseen() }

// forget forgets the requests for a pool, unless the cache may not show the latest yet. The next one may get
// a name again that is taken, and is skipped then.
func (a *asked) forget(pool string) {
	if !a.unseen(pool) {
		a.latest.Delete(pool)
		a.sequence.Delete(pool)
		a.attempts.Delete(pool)
	}
}

// next is the sequence of the next request.
func (a *asked) next(pool string) int { return a.sequence.Get(pool) }

// attempt is the AnnotationAttempt of the next request.
func (a *asked) attempt(pool string) string {
	if _, ok := a.attempts.Find(pool); !ok {
		a.attempts.Set(pool, cryptorand.Text())
	}
	return a.attempts.Get(pool)
}

// skip makes the next request one of another name.
func (a *asked) skip(pool string) { a.goOn(pool, a.next(pool)+1) }

// jump makes the next request one of a name that nobody can tell.
func (a *asked) jump(pool string) { a.goOn(pool, rand.Int()/2) }

func (a *asked) goOn(pool string, sequence int) {
	a.sequence.Set(pool, sequence)
	a.attempts.Delete(pool)
}

func (a *asked) created(pool string, uid types.UID) {
	a.skip(pool)
	a.latest.Set(pool, latest{uid, time.Now()})
	a.own.Set(uid, "")
}

// nextRequest is the name of the next BlockRequest for a pool.
func (m *Manager) nextRequest(pool string) string {
	return requestName(m.cfg.NodeName, m.cfg.NodeUID, pool, m.asked.next(pool))
}

// attempted says whether a BlockRequest is the next one of its pool, made by an attempt that had no clear answer.
func (m *Manager) attempted(r *v2.BlockRequest) bool {
	attempt, ok := m.asked.attempts.Find(r.Spec.PoolName)
	return ok && attempt == r.Annotations[v2.AnnotationAttempt]
}

// request creates the next BlockRequest of a pool. The sequence advances only
// when a request of the name is known to exist, so that a create whose answer was
// lost isn't followed by a second request. A name that another node has taken may be one of many.
func (m *Manager) request(ctx context.Context, pool string) error {
	for range maxTaken {
		r := m.newRequest(m.nextRequest(pool), pool)
		r.Annotations = map[string]string{v2.AnnotationAttempt: m.asked.attempt(pool)}
		have, fresh, err := m.create(ctx, r)
		switch {
		case apierrors.IsInvalid(err):
			// The name of the pool comes from an annotation: it may be anything.
			m.news.tell(pool, fmt.Errorf("%q can't be the name of an AddressPool: %w", pool, err))
			return nil
		case err != nil:
			return fmt.Errorf("create BlockRequest %s: %w", r.Name, err)
		case have != nil && !m.isOwn(have):
			m.asked.jump(pool)
		case have == nil, !fresh && !m.attempted(have) && (m.asked.answered(pool, have) || isAnswered(have)):
			m.asked.skip(pool) // from an earlier need, and on its way out
		default:
			faultpoint.At(faultpoint.BlockAsked)
			m.asked.created(pool, have.UID)
			klog.FromContext(ctx).V(2).Info("Asked for a block", "pool", pool, "request", r.Name)
			return nil
		}
	}
	return fmt.Errorf("ask for a block of AddressPool %s: %d names of BlockRequests are taken", pool, maxTaken)
}

// create creates a BlockRequest, or returns the one that has its name; nil if that was deleted just now. fresh says
// that it was created.
func (m *Manager) create(ctx context.Context, r *v2.BlockRequest) (have *v2.BlockRequest, fresh bool, err error) {
	have, err = m.client.BlockRequests().Create(ctx, r, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		return have, true, err
	}
	have, err = m.client.BlockRequests().Get(ctx, r.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("read the one that exists: %w", err)
	}
	return have, false, nil
}

// isOwn says whether a BlockRequest is this node's. Any node's token can tell the names of others, and take them.
func (m *Manager) isOwn(r *v2.BlockRequest) bool { return r.Spec.NodeName == m.cfg.NodeName }

// maxTaken is how many names are tried at a time.
const maxTaken = 16

// newRequest returns a BlockRequest of the node.
func (m *Manager) newRequest(name, pool string) *v2.BlockRequest {
	return &v2.BlockRequest{
		ObjectMeta: metav1.ObjectMeta{
			Name:   name,
			Labels: map[string]string{v2.LabelNode: m.cfg.NodeName},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "v1", Kind: "Node", Name: m.cfg.NodeName, UID: m.cfg.NodeUID,
			}},
		},
		Spec: v2.BlockRequestSpec{NodeName: m.cfg.NodeName, PoolName: pool},
	}
}

// poolTimeout is how long the API server may take to show a pool.
const poolTimeout = 5 * time.Second

// askInVain returns for how long a pool isn't asked without need because it would refuse as it did
// before; 0 if it may give a block. Its status is read, since a refused request is four writes, and all
// nodes of a cluster ask an exhausted pool.
func (m *Manager) askInVain(ctx context.Context, pool string) time.Duration {
	if !m.news.hasRefused(pool) {
		return 0
	}
	ctx, cancel := context.WithTimeout(ctx, poolTimeout)
	defer cancel()
	p, err := m.client.AddressPools().Get(ctx, pool, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		klog.FromContext(ctx).V(2).Info("The pool can't be read, and is asked", "pool", pool, "reason", err)
		return 0
	}
	if err == nil && mayGive(p) {
		return 0
	}
	return m.news.postpone(pool)
}

// mayGive says whether a pool gives blocks, as far as its status is about its present spec.
func mayGive(p *v2.AddressPool) bool {
	if p.DeletionTimestamp != nil || p.Spec.Drain {
		return false
	}
	if p.Status.ObservedGeneration != p.Generation {
		return true
	}
	return !meta.IsStatusConditionTrue(p.Status.Conditions, v2.PoolExhausted) && !meta.IsStatusConditionTrue(p.Status.Conditions, v2.PoolSuspended)
}

func isAnswered(r *v2.BlockRequest) bool {
	return r.TrueCondition(v2.BlockRequestComplete) != nil || r.TrueCondition(v2.BlockRequestFailed) != nil
}

// deleteRequest deletes an answered request; another of the same name stays.
func (m *Manager) deleteRequest(ctx context.Context, r *v2.BlockRequest) error {
	err := m.client.BlockRequests().Delete(ctx, r.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &r.UID},
	})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete BlockRequest %s: %w", r.Name, err)
	}
	return nil
}

// answers returns the requests of a pool that are answered and not dealt with, and says whether one of them
// has no answer yet.
func (m *Manager) answers(ctx context.Context, pool string) (answered []*v2.BlockRequest, open bool, err error) {
	for _, r := range m.requests.All() {
		if r.Spec.PoolName != pool || r.Spec.NodeName != m.cfg.NodeName || m.asked.answered(pool, r) {
			continue
		}
		if !isAnswered(r) && !m.asked.isOwn(r.UID) {
			m.asked.own.Set(r.UID, "")
		}
		arrived := r.TrueCondition(v2.BlockRequestFailed) != nil
		if !arrived {
			if arrived, err = m.arrived(ctx, r); err != nil {
				return nil, false, err
			}
		}
		if arrived {
			answered = append(answered, r)
		}
		open = open || !arrived
	}
	return answered, open || m.asked.unseen(pool), nil
}

// takeAnswers deals with the answered requests of a pool. Blocks that came by them are recorded: without its request,
// one that isn't would be given back.
func (m *Manager) takeAnswers(ctx context.Context, pool string, answered []*v2.BlockRequest) error {
	for _, r := range answered {
		failed := r.TrueCondition(v2.BlockRequestFailed)
		faultpoint.At(faultpoint.BlockSeen)
		if err := m.deleteRequest(ctx, r); err != nil {
			return err
		}
		faultpoint.At(faultpoint.BlockRequested)
		m.asked.done(r)
		if r.Spec.Claim != "" {
			if got := r.Status.AddressBlockName; failed == nil && got != r.Spec.Claim {
				failed = &v2.BlockRequestCondition{
					Reason: "OtherBlock", Message: fmt.Sprintf("The answer is AddressBlock %q: coil-ipam-controller may be older than coild", got),
				}
			}
			m.claimAnswered(ctx, r, failed)
			continue
		}
		if failed != nil {
			m.news.tell(pool, errors.New(failed.Message)) // a sentence for people that names the pool
			m.forgetPool(pool)
		}
	}
	return nil
}

// arrived says whether the block that answers a request is in the cache, or was
// there, or never comes because it is another's: nobody has to wait for it any more.
func (m *Manager) arrived(ctx context.Context, r *v2.BlockRequest) (bool, error) {
	name := r.Status.AddressBlockName
	if name == "" || r.TrueCondition(v2.BlockRequestComplete) == nil {
		return false, nil
	}
	if m.blocks.Find(name) != nil {
		return true, nil
	}
	live, err := m.client.AddressBlocks().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("read AddressBlock %s: %w", name, err)
	}
	// Otherwise its event will come.
	return live.Labels[v2.LabelNode] != m.cfg.NodeName || live.Labels[v2.LabelRequest] != string(r.UID), nil
}
