package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Errors of Copy.
var (
	// ErrCopying: another copy is being made, or read. Try again when that has ended.
	ErrCopying = errors.New("another copy is in use")
	// ErrTooLarge: the record is larger than a copy may be.
	ErrTooLarge = errors.New("record is too large to be copied")
	// ErrNoRoom: the disk would have too little room beside a copy. Make room.
	ErrNoRoom = errors.New("disk has too little room for a copy")
)

// copySpare is how much room a copy leaves on the disk, besides that of the ballast: the log grows while somebody reads.
const copySpare = 16 << 20

// copySuffix ends the names of the files of a copy.
const copySuffix = "-copy"

// Copy is the record as it was at one moment, as a whole database. Its file has no name any more: it is gone when the process
// ends, however that ends.
type Copy struct {
	*os.File
	// Size is how many bytes it has.
	Size    int64
	release func()
}

// Close gives the room of the copy back.
func (c *Copy) Close() error {
	defer c.release()
	return c.File.Close()
}

// Copy makes a copy of the record, of at most limit bytes. Addresses are given and taken meanwhile. Errors: ErrCopying, ErrTooLarge,
// ErrNoRoom, ErrDamaged of a record that can't be read. The caller closes the copy.
func (s *Store) Copy(ctx context.Context, limit int64) (*Copy, error) {
	c, err := s.copy(ctx, limit, copySpare)
	if err != nil {
		if c != nil {
			err = errors.Join(err, c.Close())
		}
		return nil, fmt.Errorf("copy the record: %w", classify(err)) // not noted: a question changes nothing
	}
	return c, nil
}

func (s *Store) copy(ctx context.Context, limit, spare int64) (_ *Copy, err error) {
	if !s.copying.TryLock() {
		return nil, ErrCopying
	}
	kept := false
	defer func() {
		if !kept {
			s.copying.Unlock()
		}
	}()
	if err := s.inPlace(); err != nil {
		return nil, err
	}
	if err := s.roomForCopy(ctx, limit, spare); err != nil {
		return nil, err
	}
	path := s.path + copySuffix
	if err := removeCopy(s.path); err != nil {
		return nil, classifyOS(err)
	}
	defer func() { err = errors.Join(err, removeCopy(s.path)) }()
	if err := createFile(path); err != nil { // SQLite takes an empty file, and would let others read one that it makes
		return nil, classifyOS(err)
	}
	if err := s.vacuumInto(ctx, path); err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && st.Size() > limit {
		err = fmt.Errorf("%w: %d bytes, of %d at most", ErrTooLarge, st.Size(), limit)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	kept = true
	return &Copy{File: f, Size: st.Size(), release: s.copying.Unlock}, nil
}

// roomForCopy says why no copy can be made.
func (s *Store) roomForCopy(ctx context.Context, limit, spare int64) error {
	var size int64
	row := s.reader.row(context.WithoutCancel(ctx), `SELECT page_count * page_size FROM pragma_page_count, pragma_page_size`)
	if err := row.Scan(&size); err != nil {
		return fmt.Errorf("measure it: %w", err)
	}
	if size > limit {
		return fmt.Errorf("%w: %d bytes, of %d at most", ErrTooLarge, size, limit)
	}
	var disk unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(s.path), &disk); err != nil {
		return err
	}
	if free, need := disk.Bfree*uint64(disk.Bsize), uint64(size+s.ballast.size+spare); free < need {
		return fmt.Errorf("%w: it has %d bytes left, and %d are needed", ErrNoRoom, free, need)
	}
	return nil
}

// vacuumInto writes the record, as one read transaction sees it, into a file. The connection is one of those that read, which must
// not write elsewhere than into that file.
func (s *Store) vacuumInto(ctx context.Context, path string) (err error) {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	conn, err := s.reader.Conn(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	if _, err := conn.ExecContext(ctx, `PRAGMA query_only = 0`); err != nil {
		return err
	}
	defer func() {
		_, rerr := conn.ExecContext(ctx, `PRAGMA query_only = 1`)
		err = errors.Join(err, rerr)
	}()
	_, err = conn.ExecContext(ctx, `VACUUM INTO ?`, path)
	return err
}

// removeCopy removes what is left of a copy.
func removeCopy(record string) error {
	var errs []error
	for _, suffix := range []string{copySuffix, copySuffix + "-journal"} {
		if err := os.Remove(record + suffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// inPlace says whether the file that is open is the one that has the name.
func (s *Store) inPlace() error {
	st, err := os.Stat(s.path)
	if err != nil || !os.SameFile(st, s.file) {
		return fmt.Errorf("%w: %s was removed or replaced while it was open", ErrDamaged, s.path)
	}
	return nil
}

// snapshot calls do with a connection that sees one state of the record.
func (s *Store) snapshot(ctx context.Context, do func(context.Context, *sql.Tx) error) (err error) {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	tx, err := s.reader.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tx.Rollback()) }()
	return do(ctx, tx)
}
