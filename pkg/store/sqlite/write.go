package sqlite

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/coil-net/coil/pkg/store"
)

// txn is one transaction of the writer. It has no sql.Tx, which would start a goroutine for
// each: every statement that the writer's goroutine runs by its only connection is in the transaction.
type txn struct {
	*Store
	ctx      context.Context
	now      time.Time
	boottime time.Duration
}

func (t *txn) exec(text string, args ...any) (int64, error) {
	return t.writer.exec(t.ctx, text, args...)
}

func (t *txn) row(text string, args ...any) scanner { return t.writer.row(t.ctx, text, args...) }

// nextSeq is the number of the next event in the order in which addresses were freed.
func (t *txn) nextSeq() int64 {
	t.seq++
	return t.seq
}

// boottimeMS is the time since boot, rounded up: an address never cools too short.
func (t *txn) boottimeMS() int64 { return (t.boottime + time.Millisecond - 1).Milliseconds() }

// kind says whether a change needs space on the disk.
type kind int

const (
	// grows: the change may need space; it is refused while the disk is full.
	grows kind = iota
	// givesBack: the change may use the space of the ballast.
	givesBack
)

// write runs do in a transaction of the one writer and waits for its end, or for
// ctx: the change may then still happen. The text of an error begins with what.
func (s *Store) write(ctx context.Context, k kind, what string, do func(*txn) error) error {
	err := s.exclusively(ctx, func(ctx context.Context) error { return s.run(ctx, k, do) })
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// exclusively has the writer call do. SQLite never sees the end of ctx, which
// would interrupt a commit at an unknown point.
func (s *Store) exclusively(ctx context.Context, do func(context.Context) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	done := make(chan error, 1)
	select {
	case s.ops <- func() { done <- classify(do(context.WithoutCancel(ctx))) }:
	case <-ctx.Done():
		return ctx.Err()
	case <-s.quit:
		return ErrClosed
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("outcome is unknown: %w", ctx.Err())
	}
}

// runWriter is the one goroutine that changes the file; Close ends and awaits it.
func (s *Store) runWriter() {
	defer close(s.stopped)
	for {
		select {
		case do := <-s.ops:
			do()
		case <-s.quit:
			return
		}
	}
}

// run runs do in a transaction, on a full disk too if it gives something back.
func (s *Store) run(ctx context.Context, k kind, do func(*txn) error) error {
	if k == grows && s.blocked {
		if err := s.unblock(ctx); err != nil {
			return err
		}
	}
	err := s.transact(ctx, do)
	if !errors.Is(err, store.ErrReadOnly) {
		return err
	}
	s.blocked = true
	if k == grows {
		return err
	}
	for {
		// Moving the log into the file lets the next transaction write over the log's
		// space, which nobody else can take. That may need some space too.
		_, _ = s.checkpoint(ctx, "RESTART") // the transaction tells
		if err = s.transact(ctx, do); !errors.Is(err, store.ErrReadOnly) || s.ballast.shrink() != nil {
			return err
		}
	}
}

// transact runs do in one transaction.
func (s *Store) transact(ctx context.Context, do func(*txn) error) (err error) {
	defer func() {
		err = s.note(err)
		if err != nil && !answer(err) {
			s.stale = true // the blocks in memory may be those of the lost transaction
		}
	}()
	if _, err := s.writer.exec(ctx, beginSQL); err != nil {
		return err
	}
	t := &txn{Store: s, ctx: ctx, now: roundUp(s.clock.Now()), boottime: s.clock.Boottime()}
	if s.stale {
		if err = t.load(); err == nil {
			s.stale = false
		}
	}
	if err == nil {
		err = do(t)
	}
	if err == nil {
		_, err = s.writer.exec(ctx, commitSQL)
	}
	if err != nil {
		// SQLite has rolled back already after some errors; then this is one too.
		_, _ = s.writer.exec(ctx, rollbackSQL)
		return err
	}
	s.dirty.Store(true)
	return nil
}

// answer says that err is an answer of the contract, of a transaction that
// changed nothing.
func answer(err error) bool {
	for _, e := range []error{store.ErrNotFound, store.ErrNoAddress, store.ErrState, store.ErrInUse, store.ErrConflict} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
