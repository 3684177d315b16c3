// Package route makes the kernel's routes as they are wanted.
//
// It owns the routes of one protocol in some tables, and nothing else: a route of
// another protocol is never changed, not even in these tables. It must not know
// why a route is wanted.
package route

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// maxPasses bounds how often a Sync reads and writes when one pass isn't enough.
const maxPasses = 3

// Syncer owns the routes of one protocol in some tables of a network namespace.
// Two Syncers must not own the same routes.
type Syncer struct {
	handle   *rtnl.Handle
	protocol int
	// tables are the tables to read; an unspecified one is all. owns says which of these are the Syncer's.
	tables []int
	owns   func(table int) bool
	// where names the tables for logs and errors.
	where string

	// mu is held while routes are read and written by Sync.
	mu sync.Mutex
}

// New returns a Syncer of the routes of a protocol in tables.
func New(h *rtnl.Handle, protocol int, tables ...int) *Syncer {
	owns := func(table int) bool { return slices.Contains(tables, table) }
	return &Syncer{handle: h, protocol: protocol, tables: tables, owns: owns, where: fmt.Sprintf("tables %d", tables)}
}

// NewRange returns a Syncer of the routes of a protocol in the tables from first, at least 1, to last.
// It reads the routes of the protocol in all tables.
func NewRange(h *rtnl.Handle, protocol, first, last int) *Syncer {
	owns := func(table int) bool { return table >= first && table <= last }
	all := []int{unix.RT_TABLE_UNSPEC} // the kernel filters by one table or none
	return &Syncer{handle: h, protocol: protocol, tables: all, owns: owns, where: fmt.Sprintf("tables %d to %d", first, last)}
}

// Sync makes the wanted routes those that exist: it adds and replaces first, so
// that there is no gap, and deletes last. It goes on after a failure; the Result
// counts what was done and the error joins what wasn't. A wanted route whose place
// is taken by another protocol's is an error that names that one. When the kernel
// can't be read completely, nothing is changed.
func (s *Syncer) Sync(ctx context.Context, want []dataplane.Route) (dataplane.Result, error) {
	return s.SyncFunc(ctx, func(context.Context) ([]dataplane.Route, error) { return want, nil }, nil)
}

// Ensure is Sync that deletes nothing: a route that isn't wanted stays.
func (s *Syncer) Ensure(ctx context.Context, want []dataplane.Route) (dataplane.Result, error) {
	return s.EnsureBut(ctx, want, func(dataplane.Route) bool { return false })
}

// EnsureBut is Ensure that deletes routes that are harmful, unless they are wanted.
func (s *Syncer) EnsureBut(ctx context.Context, want []dataplane.Route, harmful func(dataplane.Route) bool) (dataplane.Result, error) {
	wanted := make(map[identity]bool, len(want))
	for _, r := range want {
		wanted[identityOf(r.Canonical())] = true
	}
	return s.SyncFunc(ctx, func(context.Context) ([]dataplane.Route, error) { return want, nil },
		func(r dataplane.Route) bool { return !wanted[identityOf(r)] && !harmful(r) })
}

// SyncFunc is Sync for wants that change concurrently: want is called after the
// kernel was read. A route that somebody adds together with a record of it, the
// record first, is therefore never deleted because the wants are older than it.
// Routes for which spare returns true are left as they are, wanted or not; it is
// called after want and may be nil.
func (s *Syncer) SyncFunc(ctx context.Context, want func(context.Context) ([]dataplane.Route, error), spare func(dataplane.Route) bool) (dataplane.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var total dataplane.Result
	for range maxPasses {
		result, again, err := s.pass(ctx, want, spare)
		total = total.Plus(result)
		if err != nil || !again {
			return total, err
		}
	}
	return total, fmt.Errorf("routes of protocol %d in %s: still changing after %d passes", s.protocol, s.where, maxPasses)
}

