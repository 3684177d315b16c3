package sqlite

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/coil-net/coil/pkg/store"
)

// Writable says whether addresses can be reserved now: store.ErrReadOnly when the
// disk is full or read-only, ErrDamaged when the file isn't in its place any
// more or its content was found damaged. It writes only after a write has failed, to
// find out whether that is over.
func (s *Store) Writable(ctx context.Context) error {
	err := s.exclusively(ctx, func(ctx context.Context) error {
		if s.blocked {
			return s.unblock(ctx)
		}
		return s.checkDisk()
	})
	if err != nil {
		return fmt.Errorf("write the record: %w", err)
	}
	return nil
}

// unblock lets changes that need space happen again, if the disk takes them and
// has space for the ballast beside.
func (s *Store) unblock(ctx context.Context) error {
	if err := s.checkDisk(); err != nil {
		return err
	}
	if err := s.ballast.ensure(); err != nil {
		return fmt.Errorf("%w: %w", store.ErrReadOnly, err)
	}
	probe := func() error { return s.transact(ctx, func(t *txn) error { return t.settle(true) }) }
	err := probe()
	if code(err)&0xff == sqlite3.SQLITE_READONLY {
		s.reconnect()
		err = probe()
	}
	if err != nil {
		return err
	}
	s.blocked = false
	return nil
}

// reconnect closes all connections, which are made anew when they are needed: one that
// was made while the filesystem was read-only stays so (sqlite3_open_v2,
// SQLITE_OPEN_READWRITE).
func (s *Store) reconnect() {
	s.writer.SetMaxIdleConns(0)
	s.writer.SetMaxIdleConns(1)
	s.reader.SetMaxIdleConns(0)
	s.reader.SetMaxIdleConns(readers)
}

// checkDisk looks at the filesystem and at the file, without writing.
func (s *Store) checkDisk() error {
	if damage := s.damage.Load(); damage != nil {
		return *damage
	}
	if err := s.inPlace(); err != nil {
		return err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(s.path), &fs); err != nil {
		return err
	}
	if fs.Flags&unix.ST_RDONLY != 0 {
		return fmt.Errorf("%w: the filesystem of %s is mounted read-only", store.ErrReadOnly, s.path)
	}
	if free := fs.Bfree * uint64(fs.Bsize); free < uint64(s.ballast.size) {
		return fmt.Errorf("%w: the filesystem of %s has %d bytes left", store.ErrReadOnly, s.path, free)
	}
	return nil
}

// Checkpoint moves the changes since the last one from the log into the file, makes
// them durable, and empties the log. It also records which addresses have cooled down,
// so that they needn't again in another boot. The caller schedules it, every few
// seconds: a loss of power takes the changes since. It costs nothing when there are
// none. A reader that stays open keeps the log from being emptied, and it grows until
// that ends.
func (s *Store) Checkpoint(ctx context.Context) error {
	if err := s.exclusively(ctx, s.markCooled); err != nil {
		return fmt.Errorf("record what has cooled down: %w", err)
	}
	if !s.dirty.Load() {
		return nil
	}
	// Most of the work is done beside the writer, which isn't held up by the disk.
	_, err := s.reader.ExecContext(context.WithoutCancel(ctx), `PRAGMA wal_checkpoint(PASSIVE)`)
	if err == nil {
		err = s.exclusively(ctx, func(ctx context.Context) error {
			mode := "TRUNCATE"
			if s.blocked {
				mode = "RESTART" // keeps the log's space from others
			}
			busy, err := s.checkpoint(ctx, mode)
			if err == nil && !busy {
				s.dirty.Store(false)
			}
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("move the log into the record: %w", s.note(err))
	}
	return nil
}

// markCooled records up to where in the order of freeing addresses have cooled
// down, since another boot can't tell from their times.
func (s *Store) markCooled(ctx context.Context) error {
	upTo := s.cooledSeq.Load()
	if s.blocked || upTo >= s.seq {
		return nil
	}
	err := s.transact(ctx, func(t *txn) error {
		var first int64 // that hasn't cooled down
		if err := t.row(firstCoolingSQL, upTo, int64(t.boottime), t.bootID, int64(t.coolDown), t.seq+1).Scan(&first); err != nil {
			return err
		}
		for _, b := range t.blocks {
			if !t.cooled(b.adopted) {
				first = min(first, b.adopted.seq)
			}
		}
		if first-1 <= upTo {
			return nil
		}
		upTo = first - 1
		return t.setMeta("cooled_seq", strconv.FormatInt(upTo, 10))
	})
	if err == nil {
		s.cooledSeq.Store(upTo)
	}
	return err
}

// checkpoint does a checkpoint of the mode by the writer, and says whether a
// reader or another process kept it from being finished. It waits for neither.
func (s *Store) checkpoint(ctx context.Context, mode string) (busy bool, err error) {
	conn, err := s.writer.Conn(ctx)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	if _, err := conn.ExecContext(ctx, `PRAGMA busy_timeout = 0`); err != nil {
		return false, err
	}
	defer func() {
		_, rerr := conn.ExecContext(ctx, fmt.Sprintf(`PRAGMA busy_timeout = %d`, busyTimeout.Milliseconds()))
		err = errors.Join(err, rerr)
	}()
	var blocked, inLog, moved int
	if err := conn.QueryRowContext(ctx, `PRAGMA wal_checkpoint(`+mode+`)`).Scan(&blocked, &inLog, &moved); err != nil {
		return false, err
	}
	return blocked != 0, nil
}
