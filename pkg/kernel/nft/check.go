package nft

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/coil-net/coil/pkg/dataplane"
)

// check says what of the table isn't as it is defined. Nothing is changed. As long as nobody changes
// any table, the kernel is asked for no more than that.
func (t *table) check(ctx context.Context, d definition) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	want, err := d.shape()
	if err != nil {
		return err
	}
	conn, err := t.connect()
	if err != nil {
		return err
	}
	have, generation, err := t.current(ctx, conn, d, want)
	if err != nil {
		return fmt.Errorf("read table %s of nftables: %w", dataplane.NftTable, err)
	}
	if len(have.shape) == 0 {
		return fmt.Errorf("table %s of nftables is missing", dataplane.NftTable)
	}
	var errs []error
	for _, w := range want {
		if !slices.Contains(have.shape, w) {
			errs = append(errs, fmt.Errorf("table %s of nftables: %s is missing", dataplane.NftTable, w))
		}
	}
	for _, h := range have.shape {
		if !slices.Contains(want, h) {
			errs = append(errs, fmt.Errorf("table %s of nftables: %s shouldn't be there", dataplane.NftTable, h))
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	for _, s := range d.sets {
		if !s.is(have.sets[s.name]) {
			errs = append(errs, fmt.Errorf("table %s of nftables: set %s has other elements", dataplane.NftTable, s.name))
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	if after, err := t.currentGeneration(ctx); err == nil && after == generation {
		t.known, t.generation = have, after
	}
	return nil
}
