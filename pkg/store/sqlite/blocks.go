package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
)

// block is what the writer remembers of a recorded block.
type block struct {
	id int64
	store.Block
	// adopted is when all its addresses without a record count as freed; nil is
	// that they were never used.
	adopted *stamp
	// unused: no offset below has neither a record nor another reason not to be taken.
	unused int
}

// SetBlocks implements store.Store.
func (s *Store) SetBlocks(ctx context.Context, blocks []store.Block) error {
	return s.setBlocks(ctx, blocks, false)
}

// AdoptBlocks implements store.Store.
func (s *Store) AdoptBlocks(ctx context.Context, blocks []store.Block) error {
	return s.setBlocks(ctx, blocks, true)
}

func (s *Store) setBlocks(ctx context.Context, blocks []store.Block, adopt bool) error {
	var refused []error
	for _, b := range blocks {
		if err := b.Validate(); err != nil {
			return fmt.Errorf("record blocks: %s: %w", b.Name, err)
		}
		if b.Name == "" {
			return fmt.Errorf("record blocks: block %s has no name", b)
		}
	}
	err := s.write(ctx, grows, func(t *txn) error {
		refused = nil
		for _, b := range blocks {
			if err := t.setBlock(b, adopt); errors.Is(err, store.ErrInUse) {
				refused = append(refused, err)
			} else if err != nil {
				return fmt.Errorf("%s: %w", b.Name, err)
			}
		}
		return t.tidy()
	})
	if err == nil {
		err = errors.Join(refused...)
	}
	if err != nil {
		return fmt.Errorf("record blocks: %w", err)
	}
	return nil
}

func (t *txn) setBlock(b store.Block, adopt bool) error {
	have := t.blocks[b.Name]
	switch {
	case have == nil:
		have = &block{Block: b}
		res, err := t.writer.ExecContext(t.ctx, `INSERT INTO blocks (name, pool, ipv4, ipv6, since) VALUES (?, ?, ?, ?, ?)`,
			b.Name, b.Pool, prefixArg(b.IPv4), prefixArg(b.IPv6), formatTime(t.now))
		if err == nil {
			have.id, err = res.LastInsertId()
		}
		if err != nil {
			return err
		}
		t.blocks[b.Name] = have
		t.stale = true
	case have.Block != b:
		if err := t.checkUnused(have); err != nil {
			t.disputed[b.Name] = true
			return fmt.Errorf("%s of pool %s is recorded with %s of pool %s: %w", b.Block, b.Pool, have.Block.Block, have.Pool, err)
		}
		t.stale = true
		if _, err := t.writer.ExecContext(t.ctx, `DELETE FROM addresses WHERE block_id = ?`, have.id); err != nil {
			return err
		}
		if _, err := t.writer.ExecContext(t.ctx, `UPDATE blocks SET pool = ?, ipv4 = ?, ipv6 = ?, since = ?,
				adopted_boot_id = NULL, adopted_boottime_ms = NULL, adopted_seq = NULL WHERE block_id = ?`,
			b.Pool, prefixArg(b.IPv4), prefixArg(b.IPv6), formatTime(t.now), have.id); err != nil {
			return err
		}
		have.Block = b
	}
	delete(t.disputed, b.Name)
	if !adopt {
		return nil
	}
	t.stale = true
	_, err := t.writer.ExecContext(t.ctx, `UPDATE blocks SET adopted_boot_id = ?, adopted_boottime_ms = ?, adopted_seq = ? WHERE block_id = ?`,
		t.bootID, t.boottimeMS(), t.nextSeq(), have.id)
	return err
}

// tidy gives records without a block the block that has their addresses, if
// one is recorded now, and drops those that have cooled down without one.
func (t *txn) tidy() error {
	type loose struct {
		row     int64
		address ipam.Address
		freed   *stamp
	}
	var all []loose
	rows, err := t.writer.QueryContext(t.ctx, `SELECT `+columns+`, freed_seq, freed_boottime_ms FROM addresses WHERE block_id IS NULL`)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var seq, ms sql.NullInt64
		a, row, err := scan(alsoScan{rows, []any{&seq, &ms}})
		if err != nil {
			return err
		}
		l := loose{row: row, address: a.Address}
		if seq.Valid {
			l.freed = &stamp{a.BootID, time.Duration(ms.Int64) * time.Millisecond, seq.Int64}
		}
		all = append(all, l)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	for _, l := range all {
		if b, offset := t.blockOf(l.address); b != nil {
			res, err := t.writer.ExecContext(t.ctx, `UPDATE OR IGNORE addresses SET block = ?, block_id = ?, block_offset = ? WHERE address_id = ?`,
				b.Name, b.id, offset, l.row)
			if err != nil {
				return err
			}
			if n, err := res.RowsAffected(); err != nil || n == 1 {
				if err != nil {
					return err
				}
				continue
			}
		}
		if l.freed != nil && t.cooled(*l.freed) {
			t.stale = true
			if _, err := t.exec(t.w.delete, l.row); err != nil {
				return err
			}
		}
	}
	return nil
}

// alsoScan scans more columns than its caller knows of.
type alsoScan struct {
	rows *sql.Rows
	more []any
}

func (a alsoScan) Scan(dest ...any) error { return a.rows.Scan(append(dest, a.more...)...) }

