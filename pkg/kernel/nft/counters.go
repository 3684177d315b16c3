package nft

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Counter is a named counter with its counts since it was made.
type Counter struct {
	Name    string
	Packets uint64
	Bytes   uint64
}

// Counters returns all counters; none before the first Sync.
func (t *Table) Counters(ctx context.Context) ([]Counter, error) {
	found, err := t.readNamed(ctx)
	if err != nil {
		return nil, fmt.Errorf("list counters: %w", err)
	}
	var out []Counter
	for _, c := range found {
		if c.kind == nftables.ObjTypeCounter {
			out = append(out, c.Counter)
		}
	}
	return out, nil
}

// ElementCounter is an element of a Counted set with its counts since it was added.
type ElementCounter struct {
	Key            string
	Packets, Bytes uint64
}

// Counted returns the counts of a Counted set. A set that isn't there has none.
func (t *Table) Counted(ctx context.Context, set string) ([]ElementCounter, error) {
	all, err := rtnl.Collect(ctx, t.handle, t.askElements(set), t.appendCounted)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("list counters of set %s: %w", set, err)
	}
	return all, nil
}

// appendCounted appends the elements of one message.
func (t *Table) appendCounted(all []ElementCounter, body []byte) ([]ElementCounter, error) {
	attributes, ours, as := t.about(body)
	if !ours {
		return all, as.Err
	}
	for e := range as.In(as.Find(attributes, unix.NFTA_SET_ELEM_LIST_ELEMENTS).Value) {
		c := ElementCounter{Key: string(as.Find(e.Value, unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE).Value)}
		if x := as.Find(e.Value, unix.NFTA_SET_ELEM_EXPR).Value; as.Find(x, unix.NFTA_EXPR_NAME).Text() == counterExpression {
			c.Bytes = as.Find(x, unix.NFTA_EXPR_DATA, unix.NFTA_COUNTER_BYTES).BE64()
			c.Packets = as.Find(x, unix.NFTA_EXPR_DATA, unix.NFTA_COUNTER_PACKETS).BE64()
		}
		all = append(all, c)
	}
	return all, as.Err
}

// Expiring returns the keys of a set whose elements rules add, and the time until each expires. A set that isn't
// there has none.
func (t *Table) Expiring(ctx context.Context, set string) (map[string]time.Duration, error) {
	elements, err := t.readElements(ctx, set)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("list elements of set %s: %w", set, err)
	}
	out := make(map[string]time.Duration, len(elements))
	for _, e := range elements {
		out[e.Key] = e.expires
	}
	return out, nil
}

// Sets returns the sets of the table in the kernel, with names, elements and Interval alone: Key, Value and Size aren't
// read.
func (t *Table) Sets(ctx context.Context) ([]dataplane.Set, error) {
	exists, err := t.Exists(ctx)
	if err != nil || !exists {
		return nil, err
	}
	found, err := t.readSets(ctx)
	if err != nil {
		return nil, fmt.Errorf("list sets: %w", err)
	}
	var out []dataplane.Set
	for _, s := range found {
		elements, err := t.readElements(ctx, s.Name)
		if err != nil {
			return nil, fmt.Errorf("list elements of set %s: %w", s.Name, err)
		}
		c := contentOf(s.Interval, elements)
		out = append(out, dataplane.Set{Name: s.Name, Interval: s.Interval, Elements: c.elements, Ranges: c.ranges})
	}
	return out, nil
}
