// Package sqlite keeps the node's record of addresses in one SQLite file. It is
// the only package that imports a driver of SQLite.
//
// The file is the node's memory, never its only truth: when it is lost, damaged
// or another node's, a new one is made and Open tells the caller to rebuild it
// from the kernel and the API. It must not know of either.
//
// One goroutine writes, through one connection; each change is one transaction.
// Commits aren't synced one by one (synchronous=NORMAL): a crash of the process
// loses nothing, a loss of power only changes after the last Checkpoint, and of
// pods that ended with the machine. The file is never corrupted by it.
package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	sqlite3 "modernc.org/sqlite/lib"

	"github.com/coil-net/coil/pkg/atomicfile"
	"github.com/coil-net/coil/pkg/store"
)

const (
	// The version of SQLite is 3.51.3 at least, or this doesn't compile: before, a log that is
	// reset while another connection writes can corrupt the file.
	_ uint = sqlite3.SQLITE_VERSION_NUMBER - 3_051_003
	// busyTimeout is how long to wait for another process, such as a person's shell.
	busyTimeout = 5 * time.Second
	// readers bounds the connections that only read.
	readers = 4
	// defaultBallast holds hundreds of transactions.
	defaultBallast = 1 << 20
)

// Options of Open.
type Options struct {
	// Path of the file. Files beside it have names that start with it.
	Path string
	// Identity is the node, as far as it is known.
	Identity store.Identity
	// BootID is the ID of this boot of the machine.
	BootID string
	// CoolDown is how long a freed address rests before it is reused.
	CoolDown time.Duration
	// Clock is the kernel's if nil.
	Clock Clock
	// BallastBytes is how much space is held for giving addresses back on a full
	// disk; less than that left counts as full. 0 is 1 MiB.
	BallastBytes int64
}

func (o *Options) validate() error {
	var errs []error
	if o.Path == "" {
		errs = append(errs, errors.New("path is empty"))
	}
	if o.BootID == "" {
		errs = append(errs, errors.New("boot ID is empty"))
	}
	if o.CoolDown < 0 || o.BallastBytes < 0 {
		errs = append(errs, errors.New("cool-down or ballast is negative"))
	}
	if o.Clock == nil {
		o.Clock = systemClock{}
	}
	if o.BallastBytes == 0 {
		o.BallastBytes = defaultBallast
	}
	return errors.Join(errs...)
}

// OpenResult describes the file that Open found.
type OpenResult struct {
	// Fresh: the record isn't complete, for the Reason. The caller must record the
	// node's blocks with AdoptBlocks and the attachments that the kernel has with
	// Adopt, then call Rebuilt. Until then each Open says so again.
	Fresh  bool
	Reason Reason
	// SetAside is the new name of a file that couldn't be used; "" if there was none.
	SetAside string
	// EarlierNode is the UID of the Node that the record was kept for before, on this machine and under the
	// same name; "" if that is the same Node.
	EarlierNode string
}

// Store is a store.Store in a file.
type Store struct {
	path     string
	bootID   string
	coolDown time.Duration
	clock    Clock

	opened         []store.Allocation // for Opened
	lock           *os.File
	file           os.FileInfo // of the file that is open
	writer, reader *pool
	ops            chan func()
	quit, stopped  chan struct{}
	closing        sync.Once
	dirty          atomic.Bool           // something was written since the last checkpoint
	cooledSeq      atomic.Int64          // addresses that were freed up to here have cooled down
	damage         atomic.Pointer[error] // the first that was read of the content
	copying        sync.Mutex            // held while there is a copy

	// The rest belongs to the writer's goroutine.

	identity store.Identity
	blocks   map[string]*block
	disputed map[string]bool // blocks that SetBlocks told another range of
	seq      int64
	ballast  ballast
	stale    bool // blocks and seq must be read again
	blocked  bool // nothing that needs space is written until unblock
}

var _ store.Store = (*Store)(nil)

// CheckpointInterval is how often the caller should call Checkpoint.
const CheckpointInterval = 4 * time.Second

// Open opens the record, or makes a new one: then, or when an earlier one can't be
// used, the result is Fresh. Errors: store.ErrReadOnly when the disk doesn't let
// it, ErrLocked while another process has the file open; both may pass.
//
// Records of another boot are as they were then. The caller compares the List with
// the kernel, and calls Release and Cool for attachments that aren't there.
func Open(ctx context.Context, o Options) (*Store, OpenResult, error) {
	scripts, err := migrations()
	if err != nil {
		return nil, OpenResult{}, err
	}
	return open(ctx, o, scripts)
}

// Opened returns the allocations that Open found in the file, as List does, the first time. It must not be called
// concurrently.
func (s *Store) Opened() []store.Allocation {
	all := s.opened
	s.opened = nil
	return all
}

func open(ctx context.Context, o Options, scripts []string) (*Store, OpenResult, error) {
	if err := o.validate(); err != nil {
		return nil, OpenResult{}, fmt.Errorf("open the record of addresses: %w", err)
	}
	s := &Store{
		path: o.Path, bootID: o.BootID, coolDown: o.CoolDown, clock: o.Clock, identity: o.Identity,
		ballast: ballast{path: o.Path + "-ballast", size: o.BallastBytes}, stale: true, disputed: map[string]bool{},
		ops: make(chan func()), quit: make(chan struct{}), stopped: make(chan struct{}),
	}
	res, err := s.open(context.WithoutCancel(ctx), scripts)
	if errors.Is(classify(err), store.ErrReadOnly) && s.ballast.drop() == nil {
		_ = s.closeFiles()
		res, err = s.open(context.WithoutCancel(ctx), scripts)
	}
	if err != nil {
		_ = s.closeFiles() // of files that couldn't be opened
		return nil, OpenResult{}, fmt.Errorf("open the record %s: %w", o.Path, classify(err))
	}
	go s.runWriter()
	return s, res, nil
}

