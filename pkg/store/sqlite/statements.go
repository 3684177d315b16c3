package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"iter"
)

// columns is what scan reads, in its order.
const columns = `address_id, ipv4, ipv6, state, since, boot_id, pool, block, container_id, ifname, pod_namespace, pod_name, pod_uid,
	netns_path, netns_inode, host_ifname, host_ifindex, result, ifnull(freed_seq, 0), ifnull(freed_boottime_ms, 0)`

// SQLite uses a partial index only when its condition stands in the query as it
// is, hence "state <> 'cooling'" beside narrower conditions.
const (
	findSQL = `SELECT ` + columns + ` FROM addresses
		WHERE container_id = ? AND ifname = ? AND state <> 'cooling'`

	findAddressSQL = `SELECT ` + columns + ` FROM addresses WHERE ipv4 = ?1 OR ipv6 = ?1`

	insertSQL = `INSERT INTO addresses (ipv4, ipv6, state, since, boot_id, pool, block, block_id, block_offset,
			container_id, ifname, pod_namespace, pod_name, pod_uid, netns_path, netns_inode,
			host_ifname, host_ifindex, result)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
		ON CONFLICT DO NOTHING`

	// After the offset ?2, which can't be taken: the next one without a record.
	nextUnusedSQL = `SELECT CASE
		WHEN NOT EXISTS (SELECT 1 FROM addresses WHERE block_id = ?1 AND block_offset = ?2) THEN ?2 + 1
		ELSE (SELECT a.block_offset + 1 FROM addresses a WHERE a.block_id = ?1 AND a.block_offset >= ?2
				AND NOT EXISTS (SELECT 1 FROM addresses b WHERE b.block_id = ?1 AND b.block_offset = a.block_offset + 1)
				ORDER BY a.block_offset LIMIT 1) END`

	oldestCoolingSQL = `SELECT address_id, ipv4, ipv6, block_offset, boot_id, freed_boottime_ms, freed_seq FROM addresses
		WHERE block_id = ? AND state = 'cooling' AND freed_seq > ? ORDER BY freed_seq LIMIT 1`

	newestCoolingSQL = `SELECT boot_id, freed_boottime_ms, freed_seq FROM addresses
		WHERE block_id IS ? AND state = 'cooling' ORDER BY freed_seq DESC LIMIT 1`

	// How many addresses of a block can't be reused yet, and which was freed first: those
	// freed after the newest that has rested for ?5 ns, by Store.cooled, at ?3 ns of boot ?4,
	// and after ?2. Those that can are not even read.
	coolingSQL = `SELECT count(*), ifnull(min(freed_seq), 0) FROM addresses
		WHERE block_id IS ?1 AND state = 'cooling' AND freed_seq > ifnull((SELECT freed_seq FROM addresses
			WHERE block_id IS ?1 AND state = 'cooling' AND freed_seq > ?2
				AND ?3 - CASE boot_id WHEN ?4 THEN freed_boottime_ms * 1000000 ELSE 0 END >= ?5
			ORDER BY freed_seq DESC LIMIT 1), ?2)`

	// OR IGNORE: the attachment may have an address.
	reuseSQL = `UPDATE OR IGNORE addresses SET state = 'pending', since = ?, boot_id = ?, pool = ?, block = ?,
			container_id = ?, ifname = ?, pod_namespace = ?, pod_name = ?, pod_uid = ?, netns_path = ?, netns_inode = ?,
			host_ifname = '', host_ifindex = 0, result = NULL, freed_seq = NULL, freed_boottime_ms = NULL
		WHERE address_id = ?`

	// OR IGNORE: another row may have one of the addresses.
	readdressSQL = `UPDATE OR IGNORE addresses SET ipv4 = ?, ipv6 = ? WHERE address_id = ?`

	attachSQL = `UPDATE addresses SET state = 'attached', since = ?, boot_id = ?,
			host_ifname = ?, host_ifindex = ?, result = ?
		WHERE container_id = ? AND ifname = ? AND state <> 'cooling' AND state = 'pending'`

	adoptSQL = `UPDATE addresses SET state = 'attached', since = ?, boot_id = ?, pool = ?,
			pod_namespace = ?, pod_name = ?, pod_uid = ?, netns_path = ?, netns_inode = ?,
			host_ifname = ?, host_ifindex = ?, result = ?
		WHERE address_id = ?`

	releaseSQL = `UPDATE addresses SET state = 'releasing', since = ?, boot_id = ?
		WHERE container_id = ? AND ifname = ? AND state <> 'cooling' AND state <> 'releasing' RETURNING ` + columns

	coolSQL = `UPDATE addresses SET state = 'cooling', since = ?, boot_id = ?, result = NULL,
			freed_seq = ?, freed_boottime_ms = ?
		WHERE container_id = ? AND ifname = ? AND state <> 'cooling' AND state = 'releasing'`

	deleteSQL = `DELETE FROM addresses WHERE address_id = ?`

	deleteBlockSQL = `DELETE FROM blocks WHERE block_id = ?`

	listSQL = `SELECT ` + columns + ` FROM addresses INDEXED BY attachments
		WHERE state <> 'cooling' ORDER BY since, address_id`

	blocksSQL = `SELECT block_id, name, pool, ipv4, ipv6,
			ifnull(adopted_boot_id, ''), ifnull(adopted_boottime_ms, 0), ifnull(adopted_seq, 0)
		FROM blocks ORDER BY name`

	allocatedSQL = `SELECT block_id, count(*) FROM addresses INDEXED BY attachments
		WHERE state <> 'cooling' AND block_id IS NOT NULL GROUP BY block_id`

	recordsSQL = `SELECT count(*) FROM addresses WHERE block_id = ?`

	beginSQL, commitSQL, rollbackSQL = `BEGIN IMMEDIATE`, `COMMIT`, `ROLLBACK`
)

