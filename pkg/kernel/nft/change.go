package nft

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/coil-net/coil/pkg/dataplane"
)

// ErrUnknown says that the table isn't known to be as it was synced: somebody may have changed it.
var ErrUnknown = errors.New("it may not be as it was made")

// Change changes elements of sets in one transaction. It costs the same however large the sets are: they aren't compared with others, nor kept in memory, so that the next Sync
// reads them. It is an error, ErrUnknown, if anybody else has changed any table of the namespace since the last Sync or Change. After any error the table is to be synced.
func (t *Table) Change(ctx context.Context, changes ...dataplane.SetChange) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.change(ctx, changes); err != nil {
		return fmt.Errorf("table %s of nftables: change elements: %w", t.name, err)
	}
	return nil
}

func (t *Table) change(ctx context.Context, changes []dataplane.SetChange) error {
	before, err := t.currentGeneration(ctx)
	if err != nil {
		return err
	}
	if !t.made || t.generation != before {
		return ErrUnknown
	}
	if !slices.ContainsFunc(changes, func(c dataplane.SetChange) bool { return len(c.Remove)+len(c.Add) > 0 }) {
		return nil
	}
	conn, err := t.connect()
	if err != nil {
		return err
	}
	t.made, t.known = false, nil
	for _, c := range changes {
		s, ok := t.defined[c.Set]
		if !ok {
			return fmt.Errorf("set %s: %w", c.Set, errUnknown)
		}
		if err := errors.Join(s.collect(conn.SetDeleteElements, s.nft(0), content{elements: c.Remove}), s.collect(conn.SetAddElements, s.nft(0), content{elements: c.Add})); err != nil {
			return err
		}
	}
	if err := conn.Flush(); err != nil {
		return err
	}
	// If somebody else has changed something, too, the next Change tells so.
	if after, err := t.currentGeneration(ctx); err == nil && after == before+1 {
		t.made, t.generation = true, after
	}
	return nil
}
