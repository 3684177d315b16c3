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

// Change changes elements of sets in one transaction. It costs the same however large the sets are: they aren't compared with others. It is an error, ErrUnknown, if
// anybody else has changed any table of the namespace since the last Sync or Change. After any error the table is to be synced.
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
	if t.known == nil || t.generation != before {
		return ErrUnknown
	}
	if !slices.ContainsFunc(changes, func(c dataplane.SetChange) bool { return len(c.Remove)+len(c.Add) > 0 }) {
		return nil
	}
	conn, err := t.connect()
	if err != nil {
		return err
	}
	known := t.known
	t.known = nil
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
	after, err := t.currentGeneration(ctx)
	if err != nil || after != before+1 {
		return nil // the next Sync reads it
	}
	for _, c := range changes {
		known.change(c)
	}
	t.known, t.generation = known, after
	return nil
}

// change notes a change of a set.
func (s *state) change(c dataplane.SetChange) {
	if s.changed == nil {
		s.changed = map[string]map[dataplane.Element]bool{}
	}
	if s.changed[c.Set] == nil {
		s.changed[c.Set] = map[dataplane.Element]bool{}
	}
	for _, e := range c.Remove {
		s.changed[c.Set][e] = false
	}
	for _, e := range c.Add {
		s.changed[c.Set][e] = true
	}
}

// settle brings the sets up to date with the changes. An element that was added may have been there before. A state that isn't known has none.
func (s *state) settle() {
	if s == nil {
		return
	}
	for name, changed := range s.changed {
		c := s.sets[name]
		c.elements = slices.DeleteFunc(slices.Clone(c.elements), func(e dataplane.Element) bool { _, ok := changed[e]; return ok })
		for e, added := range changed {
			if added {
				c.elements = append(c.elements, e)
			}
		}
		s.sets[name] = c
	}
	s.changed = nil
}