// pass reads and writes once. Another pass is needed when again is true.
func (s *Syncer) pass(ctx context.Context, want func(context.Context) ([]dataplane.Route, error), spare func(dataplane.Route) bool) (result dataplane.Result, again bool, err error) {
	have, err := s.read(ctx, s.protocol, s.tables...)
	if err != nil {
		return result, false, err
	}
	wanted, err := want(ctx)
	if err != nil {
		return result, false, err
	}
	if spare != nil {
		have = slices.DeleteFunc(have, func(r rtnl.Route) bool { return spare(r.Route) })
	}
	if wanted, err = s.check(wanted); err != nil {
		return result, false, err
	}
	if len(wanted) == 0 && len(have) > 0 {
		klog.FromContext(ctx).Info("Deleting all routes", "protocol", s.protocol, "in", s.where, "count", len(have))
	}
	d := compare(wanted, have)
	result, err = s.write(ctx, d)
	return result, d.again, err
}

// read returns the routes of a protocol, or of all if it is 0, in some of the Syncer's tables, or in all of them if there
// is an unspecified one.
func (s *Syncer) read(ctx context.Context, protocol int, tables ...int) ([]rtnl.Route, error) {
	var all []rtnl.Route
	for _, table := range tables {
		for _, family := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
			routes, err := s.handle.Routes(ctx, family, table, protocol)
			if err != nil {
				return nil, fmt.Errorf("read routes: %w", err)
			}
			all = append(all, routes...)
		}
	}
	return slices.DeleteFunc(all, func(r rtnl.Route) bool { return !s.owns(r.Table) }), nil
}

// check returns the wanted routes as the kernel would return them, sorted and
// each once, or an error if they aren't this Syncer's to make.
func (s *Syncer) check(want []dataplane.Route) ([]dataplane.Route, error) {
	var errs []error
	out := make([]dataplane.Route, 0, len(want))
	for _, r := range want {
		switch {
		case r.Protocol != s.protocol || !s.owns(r.Table):
			errs = append(errs, fmt.Errorf("route %s: not of protocol %d in %s", r, s.protocol, s.where))
		case !r.Dst.IsValid() || r.Dst != r.Dst.Masked():
			errs = append(errs, fmt.Errorf("route %s: invalid destination", r))
		}
		out = append(out, r.Canonical())
	}
	slices.SortStableFunc(out, dataplane.CompareRoutes)
	out = slices.Compact(out)
	for i := 1; i < len(out); i++ {
		if dataplane.CompareRoutes(out[i-1], out[i]) == 0 {
			errs = append(errs, fmt.Errorf("route %s: wanted also as %s", out[i-1], out[i]))
		}
	}
	return out, errors.Join(errs...)
}

// difference is between the wanted routes and the own routes that there are.
type difference struct {
	add, replace []dataplane.Route
	remove       []rtnl.Route
	// again says that the result must be compared again.
	again bool
}

// identity has the properties by which the kernel tells routes apart.
type identity struct {
	table  int
	dst    netip.Prefix
	metric int
}

func identityOf(r dataplane.Route) identity { return identity{r.Table, r.Dst, r.Metric} }

// compare returns the difference between the wanted routes, each identity once,
// and the own routes that there are.
func compare(want []dataplane.Route, have []rtnl.Route) difference {
	var d difference
	same := make(map[identity][]rtnl.Route, len(have))
	for _, h := range have {
		same[identityOf(h.Route)] = append(same[identityOf(h.Route)], h)
	}
	for _, w := range want {
		id := identityOf(w)
		candidates := same[id]
		equal := slices.IndexFunc(candidates, func(h rtnl.Route) bool { return h.Exact && satisfies(h.Route, w) })
		other := slices.IndexFunc(candidates, func(h rtnl.Route) bool { return !h.Odd })
		switch {
		case equal >= 0:
			same[id] = slices.Delete(candidates, equal, equal+1)
		case other >= 0:
			d.replace = append(d.replace, w)
			same[id] = slices.Delete(candidates, other, other+1)
			// Which of several the kernel replaces isn't for sure: look again before
			// one is deleted.
			if len(same[id]) > 0 {
				d.again = true
				delete(same, id)
			}
		default:
			d.add = append(d.add, w)
		}
	}
	for _, h := range have {
		id := identityOf(h.Route)
		d.remove = append(d.remove, same[id]...)
		delete(same, id)
	}
	return d
}

// satisfies says whether the kernel's route have is as wanted. Without a link, the one by
// which the gateway is reached is the kernel's choice.
func satisfies(have, want dataplane.Route) bool {
	if want.Link == 0 && want.Gateway.IsValid() {
		have.Link = 0
	}
	return have == want
}

