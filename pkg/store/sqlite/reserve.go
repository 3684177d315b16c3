package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
)

// Reserve implements store.Store.
func (s *Store) Reserve(ctx context.Context, r store.Request) (store.Allocation, error) {
	what := fmt.Sprintf("reserve an address of pool %s for %s", r.Pool, r.Key())
	if err := checkID(r.ID); err != nil {
		return store.Allocation{}, fmt.Errorf("%s: %w", what, err)
	}
	var a store.Allocation
	err := s.write(ctx, grows, what, func(t *txn) (err error) {
		a, err = t.reserve(r)
		return err
	})
	if errors.Is(err, store.ErrReadOnly) {
		// A recorded address can be answered all the same.
		if have, gerr := s.Get(ctx, r.ID); gerr == nil && (have.State == store.Pending || have.State == store.Attached) {
			return have, nil
		}
	}
	if err != nil {
		return store.Allocation{}, err
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
	have, findErr := t.find(r.ID)
	switch {
	case errors.Is(findErr, store.ErrNotFound):
		return store.Allocation{}, err
	case findErr == nil && have.State == store.Releasing:
		return store.Allocation{}, fmt.Errorf("%w: %s", store.ErrState, have.State)
	}
	return have.Allocation, findErr
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
		if a, err := t.take(b, r); !errors.Is(err, store.ErrNoAddress) {
			return a, err
		}
	}
	if r.Yield {
		return t.takeCoolest(blocks, r)
	}
	return store.Allocation{}, store.ErrNoAddress
}

// take takes an address of b that isn't cooling; store.ErrNoAddress when there is none.
func (t *txn) take(b *block, r store.Request) (store.Allocation, error) {
	if t.cooled(b.adopted) {
		if a, err := t.takeUnused(b, r); !errors.Is(err, store.ErrNoAddress) {
			return a, err
		}
	}
	for f := (freed{}); ; {
		var err error
		if f, err = t.oldest(b, f.seq); err == nil && !t.cooled(f.stamp) {
			err = store.ErrNoAddress
		}
		if err != nil {
			return store.Allocation{}, err
		}
		if a, err := t.reuse(b, f, r); !errors.Is(err, store.ErrNoAddress) {
			return a, err
		}
	}
}

// takeUnused takes the first address of b that has no record.
func (t *txn) takeUnused(b *block, r store.Request) (store.Allocation, error) {
	for b.unused < b.Size() {
		a := t.pending(b, b.unused, r)
		n, err := t.insert(a, b, b.unused)
		if n == 1 && err == nil {
			b.unused++
			return a, nil
		}
		if err == nil {
			_, err = t.find(r.ID)
		}
		switch {
		case err == nil:
			return store.Allocation{}, errRecorded
		case errors.Is(err, store.ErrNotFound): // then it is the offset that has a record
			err = t.row(nextUnusedSQL, b.id, b.unused).Scan(&b.unused)
		}
		if err != nil {
			return store.Allocation{}, err
		}
	}
	return store.Allocation{}, store.ErrNoAddress
}

// freed is a record of an address that was given up.
type freed struct {
	stamp
	id         int64
	ipv4, ipv6 any // text or NULL
	offset     int
}

// oldest returns the address of b that was freed first after seq;
// store.ErrNoAddress if there is none.
func (t *txn) oldest(b *block, seq int64) (freed, error) {
	var f freed
	err := t.row(oldestCoolingSQL, b.id, seq).Scan(&f.id, &f.ipv4, &f.ipv6, &f.offset, &f.bootID, &f.boottimeMS, &f.seq)
	if errors.Is(err, sql.ErrNoRows) {
		err = store.ErrNoAddress
	}
	return f, err
}

// reuse gives a freed address to r. store.ErrNoAddress: another attachment, whose record
// doesn't fit the block, has an address of the offset.
func (t *txn) reuse(b *block, f freed, r store.Request) (store.Allocation, error) {
	a := t.pending(b, f.offset, r)
	ipv4, ipv6 := orNull(a.Address.IPv4), orNull(a.Address.IPv6)
	if f.ipv4 != ipv4 || f.ipv6 != ipv6 { // the record was adopted with one family
		if n, err := t.exec(readdressSQL, ipv4, ipv6, f.id); n != 1 || err != nil {
			return store.Allocation{}, cmp.Or(err, store.ErrNoAddress)
		}
	}
	n, err := t.exec(reuseSQL, formatTime(a.Since), a.BootID, a.Pool, a.Block,
		a.ContainerID, a.IfName, a.Namespace, a.Name, a.UID, a.Path, int64(a.Inode), f.id)
	if n == 0 && err == nil {
		err = errRecorded
	}
	return a, err
}

// takeCoolest takes the address that was freed longest ago, of all blocks,
// cooled down or not.
func (t *txn) takeCoolest(blocks []*block, r store.Request) (store.Allocation, error) {
	for tried := int64(0); ; { // no address that was freed up to then could be taken
		var take func() (store.Allocation, error)
		first := int64(math.MaxInt64)
		for _, b := range blocks {
			if seq := b.adopted.seq; seq > tried && seq < first {
				first, take = seq, func() (store.Allocation, error) { return t.takeUnused(b, r) }
			}
			f, err := t.oldest(b, tried)
			if err != nil && !errors.Is(err, store.ErrNoAddress) {
				return store.Allocation{}, err
			}
			if err == nil && f.seq < first {
				first, take = f.seq, func() (store.Allocation, error) { return t.reuse(b, f, r) }
			}
		}
		if take == nil {
			return store.Allocation{}, store.ErrNoAddress
		}
		if a, err := take(); !errors.Is(err, store.ErrNoAddress) {
			return a, err
		}
		tried = first
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
	return t.exec(insertSQL, orNull(a.Address.IPv4), orNull(a.Address.IPv6), string(a.State), formatTime(a.Since), a.BootID,
		a.Pool, a.Block, blockID, blockOffset, a.ContainerID, a.IfName, a.Namespace, a.Name, a.UID, a.Path, int64(a.Inode),
		a.HostIfName, a.HostIfIndex, resultArg(a.Result))
}

func (t *txn) cooled(f stamp) bool { return t.Store.cooled(f, t.boottime) }

// checkID refuses an ID that the schema would refuse with an error that says less.
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
