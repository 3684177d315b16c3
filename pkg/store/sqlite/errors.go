package sqlite

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/coil-net/coil/pkg/store"
)

// Errors of this implementation, beyond those of the contract.
var (
	// ErrDamaged: the file can't be understood any more. Close the Store and open
	// it again, which sets the file aside.
	ErrDamaged = errors.New("record is damaged")
	// ErrForeign: the record belongs to another node. Close the Store and open it
	// again with the whole identity, which sets the file aside.
	ErrForeign = errors.New("record belongs to another node")
	// ErrLocked: another process has the file open. Try again when it has ended.
	ErrLocked = errors.New("record is open in another process")
	// ErrClosed: the Store was closed.
	ErrClosed = errors.New("record is closed")
)

// code is the extended result code of SQLite behind err, or 0.
func code(err error) int {
	if e, ok := errors.AsType[*sqlite.Error](err); ok {
		return e.Code()
	}
	return sqlite3.SQLITE_OK
}

// unwritable says that the disk didn't take a write: full, over quota, mounted
// read-only, or failing. Which of them doesn't matter to the caller.
func unwritable(err error) bool {
	c := code(err)
	switch c & 0xff {
	case sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM:
		return true
	case sqlite3.SQLITE_IOERR:
		return !damaged(err) && c != sqlite3.SQLITE_IOERR_NOMEM
	}
	return false
}

// damaged says that the file's content is wrong, or that it can't be read.
func damaged(err error) bool {
	c := code(err)
	switch c & 0xff {
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT:
		return true
	}
	switch c {
	case sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS, sqlite3.SQLITE_IOERR_DATA:
		return true
	}
	return false
}

// broken says that the file's schema isn't what it claims to be: a table or a
// column is missing, or a value isn't of the type it must have.
func broken(err error) bool {
	switch code(err) & 0xff {
	case sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_CONSTRAINT:
		return true
	}
	return damaged(err)
}

// classify gives SQLite's errors the meaning that the contract has for them.
func classify(err error) error {
	switch {
	case err == nil, errors.Is(err, store.ErrReadOnly), errors.Is(err, ErrDamaged):
		return err
	case unwritable(err):
		return fmt.Errorf("%w: %w", store.ErrReadOnly, err)
	case damaged(err):
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return err
}

// note is classify, and remembers that the content is damaged: it won't mend itself. That the
// disk can't be read may pass.
func (s *Store) note(err error) error {
	err = classify(err)
	if errors.Is(err, ErrDamaged) && code(err)&0xff != sqlite3.SQLITE_IOERR {
		s.damage.CompareAndSwap(nil, &err)
	}
	return err
}

// classifyOS does the same for errors of files that SQLite doesn't open.
func classifyOS(err error) error {
	for _, errno := range []unix.Errno{unix.ENOSPC, unix.EDQUOT, unix.EROFS, unix.EACCES, unix.EPERM, unix.EIO} {
		if errors.Is(err, errno) {
			return fmt.Errorf("%w: %w", store.ErrReadOnly, err)
		}
	}
	return err
}
