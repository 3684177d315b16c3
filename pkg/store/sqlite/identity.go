package sqlite

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/coil-net/coil/pkg/store"
)

// Rebuilt records that the record is complete, and of the present Node: it has all blocks of the node and
// all attachments that the kernel has. The next Open isn't Fresh.
func (s *Store) Rebuilt(ctx context.Context) error {
	return s.write(ctx, grows, "mark the record as rebuilt", func(t *txn) error {
		_, err := t.exec(`UPDATE meta SET value = ? WHERE key = 'rebuilt_at' AND value = ''`, formatTime(t.now))
		if err == nil && t.identity.NodeUID != "" {
			err = t.setMeta("node_uid", t.identity.NodeUID)
		}
		return err
	})
}

// meta is the content of the table meta.
type meta map[string]string

func (t *txn) setMeta(key, value string) error {
	_, err := t.exec(`UPDATE meta SET value = ? WHERE key = ?`, value, key)
	return err
}

func readMeta(ctx context.Context, in *pool) (meta, error) {
	m := meta{}
	scanPair := func(row scanner) (pair [2]string, err error) {
		err = row.Scan(&pair[0], &pair[1])
		return pair, err
	}
	pairs, err := query(ctx, in, scanPair, `SELECT key, value FROM meta`)
	if err != nil {
		return nil, err
	}
	for _, pair := range pairs {
		m[pair[0]] = pair[1]
	}
	for _, k := range metaKeys {
		if _, ok := m[k]; !ok {
			return nil, fmt.Errorf("%w: %s is missing", ErrDamaged, k)
		}
	}
	return m, nil
}

var metaKeys = []string{"node_name", "node_uid", "machine_id", "cool_down_seconds", "cooled_seq", "created_at", "rebuilt_at", "written_at"}

func (m meta) identity() store.Identity {
	return store.Identity{NodeName: m["node_name"], NodeUID: m["node_uid"], MachineID: m["machine_id"]}
}

// matches says that both can be the same machine under the same name. No field that both know differs, but the
// UID may: the Node is made again, or etcd is restored to an earlier one. A field that is empty isn't known.
func matches(i, o store.Identity) bool {
	if i.MachineID != "" && i.MachineID == o.MachineID && i.NodeName == o.NodeName {
		return true
	}
	return !slices.ContainsFunc([][2]string{{i.NodeName, o.NodeName}, {i.NodeUID, o.NodeUID}, {i.MachineID, o.MachineID}},
		func(f [2]string) bool { return f[0] != "" && f[1] != "" && f[0] != f[1] })
}

// settle corrects the values of meta. With probe it writes in any
// case, to see whether that works.
func (t *txn) settle(probe bool) error {
	m, err := readMeta(t.ctx, t.writer)
	if err != nil {
		return err
	}
	if !matches(m.identity(), t.identity) {
		return fmt.Errorf("%w: it was made by %+v, this is %+v", ErrForeign, m.identity(), t.identity)
	}
	want := meta{
		"cool_down_seconds": strconv.FormatInt(int64(t.coolDown/time.Second), 10),
		"node_name":         t.identity.NodeName,
		"machine_id":        t.identity.MachineID,
	}
	// Until the record is rebuilt for another Node, each Open has to say whose it was.
	if m["node_uid"] == "" {
		want["node_uid"] = t.identity.NodeUID
	}
	if probe {
		want["written_at"] = formatTime(t.now)
	}
	for k, v := range want {
		if v == "" || v == m[k] && k != "written_at" {
			continue
		}
		if err := t.setMeta(k, v); err != nil {
			return err
		}
	}
	return nil
}
