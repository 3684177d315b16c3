package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

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
	egresses := c.Egresses
	if egresses == nil {
		egresses = []store.KnownEgress{}
	}
	text, err := json.Marshal(egresses)
	if err := errors.Join(err, checkID(c.ID), checkAddress(c.Address)); err != nil {
		return fmt.Errorf("record client %s: %w", c.Key(), err)
	}
	err = s.write(ctx, grows, func(t *txn) error {
		_, err := t.exec(t.w.setClient, c.ContainerID, c.IfName, c.Namespace, c.Name, c.UID, c.Path, int64(c.Inode),
			addrArg(c.Address.IPv4), addrArg(c.Address.IPv6), formatTime(t.now), string(text))
		return err
	})
	if err != nil {
		return fmt.Errorf("record client %s: %w", c.Key(), err)
	}
	return nil
}

// ForgetClients implements store.Clients.
func (s *Store) ForgetClients(ctx context.Context, ids ...attachment.ID) error {
	if len(ids) == 0 {
		return nil
	}
	err := s.write(ctx, givesBack, func(t *txn) error {
		for _, id := range ids {
			if _, err := t.exec(t.w.forgetClient, id.ContainerID, id.IfName); err != nil {
				return fmt.Errorf("%s: %w", id.Key(), err)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("forget clients: %w", err)
	}
	return nil
}

// ListClients implements store.Clients.
func (s *Store) ListClients(ctx context.Context) ([]store.Client, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	all, err := listClients(context.WithoutCancel(ctx), s.r)
	if err != nil {
		return nil, fmt.Errorf("list clients: %w", s.note(err))
	}
	return all, nil
}

func listClients(ctx context.Context, st statements) ([]store.Client, error) {
	var all []store.Client
	err := collect(ctx, st.listClients, func(rows *sql.Rows) error {
		c, err := scanClient(rows)
		all = append(all, c)
		return err
	})
	return all, err
}

func scanClient(rows *sql.Rows) (store.Client, error) {
	var c store.Client
	var inode int64
	var ipv4, ipv6 sql.NullString
	var egresses string
	err := rows.Scan(&c.ContainerID, &c.IfName, &c.Namespace, &c.Name, &c.UID, &c.Path, &inode, &ipv4, &ipv6, &egresses)
	if err != nil {
		return c, err
	}
	c.Inode = uint64(inode)
	for _, f := range []struct {
		text sql.NullString
		to   *netip.Addr
	}{{ipv4, &c.Address.IPv4}, {ipv6, &c.Address.IPv6}} {
		if f.text.Valid {
			*f.to, err = netip.ParseAddr(f.text.String)
		}
		if err != nil {
			return c, fmt.Errorf("%w: client %s: %w", ErrDamaged, c.Key(), err)
		}
	}
	if err := errors.Join(checkAddress(c.Address), json.Unmarshal([]byte(egresses), &c.Egresses)); err != nil {
		return c, fmt.Errorf("%w: client %s: %w", ErrDamaged, c.Key(), err)
	}
	return c, nil
}
