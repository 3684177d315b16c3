// Package nexthop makes the kernel's nexthop objects as they are wanted.
//
// It owns those of one protocol whose IDs are Coil's, and nothing else. It must not know
// which routes refer to them.
package nexthop

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Set is a number of objects, each ID once.
type Set struct {
	Nexthops []dataplane.Nexthop
	Groups   []dataplane.NexthopGroup
}

// has says whether an ID is in the set.
func (s Set) has(id uint32) bool {
	return slices.ContainsFunc(s.Nexthops, func(n dataplane.Nexthop) bool { return n.ID == id }) ||
		slices.ContainsFunc(s.Groups, func(g dataplane.NexthopGroup) bool { return g.ID == id })
}

// Syncer owns the objects of one protocol in a network namespace.
type Syncer struct {
	handle   *rtnl.Handle
	protocol int

	// mu is held while objects are read and written.
	mu sync.Mutex
}

// New returns a Syncer of the objects of a protocol.
func New(h *rtnl.Handle, protocol int) *Syncer { return &Syncer{handle: h, protocol: protocol} }

// Ensure makes the wanted objects, and changes those that differ: members first, then groups,
// each in one step. It removes nothing: routes may refer to it. It goes on after a failure;
// the Result counts what was done and the error joins what wasn't. An ID that another
// protocol's object has is an error that names that one.
func (s *Syncer) Ensure(ctx context.Context, want Set) (dataplane.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var result dataplane.Result
	all, err := s.handle.Nexthops(ctx, 0)
	if err != nil {
		return result, fmt.Errorf("read nexthops: %w", err)
	}
	var errs []error
	compare(want, all, s.protocol, func(r rtnl.Request, exists bool, err error) {
		if err == nil {
			err = s.handle.Do(ctx, r)
		}
		switch {
		case err != nil:
			errs = append(errs, err)
		case exists:
			result.Replaced++
		default:
			result.Added++
		}
	})
	return result, errors.Join(errs...)
}

// compare calls differs with what sets each wanted object that isn't there, or exists and differs;
// with an error for one whose ID another protocol's has.
func compare(want Set, all []rtnl.Nexthop, protocol int, differs func(r rtnl.Request, exists bool, err error)) {
	have := make(map[uint32]rtnl.Nexthop, len(all))
	for _, n := range all {
		have[n.ID] = n
	}
	tell := func(id uint32, same bool, r rtnl.Request) {
		h, exists := have[id]
		switch {
		case exists && h.Protocol != protocol:
			differs(r, true, fmt.Errorf("%s: its ID is taken by one of protocol %d: %w", r, h.Protocol, rtnl.ErrExist))
		case !exists || !same:
			differs(r, exists, nil)
		}
	}
	for _, n := range want.Nexthops {
		h := have[n.ID]
		tell(n.ID, h.Exact && h.Nexthop == n, rtnl.SetNexthop(n))
	}
	for _, g := range want.Groups {
		h := have[g.ID]
		if len(h.Group.Members) > 0 {
			g.Buckets = h.Group.Buckets // which can't be changed, and need not
		}
		tell(g.ID, h.Exact && h.Group.Equal(g), rtnl.SetNexthopGroup(g))
	}
}

// Prune removes all that isn't kept, groups first. Routes that still refer to a group are
// removed by the kernel.
func (s *Syncer) Prune(ctx context.Context, keep Set) (dataplane.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var result dataplane.Result
	all, err := s.handle.Nexthops(ctx, s.protocol)
	if err != nil {
		return result, fmt.Errorf("read nexthops: %w", err)
	}
	var groups, others []uint32
	for _, n := range all {
		switch {
		case n.ID < dataplane.FirstNexthop || keep.has(n.ID):
		case len(n.Group.Members) > 0:
			groups = append(groups, n.ID)
		default:
			others = append(others, n.ID)
		}
	}
	result.Deleted, err = s.handle.Apply(ctx, rtnl.ErrNotExist, rtnl.Requests(append(groups, others...), rtnl.DelNexthop)...)
	return result, err
}
