package sqlite

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
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
	return to, syncDir(path)
}

// keptFiles is how many records that were set aside are kept, and how many copies from before
// migrations.
const keptFiles = 3

// keptFile is the end of the name of a record that was set aside, or of a copy: the time, the number
// of those of one second, and what SQLite adds.
var keptFile = regexp.MustCompile(`^\.(\d{8}T\d{6}Z)-(v\d+|[A-Za-z]+)(?:-(\d+))?(-wal|-shm|-journal)?$`)

// prune removes all but the newest of the records that were set aside, or of the copies: those of
// the kind of made, which stays also if the clock was ahead before. What can't be removed is tried
// again the next time.
func prune(path, made string) {
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return
	}
	isCopy := func(kind string) bool { return kind[0] == 'v' }
	parse := func(name string) []string {
		end, ours := strings.CutPrefix(name, filepath.Base(path))
		if !ours {
			return nil
		}
		return keptFile.FindStringSubmatch(end)
	}
	one := parse(filepath.Base(made))
	if one == nil {
		return
	}
	type group struct {
		time   string
		number int
		files  []string
	}
	groups := map[string]*group{}
	for _, e := range entries {
		m := parse(e.Name())
		if m == nil || isCopy(m[2]) != isCopy(one[2]) {
			continue
		}
		base := strings.TrimSuffix(e.Name(), m[4])
		if base == filepath.Base(made) {
			continue
		}
		if groups[base] == nil {
			number, _ := strconv.Atoi(m[3])
			groups[base] = &group{time: m[1], number: number}
		}
		groups[base].files = append(groups[base].files, e.Name())
	}
	oldest := slices.SortedFunc(maps.Values(groups), func(a, b *group) int {
		return cmp.Or(strings.Compare(a.time, b.time), cmp.Compare(a.number, b.number))
	})
	for _, g := range oldest[:max(0, len(oldest)-(keptFiles-1))] {
		for _, f := range g.files {
			_ = os.Remove(filepath.Join(filepath.Dir(path), f))
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

// syncDir makes the names in the folder of path durable.
func syncDir(path string) error {
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
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
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = ErrLocked
		}
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
