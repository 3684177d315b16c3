package nft

import (
	"context"
	"errors"
	"fmt"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Check says in which ways the table isn't as Sync makes it. Nothing is changed. As long as nobody changes any table,
// the kernel is asked for no more than that.
func (t *Table) Check(ctx context.Context, r dataplane.Ruleset) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(r.Chains) == 0 {
		return nil
	}
	d, err := t.define(r)
	if err != nil {
		return err
	}
	have, generation, err := t.current(ctx, d)
	if err != nil {
		return fmt.Errorf("read table %s of nftables: %w", t.name, err)
	}
	if len(have.shape) == 0 {
		return fmt.Errorf("table %s of nftables is missing", t.name)
	}
	var errs []error
	missing, more := differs(have.shape, d.shape)
	for _, m := range missing {
		errs = append(errs, fmt.Errorf("table %s of nftables: %s is missing", t.name, m))
	}
	for _, m := range more {
		errs = append(errs, fmt.Errorf("table %s of nftables: %s shouldn't be there", t.name, m))
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	for _, s := range d.sets {
		if add, remove := s.difference(have.sets[s.Name]); add.size()+remove.size() > 0 {
			errs = append(errs, fmt.Errorf("table %s of nftables: set %s has other elements", t.name, s.Name))
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	if after, err := t.currentGeneration(ctx); err == nil && after == generation {
		t.made, t.known, t.generation = true, have, after
	}
	return nil
}
