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

// ids are those of the objects, in the order in which they are made.
func (s Set) ids() (all []uint32) {
	for _, n := range s.Nexthops {
		all = append(all, n.ID)
	}
	for _, g := range s.Groups {
		all = append(all, g.ID)
	}
	return all
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
	result, _, err := s.ensure(ctx, want)
	return result, err
}

// Sync is Ensure that then removes all objects that aren't wanted, groups first, unless one that is wanted couldn't be
// made. Routes that still refer to a removed group are removed by the kernel: they must lead elsewhere before.
func (s *Syncer) Sync(ctx context.Context, want Set) (dataplane.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	result, all, err := s.ensure(ctx, want)
	if err != nil {
		return result, err
	}
	wanted := want.ids()
	var groups, others []uint32
	for _, n := range all {
		switch {
		case !s.owns(n) || slices.Contains(wanted, n.ID):
		case len(n.Group.Members) > 0:
			groups = append(groups, n.ID)
		default:
			others = append(others, n.ID)
		}
	}
	result.Deleted, err = s.handle.Apply(ctx, rtnl.ErrNotExist, rtnl.Requests(append(groups, others...), rtnl.DelNexthop)...)
	return result, err
}

// Missing returns the wanted objects that Ensure would make or change. Nothing is changed.
func (s *Syncer) Missing(ctx context.Context, want Set) (Set, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.read(ctx)
	if err != nil {
		return Set{}, err
	}
	return s.compare(want, all)
}

// Groups returns the groups that the Syncer owns.
func (s *Syncer) Groups(ctx context.Context) ([]dataplane.NexthopGroup, error) {
	all, err := s.read(ctx)
	var groups []dataplane.NexthopGroup
	for _, n := range all {
		if s.owns(n) && len(n.Group.Members) > 0 {
			groups = append(groups, n.Group)
		}
	}
	return groups, err
}

// read returns all objects, whoever owns them.
func (s *Syncer) read(ctx context.Context) ([]rtnl.Nexthop, error) {
	all, err := s.handle.Nexthops(ctx)
	if err != nil {
		return nil, fmt.Errorf("read nexthops: %w", err)
	}
	return all, nil
}

func (s *Syncer) owns(n rtnl.Nexthop) bool {
	return n.Protocol == s.protocol && n.ID >= dataplane.FirstNexthop
}

// ensure makes the wanted objects that are missing, changes those that differ, and returns all that there were before.
func (s *Syncer) ensure(ctx context.Context, want Set) (result dataplane.Result, all []rtnl.Nexthop, err error) {
	if all, err = s.read(ctx); err != nil {
		return result, nil, err
	}
	missing, err := s.compare(want, all)
	errs := []error{err}
	ids := missing.ids()
	requests := append(rtnl.Requests(missing.Nexthops, rtnl.SetNexthop), rtnl.Requests(missing.Groups, rtnl.SetNexthopGroup)...)
	for i, err := range s.handle.Each(ctx, requests...) {
		switch {
		case err != nil:
			errs = append(errs, err)
		case slices.ContainsFunc(all, func(n rtnl.Nexthop) bool { return n.ID == ids[i] }):
			result.Replaced++
		default:
			result.Added++
		}
	}
	return result, all, errors.Join(errs...)
}

// compare returns the wanted objects that aren't there or differ. One whose ID another protocol's object has is an error.
func (s *Syncer) compare(want Set, all []rtnl.Nexthop) (missing Set, err error) {
	have := make(map[uint32]rtnl.Nexthop, len(all))
	for _, n := range all {
		have[n.ID] = n
	}
	var errs []error
	taken := func(id uint32, wanted fmt.Stringer) bool {
		h, exists := have[id]
		if !exists || h.Protocol == s.protocol {
			return false
		}
		errs = append(errs, fmt.Errorf("nexthop %s: its ID is taken by one of protocol %d: %w", wanted, h.Protocol, rtnl.ErrExist))
		return true
	}
	for _, n := range want.Nexthops {
		if h := have[n.ID]; !taken(n.ID, n) && (!h.Exact || h.Nexthop != n) {
			missing.Nexthops = append(missing.Nexthops, n)
		}
	}
	for _, g := range want.Groups {
		h := have[g.ID]
		if len(h.Group.Members) > 0 {
			g.Buckets = h.Group.Buckets // which can't be changed, and need not
		}
		if !taken(g.ID, g) && (!h.Exact || !h.Group.Equal(g)) {
			missing.Groups = append(missing.Groups, g)
		}
	}
	return missing, errors.Join(errs...)
}