// blockOf returns the recorded block that has the whole address at one offset,
// or nil.
func (t *txn) blockOf(a ipam.Address) (*block, int) {
	addrs := a.Addrs()
	for _, b := range t.blocks {
		offset, ok := b.Offset(addrs[0])
		for _, x := range addrs[1:] {
			o, has := b.Offset(x)
			ok = ok && has && o == offset
		}
		if ok {
			return b, offset
		}
	}
	return nil, 0
}

// forgetBatch bounds how many rows one transaction of ForgetBlock deletes, so that
// a block of 65,536 addresses doesn't hold up the reservations behind it.
const forgetBatch = 1000

// ForgetBlock implements store.Store.
func (s *Store) ForgetBlock(ctx context.Context, name string) error {
	for done := false; !done; {
		err := s.write(ctx, givesBack, func(t *txn) error {
			b := t.blocks[name]
			if b == nil {
				done = true
				return nil
			}
			if err := t.checkUnused(b); err != nil {
				return err
			}
			t.stale = true
			// Its addresses are free: to forget some of them early changes nothing.
			res, err := t.writer.ExecContext(t.ctx, `DELETE FROM addresses WHERE address_id IN
				(SELECT address_id FROM addresses WHERE block_id = ? LIMIT ?)`, b.id, forgetBatch)
			if err != nil {
				return err
			}
			n, err := res.RowsAffected()
			if err != nil || n == forgetBatch {
				return err
			}
			done = true
			_, err = t.writer.ExecContext(t.ctx, `DELETE FROM blocks WHERE block_id = ?`, b.id)
			return err
		})
		if err != nil {
			return fmt.Errorf("forget block %s: %w", name, err)
		}
	}
	return nil
}

// checkUnused is store.ErrInUse if an address of b is allocated or cooling.
func (t *txn) checkUnused(b *block) error {
	var allocated int
	if err := t.writer.QueryRowContext(t.ctx, `SELECT count(*) FROM addresses INDEXED BY attachments
			WHERE state <> 'cooling' AND block_id = ?`, b.id).Scan(&allocated); err != nil {
		return err
	}
	if allocated > 0 {
		return fmt.Errorf("%w: %d addresses are allocated", store.ErrInUse, allocated)
	}
	var f stamp
	var ms int64
	err := t.row(t.w.newestCooling, b.id).Scan(&f.bootID, &ms, &f.seq)
	f.boottime = time.Duration(ms) * time.Millisecond
	if err == nil && !t.cooled(f) {
		return fmt.Errorf("%w: addresses are cooling", store.ErrInUse)
	}
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	if b.adopted != nil && !t.cooled(*b.adopted) {
		var records int
		if err := t.row(t.w.records, b.id).Scan(&records); err != nil {
			return err
		}
		if records < b.Size() {
			return fmt.Errorf("%w: addresses whose use is unknown are cooling", store.ErrInUse)
		}
	}
	return nil
}

// load reads what the writer remembers: the blocks, and where the order of what
// was freed has come to.
func (t *txn) load() error {
	blocks := map[string]*block{}
	byID := map[int64]*block{}
	var seq int64
	err := collect(t.ctx, t.w.blocks, func(rows *sql.Rows) error {
		b, err := scanBlock(rows)
		if err != nil {
			return err
		}
		blocks[b.Name], byID[b.id] = b, b
		if b.adopted != nil {
			seq = max(seq, b.adopted.seq)
		}
		return nil
	})
	if err != nil {
		return err
	}
	rows, err := t.writer.QueryContext(t.ctx, `SELECT block_id, count(*), max(block_offset) FROM addresses
		WHERE block_id IS NOT NULL GROUP BY block_id`)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var id int64
		var n, last int
		if err := rows.Scan(&id, &n, &last); err != nil {
			return err
		}
		if b := byID[id]; b != nil && n == last+1 {
			b.unused = n // without a gap
		}
	}
	if err := rows.Err(); err != nil {
		return err
	}
	var freed int64
	if err := t.writer.QueryRowContext(t.ctx, `SELECT coalesce(max(freed_seq), 0) FROM addresses INDEXED BY cooling
			WHERE state = 'cooling'`).Scan(&freed); err != nil {
		return err
	}
	m, err := readMeta(t.ctx, t.writer)
	if err != nil {
		return err
	}
	cooledSeq, err := strconv.ParseInt(m["cooled_seq"], 10, 64)
	if err != nil {
		return fmt.Errorf("%w: cooled_seq: %w", ErrDamaged, err)
	}
	t.cooledSeq.Store(max(t.cooledSeq.Load(), cooledSeq))
	t.blocks, t.seq = blocks, max(seq, freed, t.seq, cooledSeq)
	return nil
}

// scanBlock reads the columns of blocksSQL.
func scanBlock(rows *sql.Rows) (*block, error) {
	var b block
	var ipv4, ipv6 *string
	var bootID sql.NullString
	var ms, seq sql.NullInt64
	if err := rows.Scan(&b.id, &b.Name, &b.Pool, &ipv4, &ipv6, &bootID, &ms, &seq); err != nil {
		return nil, err
	}
	var err error
	if b.Block.Block, err = ipam.ParseBlock(ipv4, ipv6); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrDamaged, b.Name, err)
	}
	if seq.Valid {
		b.adopted = &stamp{bootID.String, time.Duration(ms.Int64) * time.Millisecond, seq.Int64}
	}
	return &b, nil
}
