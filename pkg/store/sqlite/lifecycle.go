package sqlite

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/store"
)

// Attach implements store.Store.
func (s *Store) Attach(ctx context.Context, id attachment.ID, w store.Wiring) error {
	return s.write(ctx, grows, "attach "+id.Key(), func(t *txn) error {
		n, err := t.exec(attachSQL, formatTime(t.now), t.bootID, w.HostIfName, w.HostIfIndex, resultArg(w.Result),
			id.ContainerID, id.IfName)
		if n == 1 || err != nil {
			return err
		}
		r, err := t.find(id)
		if err != nil {
			return err
		}
		return fmt.Errorf("%w: %s", store.ErrState, r.State)
	})
}

// Adopt implements store.Store.
func (s *Store) Adopt(ctx context.Context, a store.Allocation) error {
	what := fmt.Sprintf("adopt %s of %s", a.Address, a.Key())
	if err := errors.Join(checkID(a.ID), checkAddress(a.Address)); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return s.write(ctx, grows, what, func(t *txn) error { return t.adopt(a) })
}

func (t *txn) adopt(a store.Allocation) error {
	have, err := t.find(a.ID)
	if err == nil {
		return t.adoptKnown(have, a)
	}
	if !errors.Is(err, store.ErrNotFound) {
		return err
	}
	b, offset := t.blockOf(a.Address)
	for _, x := range a.Address.Addrs() {
		old, err := scan(t.row(findAddressSQL, x.String())) // cooling or not
		if errors.Is(err, store.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		if old.State != store.Cooling {
			return fmt.Errorf("%w: %s has %s", store.ErrConflict, old.Key(), old.Address)
		}
		if _, err := t.exec(deleteSQL, old.id); err != nil {
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

// adoptKnown makes a record attached, and takes over the fields that the kernel knows better.
func (t *txn) adoptKnown(have record, a store.Allocation) error {
	if have.Address != a.Address {
		return fmt.Errorf("%w: its record has %s", store.ErrConflict, have.Address)
	}
	if have.State == store.Releasing {
		return fmt.Errorf("%w: %s", store.ErrState, have.State)
	}
	want := have
	want.Namespace, want.Name, want.UID = cmp.Or(a.Namespace, have.Namespace), cmp.Or(a.Name, have.Name), cmp.Or(a.UID, have.UID)
	want.Path, want.Inode = cmp.Or(a.Path, have.Path), cmp.Or(a.Inode, have.Inode)
	want.HostIfName, want.HostIfIndex = cmp.Or(a.HostIfName, have.HostIfName), cmp.Or(a.HostIfIndex, have.HostIfIndex)
	want.Pool = cmp.Or(have.Pool, a.Pool)
	if len(a.Result) > 0 {
		want.Result = a.Result
	}
	if have.State != store.Attached || have.BootID != t.bootID {
		want.State, want.BootID, want.Since = store.Attached, t.bootID, t.now
	}
	if reflect.DeepEqual(want, have) {
		return nil
	}
	_, err := t.exec(adoptSQL, formatTime(want.Since), want.BootID, want.Pool, want.Namespace, want.Name, want.UID,
		want.Path, int64(want.Inode), want.HostIfName, want.HostIfIndex, resultArg(want.Result), have.id)
	return err
}

// Release implements store.Store.
func (s *Store) Release(ctx context.Context, id attachment.ID) (store.Allocation, error) {
	var a store.Allocation
	err := s.write(ctx, givesBack, "release "+id.Key(), func(t *txn) (err error) {
		a, err = allocation(t.row(releaseSQL, formatTime(t.now), t.bootID, id.ContainerID, id.IfName))
		if errors.Is(err, store.ErrNotFound) {
			a, err = allocation(t.row(findSQL, id.ContainerID, id.IfName)) // releasing already, or nothing
		}
		return err
	})
	if err != nil {
		return store.Allocation{}, err
	}
	return a, nil
}

// Cool implements store.Store.
func (s *Store) Cool(ctx context.Context, ids ...attachment.ID) error {
	return s.writeEach(ctx, "cool down released addresses", ids, func(t *txn, id attachment.ID) error {
		_, err := t.exec(coolSQL, formatTime(t.now), t.bootID, t.nextSeq(), t.boottimeMS(), id.ContainerID, id.IfName)
		return err
	})
}

// writeEach runs do for each ID, in one transaction that gives space back.
func (s *Store) writeEach(ctx context.Context, what string, ids []attachment.ID, do func(*txn, attachment.ID) error) error {
	if len(ids) == 0 {
		return nil
	}
	return s.write(ctx, givesBack, what, func(t *txn) error {
		for _, id := range ids {
			if err := do(t, id); err != nil {
				return fmt.Errorf("%s: %w", id.Key(), err)
			}
		}
		return nil
	})
}
