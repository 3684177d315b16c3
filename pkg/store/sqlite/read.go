package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/store"
)

// read calls do unless ctx has ended. SQLite doesn't see that end, which would interrupt a query.
// The text of an error begins with what.
func read[T any](ctx context.Context, s *Store, what string, do func(context.Context) (T, error)) (T, error) {
	var got T
	err := ctx.Err()
	if err == nil {
		got, err = do(context.WithoutCancel(ctx))
	}
	if err != nil {
		var none T
		return none, fmt.Errorf("%s: %w", what, s.note(err))
	}
	return got, nil
}

// Get implements store.Store.
func (s *Store) Get(ctx context.Context, id attachment.ID) (store.Allocation, error) {
	return read(ctx, s, "read the record of "+id.Key(), func(ctx context.Context) (store.Allocation, error) {
		return allocation(s.reader.row(ctx, findSQL, id.ContainerID, id.IfName))
	})
}

// List implements store.Store.
func (s *Store) List(ctx context.Context) ([]store.Allocation, error) {
	return read(ctx, s, "list allocations", func(ctx context.Context) ([]store.Allocation, error) {
		return query(ctx, s.reader, allocation, listSQL)
	})
}

// Usage implements store.Store.
func (s *Store) Usage(ctx context.Context) ([]store.Usage, error) {
	return read(ctx, s, "count the use of blocks", s.usage)
}

func (s *Store) usage(ctx context.Context) ([]store.Usage, error) {
	boottime := s.clock.Boottime()
	scanUsage := func(row scanner) (u store.Usage, err error) {
		var b block
		var records int
		err = b.scan(row, &u.Allocated, &u.Cooling, &records)
		u.Block = b.Block
		if !s.cooled(b.adopted, boottime) {
			u.Cooling += b.Size() - records
		}
		return u, err
	}
	// One query: it sees one state of the record.
	return query(ctx, s.reader, scanUsage, usageSQL, s.cooledSeq.Load(), int64(boottime), s.bootID, int64(s.coolDown))
}

// find returns the record of an attachment that isn't cooling.
func (t *txn) find(id attachment.ID) (record, error) {
	return scan(t.row(findSQL, id.ContainerID, id.IfName))
}

// record is the record of an address.
type record struct {
	store.Allocation
	id    int64
	freed stamp // if it is cooling
}

// scan reads the columns of a record; store.ErrNotFound if there is no row.
func scan(row scanner) (record, error) {
	var r record
	var since string
	var inode int64
	err := row.Scan(&r.id, address{&r.Address.IPv4}, address{&r.Address.IPv6}, &r.State, &since, &r.BootID, &r.Pool, &r.Block,
		&r.ContainerID, &r.IfName, &r.Namespace, &r.Name, &r.UID, &r.Path, &inode, &r.HostIfName, &r.HostIfIndex, &r.Result,
		&r.freed.seq, &r.freed.boottimeMS)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return r, store.ErrNotFound
	case err != nil && r.id != 0:
		return r, fmt.Errorf("row %d: %w", r.id, err)
	case err != nil:
		return r, err
	}
	r.Inode, r.freed.bootID = uint64(inode), r.BootID
	r.Since, err = time.Parse(timeFormat, since)
	if err := errors.Join(err, checkAddress(r.Address)); err != nil {
		return r, fmt.Errorf("%w: row %d: %w", ErrDamaged, r.id, err)
	}
	return r, nil
}

// allocation is scan, without the columns that only this package uses.
func allocation(row scanner) (store.Allocation, error) {
	r, err := scan(row)
	return r.Allocation, err
}

// address reads an address from its column; NULL is none.
type address struct{ to *netip.Addr }

// Scan implements sql.Scanner.
func (a address) Scan(column any) error {
	if column == nil {
		return nil
	}
	text, is := column.(string)
	if !is {
		text = fmt.Sprint(column)
	}
	x, err := netip.ParseAddr(text)
	if err == nil && x.String() != text {
		err = fmt.Errorf("%q isn't written as Coil does", text) // UNIQUE wouldn't know it
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	*a.to = x
	return nil
}

// orNull is the text of a value for a column, NULL of the zero value.
func orNull[T interface {
	comparable
	String() string
}](v T) any {
	if v == *new(T) {
		return nil
	}
	return v.String()
}

// resultArg is a CNI result for a column, NULL if there is none.
func resultArg(r []byte) any {
	if len(r) == 0 {
		return nil
	}
	return string(r)
}
