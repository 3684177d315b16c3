package floatingtest

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/tables"
	"github.com/coil-net/coil/pkg/testkit"
)

// Table is a table of flows in memory.
type Table struct {
	mu     sync.Mutex
	flows  map[tables.Key]conntrack.Flow
	reads  int
	faults Faults
	// events are the subscriptions.
	events []*Events
}

// Faults are what goes wrong with a table.
type Faults struct {
	// Insert is the error of Insert, and Subscribe that of Subscribe.
	Insert, Subscribe error
	// Reading is called when flows have been read, with how often that was.
	Reading func(n int)
	// Limit is how many flows the table may have, 0 any number.
	Limit int
}

var _ tables.Table = (*Table)(nil)

// NewTable returns an empty Table.
func NewTable() *Table { return &Table{flows: map[tables.Key]conntrack.Flow{}} }

// Translated implements tables.Table.
func (t *Table) Translated(_ context.Context, addrs []netip.Addr, each func(conntrack.Flow)) error {
	t.mu.Lock()
	t.reads++
	n, reading := t.reads, t.faults.Reading
	var all []conntrack.Flow
	for _, f := range t.flows {
		if slices.Contains(addrs, f.Translated.Addr()) {
			all = append(all, f)
		}
	}
	t.mu.Unlock()
	for _, f := range all {
		each(f)
	}
	if reading != nil {
		reading(n)
	}
	return nil
}

func (t *Table) put(flows []conntrack.Flow, known bool) (n int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range flows {
		if _, have := t.flows[tables.KeyOf(f)]; have == known {
			t.flows[tables.KeyOf(f)] = f
			n++
		}
	}
	return n, t.faults.Insert
}

// Insert implements tables.Table.
func (t *Table) Insert(_ context.Context, flows []conntrack.Flow) (int, error) {
	return t.put(flows, false)
}

// Update implements tables.Table.
func (t *Table) Update(_ context.Context, flows []conntrack.Flow) (int, error) {
	return t.put(flows, true)
}

// Forget implements tables.Table.
func (t *Table) Forget(_ context.Context, addrs ...netip.Addr) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.DeleteFunc(t.flows, func(_ tables.Key, f conntrack.Flow) bool { return slices.Contains(addrs, f.Translated.Addr()) })
	return 0, nil
}

// Delete implements tables.Table.
func (t *Table) Delete(_ context.Context, flows []conntrack.Flow) (n int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range flows {
		if have, ok := t.flows[tables.KeyOf(f)]; ok && have.Translated == f.Translated {
			delete(t.flows, tables.KeyOf(f))
			n++
		}
	}
	return n, nil
}

// Size implements tables.Table.
func (t *Table) Size() (count, limit int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.flows), t.faults.Limit, nil
}

// Close implements tables.Table.
func (t *Table) Close() {}

// Fail changes the faults.
func (t *Table) Fail(change func(*Faults)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	change(&t.faults)
}

// All are the flows.
func (t *Table) All() map[tables.Key]conntrack.Flow {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.flows)
}

// Reads is how often flows were read.
func (t *Table) Reads() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.reads
}

// Set lets the table have flows, in place of others with the same ends.
func (t *Table) Set(flows ...conntrack.Flow) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range flows {
		t.flows[tables.KeyOf(f)] = f
	}
}

// Add lets the table have some flows of an address, all in one moment: nobody reads a part of them.
func (t *Table) Add(a floating.Address, from, to int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := from; i < to; i++ {
		f := Flow(a, i)
		t.flows[tables.KeyOf(f)] = f
	}
}

// Remove takes flows of an address away.
func (t *Table) Remove(a floating.Address, from, to int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := from; i < to; i++ {
		delete(t.flows, tables.KeyOf(Flow(a, i)))
	}
}

// Events are a subscription.
type Events struct {
	// Calls are done where Run hears of events.
	Calls chan func(wanted func(netip.Addr) bool, each func(conntrack.Event), lost func()) error
	// Closed is closed by Close.
	Closed chan struct{}
	once   sync.Once
	table  *Table
}

// Subscribe begins a subscription.
func (t *Table) Subscribe() (*Events, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.faults.Subscribe != nil {
		return nil, t.faults.Subscribe
	}
	e := &Events{table: t, Calls: make(chan func(func(netip.Addr) bool, func(conntrack.Event), func()) error), Closed: make(chan struct{})}
	t.events = append(t.events, e)
	return e, nil
}

// Subscription waits for the i-th subscription.
func (t *Table) Subscription(test *testing.T, i int) *Events {
	test.Helper()
	var e *Events
	testkit.Eventually(test, 10*time.Second, "the flows are followed", func() error {
		t.mu.Lock()
		defer t.mu.Unlock()
		if len(t.events) <= i {
			return fmt.Errorf("%d subscriptions", len(t.events))
		}
		e = t.events[i]
		return nil
	})
	return e
}

// Run implements standby.Events.
func (e *Events) Run(ctx context.Context, _ time.Duration, wanted func(netip.Addr) bool, each func(conntrack.Event), lost func()) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case call := <-e.Calls:
			if err := call(wanted, each, lost); err != nil {
				return err
			}
		}
	}
}

// Close implements standby.Events.
func (e *Events) Close() error {
	e.once.Do(func() { close(e.Closed) })
	return nil
}

// Tell tells of events, and returns when they have been taken.
func (e *Events) Tell(events ...conntrack.Event) {
	done := make(chan bool)
	e.Calls <- func(wanted func(netip.Addr) bool, each func(conntrack.Event), _ func()) error {
		for _, event := range events {
			if wanted(event.Translated.Addr()) {
				each(event)
			}
		}
		close(done)
		return nil
	}
	<-done
}

// Begin opens flows of an address in the table, and End closes them; both are told.
func (e *Events) Begin(a floating.Address, from, to int) {
	e.table.Add(a, from, to)
	for i := from; i < to; i++ {
		e.Tell(conntrack.Event{Flow: Flow(a, i)})
	}
}

// End closes flows; see Begin.
func (e *Events) End(a floating.Address, from, to int) {
	e.table.Remove(a, from, to)
	for i := from; i < to; i++ {
		e.Tell(conntrack.Event{Flow: Flow(a, i), Over: true})
	}
}