func (s *Store) open(ctx context.Context, scripts []string) (res OpenResult, err error) {
	if err := os.MkdirAll(filepath.Dir(s.path), 0o700); err != nil {
		return res, classifyOS(err)
	}
	if s.lock, err = lock(s.path + "-lock"); err != nil {
		return res, classifyOS(err)
	}
	if err := removeCopy(s.path); err != nil && !errors.Is(classifyOS(err), store.ErrReadOnly) { // of a process that ended meanwhile
		return res, err
	}
	if res, err = s.openFile(ctx, scripts); err != nil {
		return res, err
	}
	if s.file, err = os.Stat(s.path); err != nil {
		return res, err
	}
	if s.reader, err = connect(s.path, true, readers); err != nil {
		return res, err
	}
	// The disk may be full. Then the record can still be read, and addresses given
	// back; the rest is done when it recovers.
	err = s.transact(ctx, func(t *txn) error { return t.settle(false) })
	if err == nil {
		err = classifyOS(s.ballast.ensure())
	}
	if errors.Is(classify(err), store.ErrReadOnly) {
		s.blocked, err = true, nil
	}
	return res, err
}

// openFile opens the writer's connection to a record that can be used; one that
// can't is set aside, and a new one made.
func (s *Store) openFile(ctx context.Context, scripts []string) (OpenResult, error) {
	var res OpenResult
	for {
		why, err := s.tryFile(ctx, scripts, &res)
		if err != nil {
			return res, err
		}
		if why == "" {
			break
		}
		if res.SetAside != "" {
			return res, fmt.Errorf("%w: a file that was just made is %s", ErrDamaged, why)
		}
		if s.writer != nil {
			_ = s.writer.Close() // an error about such a file doesn't matter
			s.writer = nil
		}
		res.Reason = why
		if res.SetAside, err = setAside(s.path, why, s.clock.Now()); err != nil {
			return res, classifyOS(err)
		}
	}
	m, err := readMeta(ctx, s.writer)
	if err != nil {
		return res, err
	}
	if uid := m["node_uid"]; s.identity.NodeUID != "" && uid != s.identity.NodeUID {
		res.EarlierNode = uid
	}
	if m["rebuilt_at"] == "" {
		res.Fresh = true
		res.Reason = cmp.Or(res.Reason, Unfinished)
	}
	return res, nil
}

// tryFile opens the writer's connection to the file, or to a new one if there is
// none, or says why that can't be.
func (s *Store) tryFile(ctx context.Context, scripts []string, res *OpenResult) (Reason, error) {
	st, err := os.Lstat(s.path)
	switch {
	case errors.Is(err, os.ErrNotExist) && taken(s.path):
		return Missing, nil // a log without its file
	case errors.Is(err, os.ErrNotExist):
		if err := createFile(s.path); err != nil {
			return "", classifyOS(err)
		}
	case err != nil:
		return "", err
	case !st.Mode().IsRegular():
		return OtherProgram, nil
	case st.Size() > 0 && st.Size() < 512:
		return Damaged, nil // SQLite would take it for an empty one and write over it
	}
	if s.writer, err = connect(s.path, false, 1); err != nil {
		return "", err
	}
	why, err := examine(ctx, s.writer, len(scripts), s.identity)
	if why == Missing {
		res.Reason = cmp.Or(res.Reason, Missing)
	} else if why != "" {
		return why, nil
	}
	if err == nil {
		err = migrate(ctx, s.writer, s.path, scripts, s.clock.Now())
	}
	if err == nil {
		s.opened, err = decode(ctx, s.writer)
	}
	if broken(err) {
		return Damaged, nil
	}
	return "", err
}

// createFile makes an empty file that only root can read; SQLite gives its log the
// same mode.
func createFile(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), atomicfile.SyncDir(filepath.Dir(path)))
}

// connect makes a pool of connections to a file, each with the same pragmas.
// cache_size, in KiB: of the default, 2 MiB for each connection, most is never read
// again, and the kernel has the file in its cache.
// temp_store: the image that coild runs in has no folder for temporary files.
func connect(path string, queryOnly bool, connections int) (*pool, error) {
	q := url.Values{"_txlock": {"immediate"}, "_pragma": {
		fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()), "journal_mode(WAL)", "synchronous(NORMAL)", "foreign_keys(1)",
		"journal_size_limit(4194304)", "cache_size(-512)", "temp_store(MEMORY)", "trusted_schema(0)", "cell_size_check(1)"}}
	if queryOnly {
		q.Set("_txlock", "deferred")
		q.Add("_pragma", "query_only(1)")
	}
	u := url.URL{Scheme: "file", Path: path, OmitHost: true, RawQuery: q.Encode()}
	db, err := sql.Open("sqlite", u.String())
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(connections)
	db.SetMaxIdleConns(connections)
	return &pool{DB: db, compiled: map[string]*sql.Stmt{}}, nil
}

// Close waits for the change that is being written and closes the file. Changes
// that come later are ErrClosed.
func (s *Store) Close() error {
	var err error
	s.closing.Do(func() {
		close(s.quit)
		<-s.stopped
		err = s.closeFiles()
	})
	if err != nil {
		return fmt.Errorf("close the record %s: %w", s.path, classify(err))
	}
	return nil
}

func (s *Store) closeFiles() error {
	var errs []error
	for _, p := range []*pool{s.reader, s.writer} {
		if p != nil {
			errs = append(errs, p.Close())
		}
	}
	if s.lock != nil {
		errs = append(errs, s.lock.Close())
	}
	return errors.Join(errs...)
}
