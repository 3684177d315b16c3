// Package ledger knows which blocks of pools are free, as far as one process can know.
//
// It owns the search for a free block, and the marks of blocks that are about to be made. It must not know for whom a block is, nor
// the API server, which lets one block of a name exist: that is the lock.
package ledger

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// MarkLife is for how long an index is believed to be taken that only an answer of
// the API server says so about, and no event. Events come within seconds.
const MarkLife = time.Minute

// maxSkipped bounds the search for a block that shares no addresses with others:
// an existing block covers no more than this many of the smallest size.
const maxSkipped = 1 << ipam.MaxBlockSizeBits

// Ledger is this process's view of the blocks of all pools: the cache of blocks
// and, before their events come, the blocks that it made or ran into. It only
// chooses the candidates; creating a block takes it.
type Ledger struct {
	now func() time.Time
	// complete is closed when it has all blocks that the API server had when this process began to lead.
	complete chan struct{}

	// mu guards all below and is never held over a call of the API server.
	mu     sync.Mutex
	pools  map[string]*account
	blocks holders
	nodes  holders // their own addresses, which no pod can have
	// contested are blocks, by name, that one node claims and another one holds. When the latter gives
	// one back, nobody but the former may have it.
	contested map[string]contest
}

// ContestLife is longer than a node takes to claim a block again that it was refused.
const ContestLife = 15 * time.Minute

// maxContests is how many blocks are kept for one node at once: more than a backup can have cost it.
const maxContests = 64

// Contest is a claim that was refused because another node has the block.
type contest struct {
	node string // that claims it
	at   time.Time
}

// account is the part of the ledger of one pool name.
type account struct {
	uid  types.UID
	last int32
	// taken are the indexes whose names are taken, marks those of them that no event
	// has shown yet.
	taken map[int32]struct{}
	marks map[int32]*mark
	// busy counts the requests that may be creating a block.
	busy int
}

// mark is a belief about an index: when it began, and which node has the block.
type mark struct {
	at   time.Time
	node string
}

// New returns an empty ledger that reads the time from now.
func New(now func() time.Time) *Ledger {
	return &Ledger{now: now, complete: make(chan struct{}), pools: map[string]*account{}, contested: map[string]contest{}}
}

// account must be called with mu held.
func (l *Ledger) account(pool string) *account {
	a := l.pools[pool]
	if a == nil {
		a = &account{last: -1, taken: map[int32]struct{}{}, marks: map[int32]*mark{}}
		l.pools[pool] = a
	}
	return a
}

// See records a block of the cache.
func (l *Ledger) See(b *v2.AddressBlock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.blocks.hold(b.Name, ipam.Prefixes(b.IPv4, b.IPv6))
	if pool, index, ok := pools.SplitBlockName(b.Name); ok {
		a := l.account(pool)
		a.taken[index] = struct{}{}
		delete(a.marks, index)
	}
}

// Miss records that a block has left the cache.
func (l *Ledger) Miss(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.free(name)
}

// free must be called with mu held.
func (l *Ledger) free(name string) {
	l.blocks.hold(name, nil)
	if pool, index, ok := pools.SplitBlockName(name); ok {
		a := l.account(pool)
		delete(a.taken, index)
		delete(a.marks, index)
		if a.uid == "" && a.busy == 0 && len(a.taken) == 0 {
			delete(l.pools, pool) // nothing carves from it
		}
	}
}

// SeeNode records the InternalIPs of a Node; none if it is gone.
func (l *Ledger) SeeNode(name string, addrs []netip.Addr) {
	var ps []netip.Prefix
	for _, a := range addrs {
		ps = append(ps, netip.PrefixFrom(a, a.BitLen()))
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.nodes.hold(name, ps)
}

// Begin says that a block of the pool may be created from now on until the
// returned function is called.
func (l *Ledger) Begin(pool string) (end func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.account(pool)
	a.busy++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		a.busy--
	}
}

