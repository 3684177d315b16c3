// Package delqueue keeps the CNI DELs that came while coild couldn't be reached, one
// file each, until coild replays them.
//
// It owns the folder /var/lib/coil/del-queue and its files. It must not know how
// an attachment is deleted, nor whether coild runs. The plugin links it, so it must
// stay small.
//
// No DEL is lost and no pod is deleted twice if both sides keep this order:
//
//	plugin, DEL: coild can't be reached -> Add, synced to the disk -> try coild once more
//	plugin, ADD: Remove the record of the same ID -> call coild
//	coild:       bind the socket -> replay: List, for each: Has, delete, Remove -> serve;
//	             replay again now and then
//	cleanup:     remove the plugin's file -> remove the folder
//	plugin, DEL: after its Add, if its own file is gone -> Withdraw
//
// A plugin that fails to connect after its Add did so before coild bound the socket,
// so coild's List comes later and sees the record. An ADD takes the record of its own
// ID away, so that no replay deletes the new attachment, not even one that listed the
// record before. Cleanup comes when there is no pod left: a plugin that it has
// overtaken leaves nothing behind.
package delqueue

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/coil-net/coil/pkg/atomicfile"
	"github.com/coil-net/coil/pkg/attachment"
)

const (
	// MaxRecords bounds the disk that the queue takes. Each ADD that failed while
	// coild was down is followed by a DEL with a container ID of its own, so the
	// queue would grow for as long as coild is down.
	MaxRecords = 16384
	// maxRecordSize bounds one record, in bytes.
	maxRecordSize = 16 << 10

	suffix    = ".json"
	badSuffix = ".bad"
	// maxFileName leaves room for the additions of atomicfile and badSuffix, below NAME_MAX.
	maxFileName = 220
	// staleTemp is the age, beyond that of any plugin process, at which a temporary
	// file has no writer any more. Its DEL was never acknowledged.
	staleTemp = time.Hour
)

// ErrFull: the queue has MaxRecords records. The DEL must fail, so that the runtime
// tries it again.
var ErrFull = errors.New("queue of deletions is full")

// Record is one DEL that coild must do; its file is its JSON. Only the ID says what to
// delete; the rest is for logs.
type Record struct {
	attachment.ID
	// PodNamespace and PodName are empty when the runtime didn't tell them.
	PodNamespace string `json:"podNamespace,omitempty"`
	PodName      string `json:"podName,omitempty"`
	// QueuedAt is wall-clock time.
	QueuedAt time.Time `json:"queuedAt"`
}

// Queue is the queue in one folder. Its methods may be called by several
// processes at once.
type Queue struct{ dir string }

// New returns the queue in dir, which is made when it is needed.
func New(dir string) Queue { return Queue{dir} }

// Add records a DEL. When it returns nil, the record survives a power cut. A record
// of the same ID is replaced. ErrFull when there are too many.
func (q Queue) Add(r Record) error {
	text, err := json.Marshal(r)
	if err == nil && len(text) >= maxRecordSize {
		err = fmt.Errorf("record of %d bytes exceeds %d", len(text), maxRecordSize)
	}
	if err != nil {
		return fmt.Errorf("queue deletion: %w", err)
	}
	if err := os.MkdirAll(q.dir, 0o700); err != nil {
		return fmt.Errorf("queue deletion of %s: %w", r.ContainerID, err)
	}
	entries, err := os.ReadDir(q.dir)
	if err != nil {
		return fmt.Errorf("queue deletion of %s: %w", r.ContainerID, err)
	}
	if len(entries) >= MaxRecords {
		return fmt.Errorf("queue deletion of %s in %s: %w", r.ContainerID, q.dir, ErrFull)
	}
	if err := atomicfile.Write(q.path(r.ID), append(text, '\n'), 0o600); err != nil {
		return fmt.Errorf("queue deletion: %w", err)
	}
	// The folder itself may be new.
	return atomicfile.SyncDir(filepath.Dir(q.dir))
}

