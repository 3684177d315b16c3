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

// meanings are the errors of the contract for result codes of SQLite. store.ErrReadOnly: the disk
// didn't take a write, since it is full, over quota, mounted read-only, or failing; which of them
// doesn't matter to the caller. ErrDamaged: the content is wrong, or can't be read. An extended
// code that isn't listed has the meaning of its primary code.
var meanings = map[int]error{
	sqlite3.SQLITE_FULL:             store.ErrReadOnly,
	sqlite3.SQLITE_READONLY:         store.ErrReadOnly,
	sqlite3.SQLITE_CANTOPEN:         store.ErrReadOnly,
	sqlite3.SQLITE_PERM:             store.ErrReadOnly,
	sqlite3.SQLITE_IOERR:            store.ErrReadOnly,
	sqlite3.SQLITE_IOERR_NOMEM:      nil,
	sqlite3.SQLITE_IOERR_READ:       ErrDamaged,
	sqlite3.SQLITE_IOERR_SHORT_READ: ErrDamaged,
	sqlite3.SQLITE_IOERR_CORRUPTFS:  ErrDamaged,
	sqlite3.SQLITE_IOERR_DATA:       ErrDamaged,
	sqlite3.SQLITE_CORRUPT:          ErrDamaged,
	sqlite3.SQLITE_NOTADB:           ErrDamaged,
	sqlite3.SQLITE_FORMAT:           ErrDamaged,
}

// broken says that the file's schema isn't the one that it claims to be: a table or a
// column is missing, or a value isn't of the type it must have.
func broken(err error) bool {
	switch code(err) & 0xff {
	case sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_CONSTRAINT:
		return true
	}
	return errors.Is(classify(err), ErrDamaged)
}

// classify gives SQLite's errors the meaning that the contract has for them.
func classify(err error) error {
	c := code(err)
	meaning, listed := meanings[c]
	if !listed {
		meaning = meanings[c&0xff]
	}
	if meaning == nil || errors.Is(err, meaning) {
		return err
	}
	return fmt.Errorf("%w: %w", meaning, err)
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
