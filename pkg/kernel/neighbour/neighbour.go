// Package neighbour makes the kernel's proxy neighbour entries as they are wanted: by these a host answers ARP and NDP for addresses that
// others behind it have.
//
// It owns the entries of one protocol. It must not know why an address is answered for, nor the routes and kernel parameters
// without which the kernel doesn't answer.
package neighbour

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Syncer owns the proxy neighbour entries of one protocol in a network namespace. Two Syncers must not own the same protocol.
type Syncer struct {
	handle   *rtnl.Handle
	protocol int

	// mu is held while entries are read and written.
	mu sync.Mutex
}

// New returns a Syncer of the entries of a protocol.
func New(h *rtnl.Handle, protocol int) *Syncer { return &Syncer{handle: h, protocol: protocol} }

// Sync makes the wanted entries those that exist: it deletes first, so that nobody is answered for an address that has gone elsewhere.
// Entries of other protocols stay, and are as good as wanted ones: the kernel has one of an address and a link. Sync goes on after a
// failure; the Result counts what was done and the error joins what wasn't. When the kernel can't be read, nothing is changed.
func (s *Syncer) Sync(ctx context.Context, want []dataplane.Proxy) (dataplane.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var result dataplane.Result
	add, remove, err := s.compare(ctx, want)
	if err != nil {
		return result, err
	}
	var errs [2]error
	result.Deleted, errs[0] = s.handle.Apply(ctx, rtnl.ErrNotExist, rtnl.Requests(remove, rtnl.DelProxy)...)
	result.Added, errs[1] = s.handle.Apply(ctx, nil, rtnl.Requests(add, rtnl.AddProxy)...)
	return result, errors.Join(errs[:]...)
}

// Missing returns the wanted entries that Sync would add. Nothing is changed.
func (s *Syncer) Missing(ctx context.Context, want []dataplane.Proxy) ([]dataplane.Proxy, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	add, _, err := s.compare(ctx, want)
	return add, err
}

// List returns the entries that exist of the protocol.
func (s *Syncer) List(ctx context.Context) ([]dataplane.Proxy, error) {
	all, err := s.handle.Proxies(ctx)
	if err != nil {
		return nil, fmt.Errorf("read proxy neighbour entries: %w", err)
	}
	return slices.DeleteFunc(all, func(p dataplane.Proxy) bool { return p.Protocol != s.protocol }), nil
}

// Remove removes the entries of addresses, on all links. When the kernel can't be read, nothing is changed.
func (s *Syncer) Remove(ctx context.Context, addrs ...netip.Addr) (dataplane.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var result dataplane.Result
	have, err := s.List(ctx)
	if err != nil {
		return result, err
	}
	have = slices.DeleteFunc(have, func(p dataplane.Proxy) bool { return !slices.Contains(addrs, p.Addr) })
	result.Deleted, err = s.handle.Apply(ctx, rtnl.ErrNotExist, rtnl.Requests(have, rtnl.DelProxy)...)
	return result, err
}

// compare returns which entries are missing, and which aren't wanted.
func (s *Syncer) compare(ctx context.Context, want []dataplane.Proxy) (add, remove []dataplane.Proxy, err error) {
	var errs []error
	wanted := map[dataplane.Proxy]bool{}
	for _, w := range want {
		if w.Protocol != s.protocol || w.Link <= 0 || !w.Addr.IsValid() || w.Addr.Is4In6() || w.Addr.Zone() != "" {
			errs = append(errs, fmt.Errorf("neighbour %s: not an address of protocol %d on a link", w, s.protocol))
		}
		wanted[w] = true
	}
	if err := errors.Join(errs...); err != nil {
		return nil, nil, err
	}
	all, err := s.handle.Proxies(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("read proxy neighbour entries: %w", err)
	}
	have := map[dataplane.Proxy]bool{}
	for _, h := range all {
		if h.Protocol == s.protocol && !wanted[h] {
			remove = append(remove, h)
		}
		h.Protocol = s.protocol // somebody else's is as good
		have[h] = true
	}
	for _, w := range want {
		if !have[w] {
			have[w] = true
			add = append(add, w)
		}
	}
	return add, slices.Clip(remove), nil
}
