package sqlite

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"

	"golang.org/x/sys/unix"
)

// ballast is a file whose only content is space: it shrinks when the disk is
// full, so that addresses can be given back all the same.
type ballast struct {
	path string
	size int64
}

// ballastStep is how much is freed at once: enough for a transaction. The program that
// filled the disk may take the space that isn't used at once.
const ballastStep = 64 << 10

// ensure makes the file, with its space on the disk, or grows it to its size; if
// that can't be, it stays as it was.
func (b ballast) ensure() (err error) {
	f, err := os.OpenFile(b.path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	err = unix.Fallocate(int(f.Fd()), 0, 0, b.size)
	if errors.Is(err, unix.EOPNOTSUPP) && st.Size() < b.size {
		// This filesystem takes space only for written data, and perhaps compresses it.
		_, err = io.CopyN(f, rand.NewChaCha8([32]byte{}), b.size)
	} else if errors.Is(err, unix.EOPNOTSUPP) {
		err = nil
	}
	if err != nil {
		return errors.Join(fmt.Errorf("reserve %d bytes: %w", b.size, err), f.Truncate(st.Size()))
	}
	return nil
}

// shrink frees some of the space; an error if there is none, or if the disk
// doesn't let it.
func (b ballast) shrink() error {
	st, err := os.Stat(b.path)
	if err != nil {
		return err
	}
	if st.Size() <= ballastStep {
		return b.drop()
	}
	return os.Truncate(b.path, st.Size()-ballastStep)
}

// drop removes the file; that it isn't there is an error too.
func (b ballast) drop() error { return os.Remove(b.path) }
