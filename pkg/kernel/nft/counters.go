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
func (t *table) Counters(ctx context.Context) ([]Counter, error) {
	found, err := t.readNamed(ctx)
	if err != nil {
		return nil, fmt.Errorf("list counters: %w", err)
	}
	var out []Counter
	for _, p := range protocols {
		for _, c := range found {
			if name, ok := strings.CutSuffix(c.name, p.suffix); ok && c.kind == nftables.ObjTypeCounter {
				out = append(out, Counter{Name: name, Family: p.family, Packets: c.packets, Bytes: c.bytes})
			}
		}
	}
	return out, nil
}
