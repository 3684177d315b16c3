package nft

import (
	"context"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Originating is the ruleset of a client whose connections from outside are answered by the
// way they came: a mark on their packets, which a routing policy rule looks at.
type Originating struct{ *table }

// NewOriginating returns the ruleset of a namespace, which must stay open as long as the
// Originating is used.
func NewOriginating(ns *netns.NS) (*Originating, error) {
	t, err := open(ns)
	if err != nil {
		return nil, err
	}
	return &Originating{t}, nil
}

// Sync makes the table as the rules say; connections that are marked already stay so.
func (o *Originating) Sync(ctx context.Context, r dataplane.OriginatingRules) (dataplane.Result, error) {
	return o.sync(ctx, originating(r))
}

// Remove removes the table; none is no error.
func (o *Originating) Remove(context.Context) error { return o.remove() }

func originating(r dataplane.OriginatingRules) definition {
	var d definition
	entry := chain{name: "entry", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPrerouting, priority: nftables.ChainPriorityMangle}
	// The type makes the kernel look for a route again when the mark has changed.
	exit := chain{name: "exit", kind: nftables.ChainTypeRoute, hook: nftables.ChainHookOutput, priority: nftables.ChainPriorityMangle}
	for _, p := range protocols {
		sources := set{name: "sources" + p.suffix, key: p.address, interval: true, elements: p.intervals(r.Sources, nil)}
		d.sets = append(d.sets, sources)
		entry.add("opened from outside", iifname(r.Uplink), p.of(), ctState(expr.CtStateBitNEW),
			p.in(p.src, sources, true), ctMarkSet(r.Mark, r.Mask))
	}
	exit.add("answers go by the way the connection came", ctReply(), ctMark(r.Mark), metaMarkSet(r.Mark, r.Mask))
	d.chains = []chain{entry, exit}
	return d
}
