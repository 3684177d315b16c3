package nft

import (
	"context"
	"fmt"
	"strings"

	"github.com/google/nftables"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Counter is how much of something was counted since the table was made. A table that is
// replaced goes on counting.
type Counter struct {
	// Name is one of the constants of this package.
	Name    string
	Family  dataplane.Family
	Packets uint64
	Bytes   uint64
}

// Counters returns what was counted; nothing before the first Sync.
func (t *table) Counters(context.Context) ([]Counter, error) {
	conn, err := t.connect()
	if err != nil {
		return nil, err
	}
	found, err := readCounters(conn)
	if err != nil {
		return nil, fmt.Errorf("table %s of nftables: %w", dataplane.NftTable, err)
	}
	var out []Counter
	for _, p := range protocols {
		for _, c := range found {
			if name, ok := strings.CutSuffix(c.Name, p.suffix); ok {
				out = append(out, Counter{Name: name, Family: p.family, Packets: c.Packets, Bytes: c.Bytes})
			}
		}
	}
	return out, nil
}

// readCounters returns the named counters of the table.
func readCounters(conn *nftables.Conn) ([]*nftables.CounterObj, error) {
	objects, err := conn.GetObjects(named())
	if err != nil {
		return nil, fmt.Errorf("list counters: %w", err)
	}
	var counters []*nftables.CounterObj
	for _, o := range objects {
		if c, ok := o.(*nftables.CounterObj); ok {
			counters = append(counters, c)
		}
	}
	return counters, nil
}
