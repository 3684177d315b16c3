package sqlite

import (
	"context"
	"database/sql"
	"sync"
)

// columns are the columns that scan reads, in its order.
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

	// The addresses of the block b that can't be reused yet. They were freed after ?1, and after the
	// newest address that has rested for ?4 ns, by Store.cooled, at ?2 ns of boot ?3. Addresses that
	// can be reused are not even read.
	coolingOfBlock = ` FROM addresses WHERE block_id IS b.block_id AND state = 'cooling'
			AND freed_seq > ifnull((SELECT freed_seq FROM addresses
				WHERE block_id IS b.block_id AND state = 'cooling' AND freed_seq > ?1
					AND ?2 - CASE boot_id WHEN ?3 THEN freed_boottime_ms * 1000000 ELSE 0 END >= ?4
				ORDER BY freed_seq DESC LIMIT 1), ?1)`

	// The first freed_seq of the addresses that can't be reused yet, with and without a block; ?5 if
	// all can be reused.
	firstCoolingSQL = `SELECT ifnull(min((SELECT min(freed_seq)` + coolingOfBlock + `)), ?5)
		FROM (SELECT block_id FROM blocks UNION ALL SELECT NULL) b`

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

	// The columns that block.scan reads, in its order.
	blockColumns = `block_id, name, pool, ipv4, ipv6,
		ifnull(adopted_boot_id, ''), ifnull(adopted_boottime_ms, 0), ifnull(adopted_seq, 0)`

	// Each block, and how many records it has if they have no gap.
	blocksSQL = `SELECT ` + blockColumns + `, ifnull(filled, 0)
		FROM blocks LEFT JOIN (SELECT block_id AS id, count(*) AS filled FROM addresses
			WHERE block_id IS NOT NULL GROUP BY block_id HAVING count(*) = max(block_offset) + 1) ON id = block_id
		ORDER BY name`

	// Each block, with the numbers of its allocated addresses and of those that can't be reused yet.
	// The last column counts its records if it was adopted after ?1: addresses without a record may
	// have to cool down then.
	usageSQL = `SELECT ` + blockColumns + `, ifnull(allocated, 0), (SELECT count(*)` + coolingOfBlock + `),
			iif(adopted_seq > ?1, (SELECT count(*) FROM addresses WHERE block_id = b.block_id), 0)
		FROM blocks b LEFT JOIN (SELECT block_id AS id, count(*) AS allocated FROM addresses INDEXED BY attachments
			WHERE state <> 'cooling' AND block_id IS NOT NULL GROUP BY block_id) ON id = block_id
		ORDER BY name`

	recordsSQL = `SELECT count(*) FROM addresses WHERE block_id = ?`

	beginSQL, commitSQL, rollbackSQL = `BEGIN IMMEDIATE`, `COMMIT`, `ROLLBACK`
)

// pool is a pool of connections to the file. A statement is compiled when it is first used, and kept.
type pool struct {
	*sql.DB
	mu       sync.Mutex
	compiled map[string]*sql.Stmt // by their text; guarded by mu
}

// compile returns the compiled statement of a text.
func (p *pool) compile(ctx context.Context, text string) (*sql.Stmt, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	st := p.compiled[text]
	if st == nil {
		var err error
		if st, err = p.PrepareContext(ctx, text); err != nil {
			return nil, err
		}
		p.compiled[text] = st
	}
	return st, nil
}

// exec returns how many rows a statement changed.
func (p *pool) exec(ctx context.Context, text string, args ...any) (int64, error) {
	st, err := p.compile(ctx, text)
	if err != nil {
		return 0, err
	}
	res, err := st.ExecContext(ctx, args...)
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}

// row is the first row of a query; sql.ErrNoRows if it has none.
func (p *pool) row(ctx context.Context, text string, args ...any) scanner {
	st, err := p.compile(ctx, text)
	if err != nil {
		return noRow{err}
	}
	return st.QueryRowContext(ctx, args...)
}

// noRow is the row of a query that can't be compiled.
type noRow struct{ error }

func (r noRow) Scan(...any) error { return r.error }

// scanner is a row of a query.
type scanner interface{ Scan(to ...any) error }

// query returns the rows of a query as scan reads them.
func query[T any](ctx context.Context, p *pool, scan func(scanner) (T, error), text string, args ...any) ([]T, error) {
	st, err := p.compile(ctx, text)
	if err != nil {
		return nil, err
	}
	rows, err := st.QueryContext(ctx, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var all []T
	for rows.Next() {
		v, err := scan(rows)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	return all, nil
}
