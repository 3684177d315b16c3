package sqlite

import (
	"context"
	"database/sql"
	"fmt"
)

// columns is what scan reads, in its order.
const columns = `address_id, ipv4, ipv6, state, since, boot_id, pool, block, container_id, ifname,
	pod_namespace, pod_name, pod_uid, netns_path, netns_inode, host_ifname, host_ifindex, result`

// SQLite uses a partial index only when its condition stands in the query as it
// is, hence "state <> 'cooling'" beside narrower conditions.
const (
	findSQL = `SELECT ` + columns + ` FROM addresses
		WHERE container_id = ? AND ifname = ? AND state <> 'cooling'`

	findIPv4SQL = `SELECT ` + columns + ` FROM addresses WHERE ipv4 = ?`
	findIPv6SQL = `SELECT ` + columns + ` FROM addresses WHERE ipv6 = ?`

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

	listSQL = `SELECT ` + columns + ` FROM addresses INDEXED BY attachments
		WHERE state <> 'cooling' ORDER BY since, address_id`

	blocksSQL = `SELECT block_id, name, pool, ipv4, ipv6, adopted_boot_id, adopted_boottime_ms, adopted_seq
		FROM blocks ORDER BY name`

	allocatedSQL = `SELECT block_id, count(*) FROM addresses INDEXED BY attachments
		WHERE state <> 'cooling' AND block_id IS NOT NULL GROUP BY block_id`

	recordsSQL = `SELECT count(*) FROM addresses WHERE block_id = ?`
)

// statements are prepared once for each pool of connections.
type statements struct {
	find, findIPv4, findIPv6, insert, nextUnused, oldestCooling, newestCooling, reuse, readdress, cooling *sql.Stmt
	attach, adopt, release, cool, delete, begin, commit, rollback                                         *sql.Stmt
	list, blocks, allocated, records                                                                      *sql.Stmt
	listClients, setClient, forgetClient                                                                  *sql.Stmt
	all                                                                                                   []*sql.Stmt
}

func (s statements) close() {
	for _, st := range s.all {
		_ = st.Close() // frees memory, nothing else
	}
}

// prepare compiles the statements for db, the writing ones only if asked for.
func prepare(ctx context.Context, db *sql.DB, writing bool) (statements, error) {
	var s statements
	type prepared struct {
		to    **sql.Stmt
		query string
	}
	all := []prepared{
		{&s.find, findSQL}, {&s.list, listSQL}, {&s.blocks, blocksSQL}, {&s.allocated, allocatedSQL},
		{&s.records, recordsSQL}, {&s.cooling, coolingSQL}, {&s.listClients, listClientsSQL},
	}
	if writing {
		all = append(all,
			prepared{&s.findIPv4, findIPv4SQL}, prepared{&s.findIPv6, findIPv6SQL}, prepared{&s.insert, insertSQL},
			prepared{&s.nextUnused, nextUnusedSQL}, prepared{&s.oldestCooling, oldestCoolingSQL}, prepared{&s.newestCooling, newestCoolingSQL},
			prepared{&s.reuse, reuseSQL}, prepared{&s.readdress, readdressSQL}, prepared{&s.attach, attachSQL}, prepared{&s.adopt, adoptSQL},
			prepared{&s.release, releaseSQL}, prepared{&s.cool, coolSQL}, prepared{&s.delete, deleteSQL},
			prepared{&s.setClient, setClientSQL}, prepared{&s.forgetClient, forgetClientSQL},
			prepared{&s.begin, "BEGIN IMMEDIATE"}, prepared{&s.commit, "COMMIT"}, prepared{&s.rollback, "ROLLBACK"})
	}
	for _, p := range all {
		st, err := db.PrepareContext(ctx, p.query)
		if err != nil {
			s.close()
			return statements{}, fmt.Errorf("prepare %q: %w", p.query, err)
		}
		*p.to = st
		s.all = append(s.all, st)
	}
	return s, nil
}
