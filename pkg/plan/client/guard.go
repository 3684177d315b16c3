package client

import (
	"fmt"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Guard returns the node's guard of a client. It has the same destinations as the client's
// own ruleset, which a program in the pod may take away.
func (s State) Guard() dataplane.ClientGuard {
	if s.Filter == nil {
		return dataplane.ClientGuard{}
	}
	return dataplane.ClientGuard{Destinations: s.Filter.Destinations, Replies: s.Filter.Sources}
}

// WidenGuard returns the guard of a client while it changes: all that passes one of two guards passes.
func WidenGuard(from, to dataplane.ClientGuard) (dataplane.ClientGuard, error) {
	before, err := setOf(from.Destinations)
	if err != nil {
		return dataplane.ClientGuard{}, err
	}
	var both, either netipx.IPSetBuilder
	add(&both, to.Destinations)
	both.Intersect(before)
	add(&either, from.Replies)
	add(&either, to.Replies)
	return guardOf(&both, &either)
}

// NarrowGuard returns the guard of a client that is to have one of two, and it isn't known which: a packet passes that
// passes both.
func NarrowGuard(a, b dataplane.ClientGuard) (dataplane.ClientGuard, error) {
	var either, replies netipx.IPSetBuilder
	for _, g := range []dataplane.ClientGuard{a, b} {
		add(&either, g.Destinations)
		add(&replies, g.Replies)
	}
	for _, g := range []dataplane.ClientGuard{a, b} {
		silent, err := setOf(g.Destinations, g.Replies...)
		if err != nil {
			return dataplane.ClientGuard{}, err
		}
		replies.RemoveSet(silent)
	}
	return guardOf(&either, &replies)
}

func guardOf(destinations, replies *netipx.IPSetBuilder) (g dataplane.ClientGuard, err error) {
	if g.Destinations, err = rangesOf(destinations); err != nil {
		return g, err
	}
	g.Replies, err = rangesOf(replies)
	return g, err
}

func add(b *netipx.IPSetBuilder, ranges []netipx.IPRange) {
	for _, r := range ranges {
		b.AddRange(r)
	}
}

// setOf returns the addresses of some ranges that aren't in others.
func setOf(ranges []netipx.IPRange, others ...netipx.IPRange) (*netipx.IPSet, error) {
	var b netipx.IPSetBuilder
	add(&b, ranges)
	for _, r := range others {
		b.RemoveRange(r)
	}
	s, err := b.IPSet()
	if err != nil {
		return nil, fmt.Errorf("join ranges: %w", err)
	}
	return s, nil
}

func rangesOf(b *netipx.IPSetBuilder) ([]netipx.IPRange, error) {
	s, err := b.IPSet()
	if err != nil {
		return nil, fmt.Errorf("join ranges: %w", err)
	}
	return s.Ranges(), nil
}
