package sqlite

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/store"
)

// Attach implements store.Store.
func (s *Store) Attach(ctx context.Context, id attachment.ID, w store.Wiring) error {
	err := s.write(ctx, grows, func(t *txn) error {
		n, err := t.exec(t.w.attach, formatTime(t.now), t.bootID, w.HostIfName, w.HostIfIndex, resultArg(w.Result),
			id.ContainerID, id.IfName)
		if n == 1 || err != nil {
			return err
		}
		a, _, err := t.find(id)
		if err != nil {
			return err
		}
		return fmt.Errorf("%w: %s", store.ErrState, a.State)
	})
	if err != nil {
		return fmt.Errorf("attach %s: %w", id.Key(), err)
	}
	return nil
}

// Adopt implements store.Store.
func (s *Store) Adopt(ctx context.Context, a store.Allocation) error {
	err := errors.Join(checkID(a.ID), checkAddress(a.Address))
	if err == nil {
		err = s.write(ctx, grows, func(t *txn) error { return t.adopt(a) })
	}
	if err != nil {
		return fmt.Errorf("adopt %s of %s: %w", a.Address, a.Key(), err)
	}
	return nil
}

func (t *txn) adopt(a store.Allocation) error {
	have, row, err := t.find(a.ID)
	if err == nil {
		return t.adoptKnown(have, row, a)
	}
	if !errors.Is(err, store.ErrNotFound) {
		return err
	}
	b, offset := t.blockOf(a.Address)
	for _, x := range a.Address.Addrs() {
		old, row, err := t.holder(x)
		if errors.Is(err, store.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		if old.State != store.Cooling {
			return fmt.Errorf("%w: %s has %s", store.ErrConflict, old.Key(), old.Address)
		}
		if _, err := t.exec(t.w.delete, row); err != nil {
			return err
		}
	}
	a.State, a.BootID, a.Since = store.Attached, t.bootID, t.now
	if b != nil {
		a.Block = b.Name
		if a.Pool == "" {
			a.Pool = b.Pool
		}
	}
	n, err := t.insert(a, b, offset)
	if err == nil && n == 0 && b != nil {
		// Its offset has the record of the other family's address.
		n, err = t.insert(a, nil, 0)
	}
	if err == nil && n == 0 {
		return store.ErrConflict
	}
	return err
}

// adoptKnown makes a record attached and adds what the kernel knows better.
func (t *txn) adoptKnown(have store.Allocation, row int64, a store.Allocation) error {
	if have.Address != a.Address {
		return fmt.Errorf("%w: its record has %s", store.ErrConflict, have.Address)
	}
	if have.State == store.Releasing {
		return fmt.Errorf("%w: %s", store.ErrState, have.State)
	}
	want := have
	for _, f := range []struct {
		to   *string
		from string
	}{{&want.Namespace, a.Namespace}, {&want.Name, a.Name}, {&want.UID, a.UID}, {&want.Path, a.Path}, {&want.HostIfName, a.HostIfName}} {
		if f.from != "" {
			*f.to = f.from
		}
	}
	if a.Inode != 0 {
		want.Inode = a.Inode
	}
	if a.HostIfIndex != 0 {
		want.HostIfIndex = a.HostIfIndex
	}
	if len(a.Result) > 0 {
		want.Result = a.Result
	}
	if want.Pool == "" {
		want.Pool = a.Pool
	}
	if have.State != store.Attached || have.BootID != t.bootID {
		want.State, want.BootID, want.Since = store.Attached, t.bootID, t.now
	}
	if want.Pod == have.Pod && want.Netns == have.Netns && want.Pool == have.Pool && want.State == have.State && want.BootID == have.BootID &&
		want.HostIfName == have.HostIfName && want.HostIfIndex == have.HostIfIndex && slices.Equal(want.Result, have.Result) {
		return nil
	}
	_, err := t.exec(t.w.adopt, formatTime(want.Since), want.BootID, want.Pool, want.Namespace, want.Name, want.UID,
		want.Path, int64(want.Inode), want.HostIfName, want.HostIfIndex, resultArg(want.Result), row)
	return err
}

// Release implements store.Store.
func (s *Store) Release(ctx context.Context, id attachment.ID) (store.Allocation, error) {
	var a store.Allocation
	err := s.write(ctx, givesBack, func(t *txn) (err error) {
		a, _, err = scan(t.row(t.w.release, formatTime(t.now), t.bootID, id.ContainerID, id.IfName))
		if errors.Is(err, store.ErrNotFound) {
			a, _, err = t.find(id) // releasing already, or nothing
		}
		return err
	})
	if err != nil {
		return store.Allocation{}, fmt.Errorf("release %s: %w", id.Key(), err)
	}
	return a, nil
}

// Cool implements store.Store.
func (s *Store) Cool(ctx context.Context, ids ...attachment.ID) error {
	if len(ids) == 0 {
		return nil
	}
	err := s.write(ctx, givesBack, func(t *txn) error {
		for _, id := range ids {
			if _, err := t.exec(t.w.cool, formatTime(t.now), t.bootID, t.nextSeq(), t.boottimeMS(),
				id.ContainerID, id.IfName); err != nil {
				return fmt.Errorf("%s: %w", id.Key(), err)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("cool down released addresses: %w", err)
	}
	return nil
}