// write carries a difference out.
func (s *Syncer) write(ctx context.Context, d difference) (dataplane.Result, error) {
	var result dataplane.Result
	var errs []error
	if len(d.replace) > 0 {
		// To replace is blind to the protocol of the route that is there.
		foreign, err := s.foreign(ctx, d.replace)
		if err != nil {
			return result, err
		}
		d.replace = slices.DeleteFunc(d.replace, func(r dataplane.Route) bool {
			if f, ok := foreign[identityOf(r)]; ok {
				errs = append(errs, taken(r, f))
				return true
			}
			return false
		})
	}
	replaced, err := s.handle.Apply(ctx, nil, rtnl.Requests(d.replace, rtnl.ReplaceRoute)...)
	result.Replaced = replaced
	errs = append(errs, err)

	var exist []dataplane.Route
	for i, err := range s.handle.Each(ctx, rtnl.Requests(d.add, rtnl.AddRoute)...) {
		switch {
		case err == nil:
			result.Added++
		case errors.Is(err, rtnl.ErrExist):
			exist = append(exist, d.add[i])
		default:
			errs = append(errs, err)
		}
	}
	if len(exist) > 0 {
		foreign, err := s.foreign(ctx, exist)
		errs = append(errs, err)
		for _, r := range exist {
			if f, ok := foreign[identityOf(r)]; ok {
				errs = append(errs, taken(r, f))
			}
			// Otherwise somebody added it with our protocol in the meantime.
		}
	}

	deleted, err := s.handle.Apply(ctx, rtnl.ErrNotExist, rtnl.Requests(d.remove, rtnl.DelFoundRoute)...)
	result.Deleted = deleted
	return result, errors.Join(append(errs, err)...)
}

// foreign returns the routes of other protocols that have the identity of one of
// the given routes.
func (s *Syncer) foreign(ctx context.Context, routes []dataplane.Route) (map[identity]rtnl.Route, error) {
	wanted := make(map[identity]bool, len(routes))
	tables := map[int]bool{}
	for _, r := range routes {
		wanted[identityOf(r)] = true
		tables[r.Table] = true
	}
	all, err := s.read(ctx, 0, slices.Sorted(maps.Keys(tables))...)
	if err != nil {
		return nil, err
	}
	found := map[identity]rtnl.Route{}
	for _, h := range all {
		if id := identityOf(h.Route); wanted[id] && h.Protocol != s.protocol && !h.Odd {
			found[id] = h
		}
	}
	return found, nil
}

// taken is the error of a route whose place another protocol's has.
func taken(r dataplane.Route, f rtnl.Route) error {
	return fmt.Errorf("route %s: its place is taken by %s, which isn't ours: %w", r, f, rtnl.ErrExist)
}

// Add adds single routes without reading the table. ErrExist if a route of the
// same table, destination and metric is there, whoever made it.
func (s *Syncer) Add(ctx context.Context, routes ...dataplane.Route) error {
	routes, err := s.check(routes)
	if err != nil {
		return err
	}
	return s.handle.Do(ctx, rtnl.Requests(routes, rtnl.AddRoute)...)
}

// Delete removes single routes of the Syncer's protocol without reading the
// table, by their table, destination and metric. That there is none is success.
func (s *Syncer) Delete(ctx context.Context, routes ...dataplane.Route) error {
	routes, err := s.check(routes)
	if err != nil {
		return err
	}
	_, err = s.handle.Apply(ctx, rtnl.ErrNotExist, rtnl.Requests(routes, rtnl.DelRoute)...)
	return err
}

// Missing returns the wanted routes that Sync would add, or put in the place of others of
// the Syncer's protocol. Nothing is changed.
func (s *Syncer) Missing(ctx context.Context, want []dataplane.Route) ([]dataplane.Route, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	want, err := s.check(want)
	if err != nil {
		return nil, err
	}
	have, err := s.read(ctx, s.protocol, s.tables...)
	if err != nil {
		return nil, err
	}
	d := compare(want, have)
	return append(d.add, d.replace...), nil
}

// List returns the routes of the Syncer's protocol in its tables that Sync could keep.
func (s *Syncer) List(ctx context.Context) ([]dataplane.Route, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	have, err := s.read(ctx, s.protocol, s.tables...)
	var routes []dataplane.Route
	for _, h := range have {
		if h.Exact {
			routes = append(routes, h.Route)
		}
	}
	return routes, err
}