// Open makes a pool that is new in the ledger, or was made again under the same
// name, go on after the index that its status has.
func (l *Ledger) Open(p *v2.AddressPool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.account(p.Name)
	if a.uid == p.UID {
		return
	}
	a.uid, a.last = p.UID, -1
	if p.Status.LastIndex != nil {
		a.last = *p.Status.LastIndex
		return
	}
	// A pool of Coil 2.x: its highest block is the best guess.
	for i := range a.taken {
		a.last = max(a.last, i)
	}
}

// Busy says whether a block of the pool may be about to be created.
func (l *Ledger) Busy(pool string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.pools[pool]
	return a != nil && a.busy > 0
}

// LastIndex returns the index that was carved last, nil if this process has carved
// none of the pool.
func (l *Ledger) LastIndex(pool string, uid types.UID) *int32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.pools[pool]
	if a == nil || a.uid != uid || a.last < 0 {
		return nil
	}
	return new(a.last)
}

// Candidate is a block of a pool that seems to be free.
type Candidate struct {
	Index int32
	Block ipam.Block
	mark  *mark
}

// NoneFree is why a pool has no candidate.
type NoneFree struct {
	// total counts the blocks that may be carved, excluded the others.
	total, excluded int64
	// overlapping counts the blocks that are free but share addresses with others, or with Nodes.
	overlapping int
}

func (e *NoneFree) Error() string {
	but := ""
	if e.excluded > 0 {
		but = fmt.Sprintf(" that spec.exclude leaves, without %d,", e.excluded)
	}
	if e.overlapping > 0 {
		return fmt.Sprintf("each of its %d blocks%s is taken, shares addresses with an existing block of another name, or has the address of a Node", e.total, but)
	}
	return fmt.Sprintf("all of its %d blocks%s are taken", e.total, but)
}

// Pick returns the next block of a pool that seems to be free and marks it for a node, so that
// nobody else picks it; the error is a *NoneFree. A block that shares addresses
// with an existing one, of whatever pool, or with a Node isn't free.
func (l *Ledger) Pick(pool string, p ipam.Pool, node string) (Candidate, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.account(pool)
	l.expire(pool, a)
	l.expireContests()
	last, skipped := a.last, 0
	for index := range p.Free(last, a.taken) {
		if skipped == maxSkipped {
			a.last = last // the next request goes on from here
			break
		}
		b, err := p.Block(index)
		if err != nil {
			return Candidate{}, err
		}
		if _, contested := l.contested[pools.BlockName(pool, index)]; !contested && !l.blocks.overlap(b) && !l.nodes.overlap(b) {
			a.last = index
			return Candidate{index, b, l.mark(pool, index, node, b.Prefixes())}, nil
		}
		last = index
		skipped++
	}
	return Candidate{}, &NoneFree{total: p.Available(), excluded: p.Total() - p.Available(), overlapping: skipped}
}

// Claim marks a block that a node holds already and that doesn't exist, and returns false if another one
// has addresses of it. Carving goes on behind it: those up to there may be lost likewise.
func (l *Ledger) Claim(pool string, index int32, b ipam.Block, node string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	name := pools.BlockName(pool, index)
	// The cache may still show the block: the watch of claims can be ahead of that of blocks.
	seen := l.blocks.by[name]
	l.blocks.hold(name, nil)
	if l.blocks.overlap(b) {
		l.blocks.hold(name, seen)
		return false
	}
	l.mark(pool, index, node, b.Prefixes())
	a := l.account(pool)
	a.last = max(a.last, index)
	delete(l.contested, name)
	return true
}

// NodeWithin returns the first Node by name, other than one, that has an address of the block.
func (l *Ledger) NodeWithin(b ipam.Block, other string) (name string, addr netip.Addr, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.nodes.overlap(b) {
		return "", netip.Addr{}, false
	}
	for _, name := range slices.Sorted(maps.Keys(l.nodes.by)) {
		for _, own := range l.nodes.by[name] {
			if name != other && slices.ContainsFunc(b.Prefixes(), own.Overlaps) {
				return name, own.Addr(), true
			}
		}
	}
	return "", netip.Addr{}, false
}

