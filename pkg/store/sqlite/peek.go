package sqlite

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// Where the header of a database has what Peek reads: https://www.sqlite.org/fileformat.html#the_database_header
const (
	headerSize        = 100
	headerMagic       = "SQLite format 3\x00"
	headerVersion     = 60 // PRAGMA user_version
	headerApplication = 68 // PRAGMA application_id
)

// Peek returns the version of the schema of the record in a file, and the newest version that this program knows. It reads
// the header of the file, neither opens it as a database nor locks or writes anything, and so doesn't see the changes that
// are only in the log, those of the last seconds. The version is 0 as long as the schema isn't made. Errors:
// fs.ErrNotExist, ErrDamaged of a file that is no record of Coil.
func Peek(path string) (version, known int, err error) {
	scripts, err := migrations()
	if err != nil {
		return 0, 0, err
	}
	known = len(scripts)
	f, err := os.Open(path)
	if err != nil {
		return 0, known, err
	}
	var header [headerSize]byte
	n, err := io.ReadFull(f, header[:])
	if err := errors.Join(ignoreEnd(err), f.Close()); err != nil {
		return 0, known, fmt.Errorf("read %s: %w", path, err)
	}
	application := binary.BigEndian.Uint32(header[headerApplication:])
	version = int(binary.BigEndian.Uint32(header[headerVersion:]))
	database := n == headerSize && bytes.HasPrefix(header[:], []byte(headerMagic))
	switch {
	case n == 0, database && application == 0 && version == 0:
		return 0, known, nil
	case !database || application != applicationID:
		return 0, known, fmt.Errorf("%s: %w", path, ErrDamaged)
	}
	return version, known, nil
}

// ignoreEnd returns err unless it says that a file has ended.
func ignoreEnd(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil
	}
	return err
}
