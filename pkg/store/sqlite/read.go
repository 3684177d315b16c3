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

// Get implements store.Store.
func (s *Store) Get(ctx context.Context, id attachment.ID) (store.Allocation, error) {
	if err := ctx.Err(); err != nil {
		return store.Allocation{}, err
	}
	ctx = context.WithoutCancel(ctx)
	a, _, err := scan(s.r.find.QueryRowContext(ctx, id.ContainerID, id.IfName))
	if err != nil {
		return store.Allocation{}, fmt.Errorf("read the record of %s: %w", id.Key(), s.note(err))
	}
	return a, nil
}

// List implements store.Store.
func (s *Store) List(ctx context.Context) ([]store.Allocation, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var as []store.Allocation
	err := collect(context.WithoutCancel(ctx), s.r.list, func(rows *sql.Rows) error {
		a, _, err := scan(rows)
		as = append(as, a)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list allocations: %w", s.note(err))
	}
	return as, nil
}

// Usage implements store.Store.
func (s *Store) Usage(ctx context.Context) ([]store.Usage, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	us, err := s.usage(context.WithoutCancel(ctx))
	if err != nil {
		return nil, fmt.Errorf("count the use of blocks: %w", s.note(err))
	}
	return us, nil
}

func (s *Store) usage(ctx context.Context) ([]store.Usage, error) {
	tx, err := s.reader.BeginTx(ctx, nil) // one state of the record for all queries
	if err != nil {
		return nil, err
	}
	defer func() { _ = tx.Rollback() }()
	boottime := s.clock.Boottime()
	var blocks []*block
	if err := collect(ctx, tx.StmtContext(ctx, s.r.blocks), func(rows *sql.Rows) error {
		b, err := scanBlock(rows)
		blocks = append(blocks, b)
		return err
	}); err != nil {
		return nil, err
	}
	allocated := map[int64]int{}
	if err := collect(ctx, tx.StmtContext(ctx, s.r.allocated), func(rows *sql.Rows) error {
		var id int64
		var n int
		err := rows.Scan(&id, &n)
		allocated[id] = n
		return err
	}); err != nil {
		return nil, err
	}
	us := make([]store.Usage, 0, len(blocks))
	for _, b := range blocks {
		u := store.Usage{Block: b.Block, Allocated: allocated[b.id]}
		if u.Cooling, _, err = s.cooling(ctx, tx.StmtContext(ctx, s.r.cooling), b.id, boottime); err != nil {
			return nil, err
		}
		if b.adopted != nil && !s.cooled(*b.adopted, boottime) {
			var records int
			if err := tx.StmtContext(ctx, s.r.records).QueryRowContext(ctx, b.id).Scan(&records); err != nil {
				return nil, err
			}
			u.Cooling += b.Size() - records
		}
		us = append(us, u)
	}
	return us, nil
}

// cooling counts the addresses of a block that can't be reused yet, and says which
// of them was freed first. A blockID of nil is the addresses without a block.
func (s *Store) cooling(ctx context.Context, cooling *sql.Stmt, blockID any, boottime time.Duration) (n int, oldest int64, err error) {
	err = cooling.QueryRowContext(ctx, blockID, s.cooledSeq.Load(), int64(boottime), s.bootID, int64(s.coolDown)).Scan(&n, &oldest)
	return n, oldest, err
}

// collect calls each for the rows of a query.
func collect(ctx context.Context, st *sql.Stmt, each func(*sql.Rows) error, args ...any) error {
	rows, err := st.QueryContext(ctx, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := each(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// find returns the record of an attachment that isn't cooling, and its row.
func (t *txn) find(id attachment.ID) (store.Allocation, int64, error) {
	return scan(t.row(t.w.find, id.ContainerID, id.IfName))
}

// holder returns the record of an address, cooling or not, and its row.
func (t *txn) holder(x netip.Addr) (store.Allocation, int64, error) {
	if x.Is4() {
		return scan(t.row(t.w.findIPv4, x.String()))
	}
	return scan(t.row(t.w.findIPv6, x.String()))
}

// scan reads the columns of an allocation; store.ErrNotFound if there is no row.
func scan(row interface{ Scan(...any) error }) (store.Allocation, int64, error) {
	var (
		a            store.Allocation
		rowID, inode int64
		ipv4, ipv6   sql.NullString
		since        string
		result       sql.NullString
	)
	err := row.Scan(&rowID, &ipv4, &ipv6, &a.State, &since, &a.BootID, &a.Pool, &a.Block, &a.ContainerID, &a.IfName,
		&a.Namespace, &a.Name, &a.UID, &a.Path, &inode, &a.HostIfName, &a.HostIfIndex, &result)
	if errors.Is(err, sql.ErrNoRows) {
		return a, 0, store.ErrNotFound
	}
	if err != nil {
		return a, 0, err
	}
	a.Inode = uint64(inode)
	if result.Valid {
		a.Result = []byte(result.String)
	}
	if a.Since, err = time.Parse(timeFormat, since); err != nil {
		return a, 0, fmt.Errorf("%w: row %d: %w", ErrDamaged, rowID, err)
	}
	for _, f := range []struct {
		text sql.NullString
		to   *netip.Addr
	}{{ipv4, &a.Address.IPv4}, {ipv6, &a.Address.IPv6}} {
		if !f.text.Valid {
			continue
		}
		if *f.to, err = netip.ParseAddr(f.text.String); err != nil {
			return a, 0, fmt.Errorf("%w: row %d: %w", ErrDamaged, rowID, err)
		}
	}
	if err := checkAddress(a.Address); err != nil {
		return a, 0, fmt.Errorf("%w: row %d: %w", ErrDamaged, rowID, err)
	}
	return a, rowID, nil
}

// addrArg is an address for a column, NULL if there is none.
func addrArg(a netip.Addr) any {
	if !a.IsValid() {
		return nil
	}
	return a.String()
}

// prefixArg is a prefix for a column, NULL if there is none.
func prefixArg(p netip.Prefix) any {
	if !p.IsValid() {
		return nil
	}
	return p.String()
}

// resultArg is a CNI result for a column, NULL if there is none.
func resultArg(r []byte) any {
	if len(r) == 0 {
		return nil
	}
	return string(r)
}
