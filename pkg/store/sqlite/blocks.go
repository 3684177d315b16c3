package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
)

// block is a recorded block in the memory of the writer.
type block struct {
	id int64
	store.Block
	// adopted is when all its addresses without a record count as freed; the zero stamp is
	// that they were never used.
	adopted stamp
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
	const what = "record blocks"
	for _, b := range blocks {
		if err := b.Validate(); err != nil {
			return fmt.Errorf("%s: %s: %w", what, b.Name, err)
		}
		if b.Name == "" {
			return fmt.Errorf("%s: block %s has no name", what, b)
		}
	}
	var refused []error
	err := s.write(ctx, grows, what, func(t *txn) error {
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
	if err == nil && len(refused) > 0 {
		err = fmt.Errorf("%s: %w", what, errors.Join(refused...))
	}
	return err
}

func (t *txn) setBlock(b store.Block, adopt bool) error {
	have := t.blocks[b.Name]
	if have != nil && have.Block != b {
		if err := t.checkUnused(have); err != nil {
			t.disputed[b.Name] = true
			return fmt.Errorf("%s of pool %s is recorded with %s of pool %s: %w", b.Block, b.Pool, have.Block.Block, have.Pool, err)
		}
		t.stale = true
		for _, text := range []string{`DELETE FROM addresses WHERE block_id = ?`, deleteBlockSQL} {
			if _, err := t.exec(text, have.id); err != nil {
				return err
			}
		}
		have = nil
	}
	delete(t.disputed, b.Name)
	if have == nil {
		have = &block{Block: b}
		if err := t.row(`INSERT INTO blocks (name, pool, ipv4, ipv6, since) VALUES (?, ?, ?, ?, ?) RETURNING block_id`,
			b.Name, b.Pool, orNull(b.IPv4), orNull(b.IPv6), formatTime(t.now)).Scan(&have.id); err != nil {
			return err
		}
		t.blocks[b.Name] = have
		t.stale = true
	}
	if !adopt {
		return nil
	}
	t.stale = true
	_, err := t.exec(`UPDATE blocks SET adopted_boot_id = ?, adopted_boottime_ms = ?, adopted_seq = ? WHERE block_id = ?`,
		t.bootID, t.boottimeMS(), t.nextSeq(), have.id)
	return err
}

// tidy gives records without a block the block that has their addresses, if
// one is recorded now, and drops records that have cooled down without one.
func (t *txn) tidy() error {
	loose, err := query(t.ctx, t.writer, scan, `SELECT `+columns+` FROM addresses WHERE block_id IS NULL`)
	if err != nil {
		return err
	}
	for _, r := range loose {
		if b, offset := t.blockOf(r.Address); b != nil {
			n, err := t.exec(`UPDATE OR IGNORE addresses SET block = ?, block_id = ?, block_offset = ? WHERE address_id = ?`,
				b.Name, b.id, offset, r.id)
			if err != nil {
				return err
			}
			if n == 1 {
				continue
			}
		}
		if r.State == store.Cooling && t.cooled(r.freed) {
			t.stale = true
			if _, err := t.exec(deleteSQL, r.id); err != nil {
				return err
			}
		}
	}
	return nil
}

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
		err := s.write(ctx, givesBack, "forget block "+name, func(t *txn) error {
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
			n, err := t.exec(`DELETE FROM addresses WHERE address_id IN
				(SELECT address_id FROM addresses WHERE block_id = ? LIMIT ?)`, b.id, forgetBatch)
			if err != nil || n == forgetBatch {
				return err
			}
			done = true
			_, err = t.exec(deleteBlockSQL, b.id)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// checkUnused is store.ErrInUse if an address of b is allocated or cooling.
func (t *txn) checkUnused(b *block) error {
	var allocated int
	if err := t.row(`SELECT count(*) FROM addresses INDEXED BY attachments
			WHERE state <> 'cooling' AND block_id = ?`, b.id).Scan(&allocated); err != nil {
		return err
	}
	if allocated > 0 {
		return fmt.Errorf("%w: %d addresses are allocated", store.ErrInUse, allocated)
	}
	var f stamp
	err := t.row(newestCoolingSQL, b.id).Scan(&f.bootID, &f.boottimeMS, &f.seq)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	if !t.cooled(f) {
		return fmt.Errorf("%w: addresses are cooling", store.ErrInUse)
	}
	if t.cooled(b.adopted) {
		return nil
	}
	var records int
	if err := t.row(recordsSQL, b.id).Scan(&records); err != nil {
		return err
	}
	if records < b.Size() {
		return fmt.Errorf("%w: addresses whose use is unknown are cooling", store.ErrInUse)
	}
	return nil
}

// load reads the blocks, and the last number in the order in which addresses were
// freed, into the memory of the writer.
func (t *txn) load() error {
	known, err := query(t.ctx, t.writer, scanBlock, blocksSQL)
	if err != nil {
		return err
	}
	var seq int64
	if err := t.row(`SELECT coalesce(max(freed_seq), 0) FROM addresses INDEXED BY cooling
			WHERE state = 'cooling'`).Scan(&seq); err != nil {
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
	t.seq = max(t.seq, seq, cooledSeq)
	t.blocks = map[string]*block{}
	for _, b := range known {
		t.blocks[b.Name] = b
		t.seq = max(t.seq, b.adopted.seq)
	}
	return nil
}

// scanBlock reads a row of blocksSQL.
func scanBlock(row scanner) (*block, error) {
	var b block
	err := b.scan(row, &b.unused)
	return &b, err
}

// scan reads blockColumns, and the columns that follow them into more.
func (b *block) scan(row scanner, more ...any) error {
	var ipv4, ipv6 *string
	to := []any{&b.id, &b.Name, &b.Pool, &ipv4, &ipv6, &b.adopted.bootID, &b.adopted.boottimeMS, &b.adopted.seq}
	if err := row.Scan(append(to, more...)...); err != nil {
		return err
	}
	var err error
	if b.Block.Block, err = ipam.ParseBlock(ipv4, ipv6); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrDamaged, b.Name, err)
	}
	return nil
}
