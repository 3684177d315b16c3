package sqlite

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/store"
)

var _ store.Clients = (*Store)(nil)

const (
	listClientsSQL = `SELECT container_id, ifname, pod_namespace, pod_name, pod_uid, netns_path, netns_inode, ipv4, ipv6, egresses
		FROM clients ORDER BY container_id, ifname`

	setClientSQL = `INSERT OR REPLACE INTO clients (container_id, ifname, pod_namespace, pod_name, pod_uid,
			netns_path, netns_inode, ipv4, ipv6, since, egresses)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`

	forgetClientSQL = `DELETE FROM clients WHERE container_id = ? AND ifname = ?`
)

// SetClient implements store.Clients.
func (s *Store) SetClient(ctx context.Context, c store.Client) error {
	what := "record client " + c.Key()
	egresses, err := json.Marshal(append([]store.KnownEgress{}, c.Egresses...)) // null would be no list
	if err := errors.Join(err, checkID(c.ID), checkAddress(c.Address)); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return s.write(ctx, grows, what, func(t *txn) error {
		_, err := t.exec(setClientSQL, c.ContainerID, c.IfName, c.Namespace, c.Name, c.UID, c.Path, int64(c.Inode),
			orNull(c.Address.IPv4), orNull(c.Address.IPv6), formatTime(t.now), string(egresses))
		return err
	})
}

// ForgetClients implements store.Clients.
func (s *Store) ForgetClients(ctx context.Context, ids ...attachment.ID) error {
	return s.writeEach(ctx, "forget clients", ids, func(t *txn, id attachment.ID) error {
		_, err := t.exec(forgetClientSQL, id.ContainerID, id.IfName)
		return err
	})
}

// ListClients implements store.Clients.
func (s *Store) ListClients(ctx context.Context) ([]store.Client, error) {
	return read(ctx, s, "list clients", func(ctx context.Context) ([]store.Client, error) {
		return query(ctx, s.reader, scanClient, listClientsSQL)
	})
}

func scanClient(row scanner) (store.Client, error) {
	var c store.Client
	var inode int64
	var egresses []byte
	err := row.Scan(&c.ContainerID, &c.IfName, &c.Namespace, &c.Name, &c.UID, &c.Path, &inode,
		address{&c.Address.IPv4}, address{&c.Address.IPv6}, &egresses)
	if err != nil {
		return c, fmt.Errorf("client %s: %w", c.Key(), err)
	}
	c.Inode = uint64(inode)
	if err := errors.Join(checkAddress(c.Address), json.Unmarshal(egresses, &c.Egresses)); err != nil {
		return c, fmt.Errorf("%w: client %s: %w", ErrDamaged, c.Key(), err)
	}
	return c, nil
}
