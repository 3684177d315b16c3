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

// Renew makes elements last, or removes them, in one transaction. Nothing but elements changes, and Sync leaves them alone. Afterwards the
// kernel removes them by itself. Each element may come once.
func (t *Table) Renew(ctx context.Context, renewals ...Renewal) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.renew(ctx, renewals); err != nil {
		return fmt.Errorf("table %s of nftables: renew elements: %w", t.name, err)
	}
	return nil
}

func (t *Table) renew(ctx context.Context, renewals []Renewal) error {
	before, err := t.currentGeneration(ctx)
	if err != nil {
		return err
	}
	conn, err := t.connect()
	if err != nil {
		return err
	}
	for _, r := range renewals {
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
			continue
		}
		element[0].Timeout = r.For
		if err := conn.SetAddElements(in, element); err != nil {
			return err
		}
	}
	err = conn.Flush()
	// What is known of the table holds still, unless somebody else has changed something, too.
	if t.known != nil && t.generation == before {
		if after, e := t.currentGeneration(ctx); err == nil && e == nil && after == before+1 {
			t.generation = after
		}
	}
	return err
}
