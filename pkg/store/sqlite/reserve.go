package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
)

// Reserve implements store.Store.
func (s *Store) Reserve(ctx context.Context, r store.Request) (store.Allocation, error) {
	var a store.Allocation
	err := checkID(r.ID)
	if err == nil {
		err = s.write(ctx, grows, func(t *txn) (err error) {
			a, err = t.reserve(r)
			return err
		})
	}
	if errors.Is(err, store.ErrReadOnly) {
		// What is recorded can be answered all the same.
		if have, gerr := s.Get(ctx, r.ID); gerr == nil && (have.State == store.Pending || have.State == store.Attached) {
			return have, nil
		}
	}
	if err != nil {
		return store.Allocation{}, fmt.Errorf("reserve an address of pool %s for %s: %w", r.Pool, r.Key(), err)
	}
	return a, nil
}

// errRecorded: the attachment has an address.
var errRecorded = errors.New("attachment is recorded")

// reserve takes an address, or returns the recorded one. The constraint that an
// attachment has one address at most tells which.
func (t *txn) reserve(r store.Request) (store.Allocation, error) {
	a, err := t.takeAny(r)
	if !errors.Is(err, errRecorded) && !errors.Is(err, store.ErrNoAddress) {
		return a, err
	}
	have, _, findErr := t.find(r.ID)
	switch {
	case errors.Is(findErr, store.ErrNotFound):
		return store.Allocation{}, err
	case findErr != nil:
		return store.Allocation{}, findErr
	case have.State == store.Releasing:
		return store.Allocation{}, fmt.Errorf("%w: %s", store.ErrState, have.State)
	}
	return have, nil
}

// takeAny takes an address of the first block that gives one.
func (t *txn) takeAny(r store.Request) (store.Allocation, error) {
	var blocks []*block
	for _, name := range r.Blocks {
		if b := t.blocks[name]; b != nil && b.Pool == r.Pool && !t.disputed[name] {
			blocks = append(blocks, b)
		}
	}
	for _, b := range blocks {
		if a, ok, err := t.take(b, r); ok || err != nil {
			return a, err
		}
	}
	if r.Yield {
		return t.takeCoolest(blocks, r)
	}
	return store.Allocation{}, store.ErrNoAddress
}

// notRecorded is errRecorded if the attachment has an address.
func (t *txn) notRecorded(id attachment.ID) error {
	_, _, err := t.find(id)
	switch {
	case err == nil:
		return errRecorded
	case errors.Is(err, store.ErrNotFound):
		return nil
	}
	return err
}

// take takes an address of b that isn't cooling; false when there is none.
func (t *txn) take(b *block, r store.Request) (store.Allocation, bool, error) {
	if b.adopted == nil || t.cooled(*b.adopted) {
		if a, ok, err := t.takeUnused(b, r); ok || err != nil {
			return a, ok, err
		}
	}
	for f := (freed{}); ; {
		var err error
		if f, err = t.oldest(b, f.seq); errors.Is(err, sql.ErrNoRows) || err == nil && !t.cooled(f.stamp) {
			return store.Allocation{}, false, nil
		} else if err != nil {
			return store.Allocation{}, false, err
		}
		if a, ok, err := t.reuse(b, f, r); ok || err != nil {
			return a, ok, err
		}
	}
}

// takeUnused takes the first address of b that has no record.
func (t *txn) takeUnused(b *block, r store.Request) (store.Allocation, bool, error) {
	for b.unused < b.Size() {
		a := t.pending(b, b.unused, r)
		n, err := t.insert(a, b, b.unused)
		if err != nil {
			return store.Allocation{}, false, err
		}
		if n == 1 {
			b.unused++
			return a, true, nil
		}
		if err := t.notRecorded(r.ID); err != nil {
			return store.Allocation{}, false, err
		}
		if err := t.row(t.w.nextUnused, b.id, b.unused).Scan(&b.unused); err != nil {
			return store.Allocation{}, false, err
		}
	}
	return store.Allocation{}, false, nil
}

// freed is a record of an address that was given up.
type freed struct {
	stamp
	rowID      int64
	ipv4, ipv6 any // text or NULL
	offset     int
}