// List returns the records, oldest first, and the names of files that it set aside,
// by the suffix ".bad", because they hold no record. A missing folder is an empty
// queue. With an error, some record may be missing from the list: those that are
// returned can be replayed, but the queue must not be taken for empty.
func (q Queue) List() (records []Record, aside []string, err error) {
	entries, err := os.ReadDir(q.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("read queue of deletions: %w", err)
	}
	var errs []error
	for _, e := range entries {
		switch name := e.Name(); {
		case atomicfile.IsTemp(name):
			errs = append(errs, atomicfile.RemoveIfStale(q.dir, e, staleTemp))
		case strings.HasSuffix(name, suffix):
			r, err := q.read(e)
			switch {
			case errors.Is(err, fs.ErrNotExist): // removed in the meantime
			case errors.Is(err, errNoRecord):
				aside = append(aside, name)
				errs = append(errs, os.Rename(filepath.Join(q.dir, name), filepath.Join(q.dir, name+badSuffix)))
			case err != nil:
				errs = append(errs, fmt.Errorf("read queued deletion %s: %w", name, err))
			default:
				records = append(records, r)
			}
		}
	}
	slices.SortStableFunc(records, func(a, b Record) int { return a.QueuedAt.Compare(b.QueuedAt) })
	return records, aside, errors.Join(errs...)
}

// Has says whether there is still a record of id: an ADD may have taken it away since List.
func (q Queue) Has(id attachment.ID) (bool, error) {
	_, err := os.Lstat(q.path(id))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at queued deletion of %s: %w", id.ContainerID, err)
	}
	return true, nil
}

// Remove takes the record of id away: the deletion is done, or an ADD of the same
// ID is about to make it wrong. It is success when there is none.
func (q Queue) Remove(id attachment.ID) error {
	// A disk that is read-only refuses to remove a file even if there is none.
	if has, err := q.Has(id); !has && err == nil {
		return nil
	}
	if err := os.Remove(q.path(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove queued deletion of %s: %w", id.ContainerID, err)
	}
	return atomicfile.SyncDir(q.dir)
}

// Withdraw removes the record of id, and the folder if nothing else is in it, when there is no coild any more that would replay it.
func (q Queue) Withdraw(id attachment.ID) error {
	err := q.Remove(id)
	folder := os.Remove(q.dir)
	if errors.Is(folder, fs.ErrNotExist) || errors.Is(folder, syscall.ENOTEMPTY) {
		folder = nil
	}
	return errors.Join(err, folder)
}

// errNoRecord: the file doesn't hold a record of the ID that its name says.
var errNoRecord = errors.New("not a record")

// read returns the record in the file; errNoRecord if it has none.
func (q Queue) read(e fs.DirEntry) (Record, error) {
	if !e.Type().IsRegular() {
		return Record{}, errNoRecord
	}
	f, err := os.Open(filepath.Join(q.dir, e.Name()))
	if err != nil {
		return Record{}, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxRecordSize+1))
	if err != nil {
		return Record{}, err
	}
	var r Record
	if len(text) > maxRecordSize || json.Unmarshal(text, &r) != nil ||
		r.ContainerID == "" || r.IfName == "" || fileName(r.ID) != e.Name() {
		return Record{}, errNoRecord
	}
	return r, nil
}

func (q Queue) path(id attachment.ID) string { return filepath.Join(q.dir, fileName(id)) }

// fileName is one-to-one with the ID: neither part may contain a colon (CNI
// specification, "Parameters"; container IDs are alphanumeric with "_.-"). IDs that
// make no file name are hashed; by FNV, since cryptography takes long to start.
func fileName(id attachment.ID) string {
	name := id.ContainerID + ":" + id.IfName
	if len(name) > maxFileName || strings.Contains(name, "/") || strings.HasPrefix(name, ".") || strings.Count(name, ":") != 1 {
		sum := fnv.New128a()
		sum.Write([]byte(id.ContainerID + "\x00" + id.IfName))
		name = fmt.Sprintf("%x", sum.Sum(nil))
	}
	return name + suffix
}
