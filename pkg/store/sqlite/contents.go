package sqlite

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/coil-net/coil/pkg/plan/inspection"
)

// mostDamage is how many findings of SQLite are told.
const mostDamage = 20

const (
	contentBlocksSQL = `SELECT block_id, name, pool, ifnull(ipv4, ''), ifnull(ipv6, ''), since FROM blocks ORDER BY name`

	contentAddressesSQL = `SELECT address_id, ifnull(ipv4, ''), ifnull(ipv6, ''), state, since, pool, block, ifnull(block_id, 0), ifnull(block_offset, -1),
		pod_namespace, pod_name, pod_uid, container_id, ifname, netns_path, host_ifname FROM addresses ORDER BY address_id`
)

// Contents returns what is written in the record at one moment, with what SQLite finds wrong with the file. Unlike List it doesn't judge the
// values: somebody looks for those that are wrong. It reads the whole file.
func (s *Store) Contents(ctx context.Context) (inspection.Database, error) {
	var d inspection.Database
	err := s.inPlace()
	if err == nil {
		err = s.snapshot(ctx, func(ctx context.Context, tx *sql.Tx) error { return contents(ctx, tx, &d) })
	}
	if err != nil {
		return d, fmt.Errorf("read the whole record: %w", classify(err)) // not noted: a question changes nothing
	}
	return d, nil
}

func contents(ctx context.Context, tx *sql.Tx, d *inspection.Database) (err error) {
	scripts, err := migrations()
	if err != nil {
		return err
	}
	d.Newest, d.Meta, d.Damage = len(scripts), map[string]string{}, []string{}
	if err := tx.QueryRowContext(ctx, `PRAGMA user_version`).Scan(&d.Schema); err != nil {
		return err
	}
	verdict, err := rows(ctx, tx, scanText, fmt.Sprintf(`PRAGMA integrity_check(%d)`, mostDamage))
	if err != nil {
		return err
	}
	if len(verdict) != 1 || verdict[0] != "ok" {
		d.Damage = verdict
	}
	missing, err := rows(ctx, tx, scanText, fmt.Sprintf(`SELECT "table" || ' has row ' || rowid || ' of a row of ' || parent || ' that is missing' FROM pragma_foreign_key_check LIMIT %d`, mostDamage))
	if err != nil {
		return err
	}
	d.Damage = append(d.Damage, missing...)
	pairs, err := rows(ctx, tx, func(row scanner) (pair [2]string, err error) {
		err = row.Scan(&pair[0], &pair[1])
		return pair, err
	}, `SELECT key, value FROM meta`)
	if err != nil {
		return err
	}
	for _, pair := range pairs {
		d.Meta[pair[0]] = pair[1]
	}
	d.Blocks, err = rows(ctx, tx, func(row scanner) (b inspection.DatabaseBlock, err error) {
		err = row.Scan(&b.ID, &b.Name, &b.Pool, &b.IPv4, &b.IPv6, &b.Since)
		return b, err
	}, contentBlocksSQL)
	if err != nil {
		return err
	}
	d.Addresses, err = rows(ctx, tx, func(row scanner) (a inspection.DatabaseAddress, err error) {
		err = row.Scan(&a.ID, &a.IPv4, &a.IPv6, &a.State, &a.Since, &a.Pool, &a.Block, &a.BlockID, &a.Offset,
			&a.Namespace, &a.Pod, &a.PodUID, &a.ContainerID, &a.IfName, &a.Netns, &a.HostLink)
		return a, err
	}, contentAddressesSQL)
	return err
}

func scanText(row scanner) (text string, err error) {
	err = row.Scan(&text)
	return text, err
}

// rows returns the rows of a query in a transaction as scan reads them.
func rows[T any](ctx context.Context, tx *sql.Tx, scan func(scanner) (T, error), text string) ([]T, error) {
	r, err := tx.QueryContext(ctx, text)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	all := []T{}
	for r.Next() {
		v, err := scan(r)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, r.Err()
}