// oldest returns the address of b that was freed first after seq;
// sql.ErrNoRows if there is none.
func (t *txn) oldest(b *block, seq int64) (freed, error) {
	var f freed
	var ms int64
	err := t.row(t.w.oldestCooling, b.id, seq).Scan(&f.rowID, &f.ipv4, &f.ipv6, &f.offset, &f.bootID, &ms, &f.seq)
	f.boottime = time.Duration(ms) * time.Millisecond
	return f, err
}

// reuse gives a freed address to r. False: another attachment, whose record
// doesn't fit the block, has an address of the offset.
func (t *txn) reuse(b *block, f freed, r store.Request) (store.Allocation, bool, error) {
	a := t.pending(b, f.offset, r)
	ipv4, ipv6 := addrArg(a.Address.IPv4), addrArg(a.Address.IPv6)
	if f.ipv4 != ipv4 || f.ipv6 != ipv6 { // the record was adopted with one family
		if n, err := t.exec(t.w.readdress, ipv4, ipv6, f.rowID); n != 1 || err != nil {
			return store.Allocation{}, false, err
		}
	}
	n, err := t.exec(t.w.reuse, formatTime(a.Since), a.BootID, a.Pool, a.Block,
		a.ContainerID, a.IfName, a.Namespace, a.Name, a.UID, a.Path, int64(a.Inode), f.rowID)
	if n == 0 && err == nil {
		err = errRecorded
	}
	return a, n == 1, err
}

// takeCoolest takes the address that was freed longest ago, of all blocks,
// cooled down or not.
func (t *txn) takeCoolest(blocks []*block, r store.Request) (store.Allocation, error) {
	type candidate struct {
		seq  int64
		take func() (store.Allocation, bool, error)
	}
	tried := int64(0) // all candidates up to this one couldn't be taken
	for {
		best := candidate{}
		offer := func(c candidate) {
			if c.seq > tried && (best.take == nil || c.seq < best.seq) {
				best = c
			}
		}
		for _, b := range blocks {
			if b.adopted != nil {
				offer(candidate{b.adopted.seq, func() (store.Allocation, bool, error) { return t.takeUnused(b, r) }})
			}
			f, err := t.oldest(b, tried)
			if errors.Is(err, sql.ErrNoRows) {
				continue
			}
			if err != nil {
				return store.Allocation{}, err
			}
			offer(candidate{f.seq, func() (store.Allocation, bool, error) { return t.reuse(b, f, r) }})
		}
		if best.take == nil {
			return store.Allocation{}, store.ErrNoAddress
		}
		if a, ok, err := best.take(); ok || err != nil {
			return a, err
		}
		tried = best.seq
	}
}

// pending is the allocation of an offset of b to r.
func (t *txn) pending(b *block, offset int, r store.Request) store.Allocation {
	return store.Allocation{
		ID: r.ID, Pod: r.Pod, Netns: r.Netns,
		State: store.Pending, Pool: b.Pool, Block: b.Name, Address: b.At(offset),
		BootID: t.bootID, Since: t.now,
	}
}

// insert records a, an address of an offset of b; b nil is none that is recorded.
// 0 when a row has the address or the offset already.
func (t *txn) insert(a store.Allocation, b *block, offset int) (int64, error) {
	var blockID, blockOffset any
	if b != nil {
		blockID, blockOffset = b.id, offset
	}
	return t.exec(t.w.insert, addrArg(a.Address.IPv4), addrArg(a.Address.IPv6), string(a.State), formatTime(a.Since), a.BootID,
		a.Pool, a.Block, blockID, blockOffset, a.ContainerID, a.IfName, a.Namespace, a.Name, a.UID, a.Path, int64(a.Inode),
		a.HostIfName, a.HostIfIndex, resultArg(a.Result))
}

func (t *txn) cooled(f stamp) bool { return t.Store.cooled(f, t.boottime) }

// checkID refuses what the schema would refuse with an error that says less.
func checkID(id attachment.ID) error {
	if id.ContainerID == "" || id.IfName == "" {
		return errors.New("container ID or interface name is empty")
	}
	return nil
}

// checkAddress refuses addresses that could be written in two ways, and none.
func checkAddress(a ipam.Address) error {
	if a == (ipam.Address{}) {
		return errors.New("there is no address")
	}
	return a.Validate()
}
