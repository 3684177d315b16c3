package nft

import (
	"context"
	"fmt"
	"time"

	"github.com/google/nftables"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Renewal is an element of a set with a Timeout, and for how long it is to be there from now on.
type Renewal struct {
	dataplane.Set
	Key string
	// For is how long; the element is removed if it isn't positive. The kernel counts milliseconds.
	For time.Duration
}

// Renewals are elements of a table.
type Renewals struct {
	Table    *Table
	Elements []Renewal
}

// Renew makes elements last, or removes them, in one transaction. Nothing but elements changes, and Sync leaves them alone. Afterwards the
// kernel removes them by itself. Each element may come once.
func (t *Table) Renew(ctx context.Context, renewals ...Renewal) error {
	return Renew(ctx, Renewals{t, renewals})
}

// Renew is like Table.Renew, for tables of one network namespace in one transaction: the kernel takes milliseconds for each. Each table may come once,
// and callers name tables in the same order.
func Renew(ctx context.Context, all ...Renewals) error {
	for _, of := range all {
		of.Table.mu.Lock()
		defer of.Table.mu.Unlock()
	}
	if len(all) == 0 {
		return nil
	}
	if err := renew(ctx, all); err != nil {
		return fmt.Errorf("table %s of nftables: renew elements: %w", all[0].Table.name, err)
	}
	return nil
}

func renew(ctx context.Context, all []Renewals) error {
	first := all[0].Table
	before, err := first.currentGeneration(ctx)
	if err != nil {
		return err
	}
	conn, err := first.connect()
	if err != nil {
		return err
	}
	for _, of := range all {
		for _, r := range of.Elements {
			if err := of.Table.collect(conn, r); err != nil {
				return err
			}
		}
	}
	err = conn.Flush()
	after, unknown := first.currentGeneration(ctx)
	if err != nil || unknown != nil || after != before+1 {
		return err
	}
	// What is known of a table holds still, unless somebody else has changed something, too.
	for _, of := range all {
		if of.Table.made && of.Table.generation == before {
			of.Table.generation = after
		}
	}
	return nil
}

// collect collects the requests of a renewal.
func (t *Table) collect(conn *nftables.Conn, r Renewal) error {
	s, err := t.set(r.Set)
	if err != nil {
		return err
	}
	// One that is there keeps its time when it is added, and one that isn't can't be deleted: so it is added to be deleted.
	in, element := s.nft(0), []nftables.SetElement{{Key: []byte(r.Key)}}
	if err := conn.SetAddElements(in, element); err != nil {
		return err
	}
	if err := conn.SetDeleteElements(in, element); err != nil {
		return err
	}
	if r.For < time.Millisecond {
		return nil
	}
	element[0].Timeout = r.For
	return conn.SetAddElements(in, element)
}