// frequent are the statements that each pool of connections compiles once, changes those that the
// writer compiles besides.
var (
	frequent = []string{findSQL, listSQL, blocksSQL, allocatedSQL, recordsSQL, coolingSQL, listClientsSQL}
	changes  = []string{
		findAddressSQL, insertSQL, nextUnusedSQL, oldestCoolingSQL, newestCoolingSQL, reuseSQL, readdressSQL, attachSQL, adoptSQL,
		releaseSQL, coolSQL, deleteSQL, setClientSQL, forgetClientSQL, beginSQL, commitSQL, rollbackSQL,
	}
)

// statements are those of a pool of connections: compiled ones by their text, and all others.
type statements struct {
	db       *sql.DB
	compiled map[string]*sql.Stmt
}

// prepare compiles statements for db.
func prepare(ctx context.Context, db *sql.DB, texts ...string) (statements, error) {
	s := statements{db, map[string]*sql.Stmt{}}
	for _, text := range texts {
		st, err := db.PrepareContext(ctx, text)
		if err != nil {
			s.close()
			return statements{}, fmt.Errorf("prepare %q: %w", text, err)
		}
		s.compiled[text] = st
	}
	return s, nil
}

func (s statements) close() {
	for _, st := range s.compiled {
		_ = st.Close() // frees memory, nothing else
	}
}

// within are some of the statements as they are in a transaction.
func (s statements) within(ctx context.Context, tx *sql.Tx, texts ...string) statements {
	in := statements{nil, map[string]*sql.Stmt{}}
	for _, text := range texts {
		in.compiled[text] = tx.StmtContext(ctx, s.compiled[text])
	}
	return in
}

// exec returns how many rows a statement changed.
func (s statements) exec(ctx context.Context, text string, args ...any) (int64, error) {
	var res sql.Result
	var err error
	if st := s.compiled[text]; st != nil {
		res, err = st.ExecContext(ctx, args...)
	} else {
		res, err = s.db.ExecContext(ctx, text, args...)
	}
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}

func (s statements) row(ctx context.Context, text string, args ...any) *sql.Row {
	if st := s.compiled[text]; st != nil {
		return st.QueryRowContext(ctx, args...)
	}
	return s.db.QueryRowContext(ctx, text, args...)
}

func (s statements) rows(ctx context.Context, text string, args ...any) (*sql.Rows, error) {
	if st := s.compiled[text]; st != nil {
		return st.QueryContext(ctx, args...)
	}
	return s.db.QueryContext(ctx, text, args...)
}

// scanner is a row of a query.
type scanner interface{ Scan(to ...any) error }

// query yields the rows of a query as scan reads them, and after them the error of the query, if any.
func query[T any](ctx context.Context, s statements, scan func(scanner) (T, error), text string, args ...any) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		rows, err := s.rows(ctx, text, args...)
		if err != nil {
			yield(none, err)
			return
		}
		defer rows.Close()
		for rows.Next() {
			if v, err := scan(rows); !yield(v, err) || err != nil {
				return
			}
		}
		if err := rows.Err(); err != nil {
			yield(none, err)
		}
	}
}

// collect returns the values that query yields.
func collect[T any](rows iter.Seq2[T, error]) (all []T, err error) {
	for v, err := range rows {
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}