// Contest says that a node claims a block that another one holds.
func (l *Ledger) Contest(block, node string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.expireContests()
	n := 0
	for name, c := range l.contested {
		if c.node == node && name != block {
			n++
		}
	}
	if n < maxContests {
		l.contested[block] = contest{node, l.now()}
	}
}

// Contested says whether one node claims a block that another one holds or held.
func (l *Ledger) Contested(block string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.expireContests()
	_, ok := l.contested[block]
	return ok
}

// expireContests must be called with mu held.
func (l *Ledger) expireContests() {
	maps.DeleteFunc(l.contested, func(_ string, c contest) bool { return l.now().Sub(c.at) > ContestLife })
}

// Complete says that the ledger has all blocks that the API server has. It is called once.
func (l *Ledger) Complete() { close(l.complete) }

// WaitComplete waits for Complete. The error is that of ctx.
func (l *Ledger) WaitComplete(ctx context.Context) error {
	select {
	case <-l.complete:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Take marks the block of an index, so that nobody else picks it. It returns false if the block isn't free.
func (l *Ledger) Take(pool string, index int32, b ipam.Block) (Candidate, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.account(pool)
	l.expire(pool, a)
	l.expireContests()
	name := pools.BlockName(pool, index)
	_, taken := a.taken[index]
	_, contested := l.contested[name]
	if taken || contested || l.blocks.overlap(b) || l.nodes.overlap(b) {
		return Candidate{}, false
	}
	return Candidate{index, b, l.mark(pool, index, "", b.Prefixes())}, true
}

// Within returns the names of the blocks and of the Nodes that have an address of b, sorted.
func (l *Ledger) Within(b ipam.Block) (blocks, nodes []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.blocks.within(b), l.nodes.within(b)
}

// Renew makes the mark of a candidate begin anew, and returns false if it isn't there any more: it has
// ended, may be that of another candidate, or an event has shown a block.
func (l *Ledger) Renew(pool string, c Candidate) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.account(pool).marks[c.Index] != c.mark {
		return false
	}
	c.mark.at = l.now()
	return true
}

// mark must be called with mu held.
func (l *Ledger) mark(pool string, index int32, node string, ps []netip.Prefix) *mark {
	a, m := l.account(pool), &mark{l.now(), node}
	a.taken[index] = struct{}{}
	a.marks[index] = m
	l.blocks.hold(pools.BlockName(pool, index), ps)
	return m
}

// Unseen returns the names of a pool's blocks that a node has or is about to get and that no event has shown yet.
func (l *Ledger) Unseen(pool, node string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.account(pool)
	l.expire(pool, a)
	var names []string
	for index, m := range a.marks {
		if m.node == node {
			names = append(names, pools.BlockName(pool, index))
		}
	}
	return names
}

// Found records a block that the API server has and the cache doesn't show yet.
func (l *Ledger) Found(b *v2.AddressBlock) {
	pool, index, ok := pools.SplitBlockName(b.Name)
	if !ok {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.account(pool)
	_, taken := a.taken[index]
	_, marked := a.marks[index]
	if !taken || marked {
		l.mark(pool, index, b.Labels[v2.LabelNode], ipam.Prefixes(b.IPv4, b.IPv6))
	}
}

// Release takes back a pick whose block was not created.
func (l *Ledger) Release(pool string, index int32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.account(pool).marks[index]; ok {
		l.free(pools.BlockName(pool, index))
	}
}

// expire forgets marks that no event has confirmed; mu must be held. Should the
// block come into being later, the API server refuses a second one of its name.
func (l *Ledger) expire(pool string, a *account) {
	for index, m := range a.marks {
		if l.now().Sub(m.at) > MarkLife {
			l.free(pools.BlockName(pool, index))
		}
	}
}

// Forget drops what is left of a pool that is gone. Blocks that still exist under
// its name keep their names locked.
func (l *Ledger) Forget(pool string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.pools[pool]
	if a == nil || a.busy > 0 {
		return
	}
	if len(a.taken) == 0 {
		delete(l.pools, pool)
		return
	}
	a.uid, a.last = "", -1
}
