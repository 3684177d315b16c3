package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/coil-net/coil/pkg/store"
)

// Rebuilt records that the record is complete, and of the present Node: it has all blocks of the node and
// all attachments that the kernel has. The next Open isn't Fresh.
func (s *Store) Rebuilt(ctx context.Context) error {
	err := s.write(ctx, grows, func(t *txn) error {
		_, err := t.writer.ExecContext(t.ctx, `UPDATE meta SET value = ? WHERE key = 'rebuilt_at' AND value = ''`, formatTime(t.now))
		if err == nil && t.identity.NodeUID != "" {
			_, err = t.writer.ExecContext(t.ctx, `UPDATE meta SET value = ? WHERE key = 'node_uid'`, t.identity.NodeUID)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("mark the record as rebuilt: %w", err)
	}
	return nil
}

// meta is the content of the table meta.
type meta map[string]string

func readMeta(ctx context.Context, q interface {
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
}) (meta, error) {
	rows, err := q.QueryContext(ctx, `SELECT key, value FROM meta`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	m := meta{}
	for rows.Next() {
		var k, v string
		if err := rows.Scan(&k, &v); err != nil {
			return nil, err
		}
		m[k] = v
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	for _, k := range metaKeys {
		if _, ok := m[k]; !ok {
			return nil, sql.ErrNoRows
		}
	}
	return m, nil
}

var metaKeys = []string{"node_name", "node_uid", "machine_id", "cool_down_seconds", "cooled_seq", "created_at", "rebuilt_at", "written_at"}

func (m meta) identity() identity {
	return identity{NodeName: m["node_name"], NodeUID: m["node_uid"], MachineID: m["machine_id"]}
}

// identity is a store.Identity; a field that is empty isn't known.
type identity store.Identity

// matches says that both can be the same machine under the same name. No field that both know differs, but the
// UID may: the Node is made again, or etcd is restored to an earlier one.
func (i identity) matches(o store.Identity) bool {
	if i.MachineID != "" && i.MachineID == o.MachineID && i.NodeName == o.NodeName {
		return true
	}
	return !slices.ContainsFunc([][2]string{{i.NodeName, o.NodeName}, {i.NodeUID, o.NodeUID}, {i.MachineID, o.MachineID}},
		func(f [2]string) bool { return f[0] != "" && f[1] != "" && f[0] != f[1] })
}

// settle writes what the file should say about itself and doesn't; with probe
// it writes in any case, to see whether that works.
func (t *txn) settle(probe bool) error {
	m, err := readMeta(t.ctx, t.writer)
	if err != nil {
		return err
	}
	if !m.identity().matches(t.identity) {
		return fmt.Errorf("%w: it was made by %+v, this is %+v", ErrForeign, m.identity(), t.identity)
	}
	want := meta{"cool_down_seconds": strconv.FormatInt(int64(t.coolDown/time.Second), 10)}
	for k, v := range map[string]string{"node_name": t.identity.NodeName, "node_uid": t.identity.NodeUID, "machine_id": t.identity.MachineID} {
		// Until the record is rebuilt for another Node, each Open has to say whose it was.
		if v != "" && (k != "node_uid" || m[k] == "") {
			want[k] = v
		}
	}
	if probe {
		want["written_at"] = formatTime(t.now)
	}
	for k, v := range want {
		if m[k] == v && k != "written_at" {
			continue
		}
		if _, err := t.writer.ExecContext(t.ctx, `UPDATE meta SET value = ? WHERE key = ?`, v, k); err != nil {
			return err
		}
	}
	return nil
}
