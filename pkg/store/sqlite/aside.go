package sqlite

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/atomicfile"
)

// Reason says why a record isn't complete, in the form of a reason of an Event.
type Reason string

// The reasons.
const (
	// Missing: there was no file, or an empty one.
	Missing Reason = "Missing"
	// Unfinished: an earlier process made the file and ended before Rebuilt.
	Unfinished Reason = "Unfinished"
	// Damaged: the file can't be read as a record.
	Damaged Reason = "Damaged"
	// OtherNode: the file was made by another node or machine.
	OtherNode Reason = "OtherNode"
	// OtherProgram: the file isn't Coil's.
	OtherProgram Reason = "OtherProgram"
	// NewerSchema: the file was made by a newer Coil.
	NewerSchema Reason = "NewerSchema"
)

// sidecars are the names that SQLite gives to the files of a database: the log
// and its index have the name of the file, with these added.
var sidecars = []string{"", "-wal", "-shm"}

// setAside renames the files of a record, so that a new one can be made and
// people can look at the old one. The file goes first: without it, its log can't
// be mistaken for that of a new one, since Open sets a log without file aside too.
func setAside(path string, why Reason, now time.Time) (string, error) {
	base := fmt.Sprintf("%s.%s-%s", path, now.UTC().Format("20060102T150405Z"), why)
	to := base
	for n := 2; taken(to); n++ {
		to = fmt.Sprintf("%s-%d", base, n)
	}
	for _, suffix := range sidecars {
		if err := os.Rename(path+suffix, to+suffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
	}
	prune(path, to)
	return to, atomicfile.SyncDir(filepath.Dir(path))
}

// keptFiles is how many records that were set aside are kept, and how many copies from before
// migrations.
const keptFiles = 3

// keptFile matches the end of the name of a record that was set aside, or of a copy: the time, the
// reason or the version, the number among the files of one second, and the suffix of a sidecar.
const keptFile = `\.(\d{8}T\d{6}Z)-(v\d+|[A-Za-z]+)(?:-(\d+))?(-wal|-shm|-journal)?$`

// prune removes all but the newest files of the kind of made: records that were set aside, or
// copies. made itself stays also if the clock was ahead before. A file that can't be removed is
// tried again the next time.
func prune(path, made string) {
	kept := regexp.MustCompile("^" + regexp.QuoteMeta(filepath.Base(path)) + keptFile)
	entries, err := os.ReadDir(filepath.Dir(path))
	one := kept.FindStringSubmatch(filepath.Base(made))
	if err != nil || one == nil {
		return
	}
	others := map[string]string{} // names without the suffix of a sidecar, with a text that sorts them by time and number
	for _, e := range entries {
		m := kept.FindStringSubmatch(e.Name())
		if m == nil || (m[2][0] == 'v') != (one[2][0] == 'v') {
			continue
		}
		if name := strings.TrimSuffix(e.Name(), m[4]); name != filepath.Base(made) {
			others[name] = fmt.Sprintf("%s%20s", m[1], m[3])
		}
	}
	oldest := slices.SortedFunc(maps.Keys(others), func(a, b string) int { return strings.Compare(others[a], others[b]) })
	for _, name := range oldest[:max(0, len(oldest)-(keptFiles-1))] {
		for _, suffix := range append(sidecars, "-journal") {
			_ = os.Remove(filepath.Join(filepath.Dir(path), name+suffix))
		}
	}
}

// taken says that a file of the record that path names is there.
func taken(path string) bool {
	for _, suffix := range sidecars {
		if _, err := os.Lstat(path + suffix); !errors.Is(err, fs.ErrNotExist) {
			return true
		}
	}
	return false
}

// lock makes this process the only one that has the record open; the kernel
// gives the lock back when the process ends, in whatever way. Locks of the file
// itself are SQLite's, which a second descriptor of this process would drop.
func lock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if errors.Is(err, unix.EROFS) {
		if g, oerr := os.Open(path); oerr == nil {
			f, err = g, nil
		}
	}
	return locked(f, err)
}

// locked locks a file that was opened, or closes it.
func locked(f *os.File, err error) (*os.File, error) {
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = ErrLocked
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
