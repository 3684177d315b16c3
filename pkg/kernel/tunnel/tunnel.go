// Package tunnel makes the tunnels of an Egress, which put IP into UDP (Foo over UDP), as
// they are wanted.
//
// It owns the tunnels whose names begin with fou4_ or fou6_, and the two receivers. A
// tunnel is recognised by its two addresses, never by its name alone: two IPv6 addresses
// may share one. It must not know who uses a tunnel, nor its routes.
//
// Other packages have one Sync. Here its halves are apart, since routes change between them: Ensure makes tunnels and
// returns the links that routes lead by, Prune removes the tunnels that no route leads by any more. Check is Missing, and
// says in which way a tunnel isn't as wanted.
package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Link is the link that a tunnel is.
type Link = dataplane.TunnelLink

// Syncer owns the tunnels of one network namespace. Two Syncers must not own the same.
type Syncer struct {
	handle *rtnl.Handle

	// mu is held while tunnels are read and written.
	mu sync.Mutex
}

// New returns a Syncer of the tunnels in the handle's namespace.
func New(h *rtnl.Handle) *Syncer { return &Syncer{handle: h} }

// families are those of tunnels.
var families = []dataplane.Family{dataplane.IPv4, dataplane.IPv6}

// Ensure makes the wanted tunnels, and changes those that exist in place: packets go on. It
// removes nothing. It returns the link of each remote address that has its tunnel as
// wanted; the error joins why the others don't. When the kernel can't be read completely,
// nothing is changed. A link that isn't ours and has the name, or the addresses, of a tunnel
// is an error that names it (rtnl.ErrExist).
func (s *Syncer) Ensure(ctx context.Context, want []dataplane.Tunnel) (map[netip.Addr]Link, dataplane.Result, error) {
	return s.make(ctx, want, true)
}

// Add makes tunnels, which must not exist, without reading those that do. It returns the
// links of those that were made; the error joins why the others weren't: Ensure may still
// make them.
func (s *Syncer) Add(ctx context.Context, want []dataplane.Tunnel) (map[netip.Addr]Link, error) {
	links, _, err := s.make(ctx, want, false)
	return links, err
}

// make makes the wanted tunnels, and changes those that exist if it may look at them.
func (s *Syncer) make(ctx context.Context, want []dataplane.Tunnel, look bool) (map[netip.Addr]Link, dataplane.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	links := make(map[netip.Addr]Link, len(want))
	var result dataplane.Result
	var errs []error
	for _, f := range families {
		wanted, err := check(f, want)
		errs = append(errs, err)
		if len(wanted) == 0 {
			continue
		}
		var have []rtnl.Tunnel
		if look {
			if have, err = s.read(ctx, f); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		steps, problems := compare(f, wanted, have)
		errs = append(errs, problems...)
		errs = append(errs, s.carryOut(ctx, steps, links, &result)...)
	}
	return links, result, join(errs)
}

// read returns the tunnels of a family that there are.
func (s *Syncer) read(ctx context.Context, f dataplane.Family) ([]rtnl.Tunnel, error) {
	have, err := s.handle.Tunnels(ctx, f)
	if err != nil {
		return nil, fmt.Errorf("list tunnels: %w", err)
	}
	return have, nil
}

func linkOf(l rtnl.Link) Link { return Link{Index: l.Index, Name: l.Name, Alias: l.Alias} }

// maxErrors bounds how many errors are told: of thousands of tunnels, all may fail alike.
const maxErrors = 10

// join is errors.Join of the first few.
func join(errs []error) error {
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	if n := len(errs) - maxErrors; n > 0 {
		errs = append(errs[:maxErrors:maxErrors], fmt.Errorf("and %d more errors", n))
	}
	return errors.Join(errs...)
}

// Links returns the links of the own tunnels that there are, by their remote addresses.
func (s *Syncer) Links(ctx context.Context) (map[netip.Addr]Link, error) {
	links := map[netip.Addr]Link{}
	for _, f := range families {
		have, err := s.read(ctx, f)
		if err != nil {
			return nil, err
		}
		for _, h := range have {
			if own(f, h) && h.Spec.Remote.IsValid() {
				links[h.Spec.Remote] = linkOf(h.Link)
			}
		}
	}
	return links, nil
}

// check returns the wanted tunnels of a family, and an error for those that can't be made.
func check(f dataplane.Family, want []dataplane.Tunnel) ([]dataplane.Tunnel, error) {
	var errs []error
	var wanted []dataplane.Tunnel
	seen := make(map[netip.Addr]bool, len(want))
	for _, t := range want {
		switch {
		case !t.Remote.IsValid() || dataplane.FamilyOf(t.Remote) != f:
		case !t.Local.IsValid() || dataplane.FamilyOf(t.Local) != f:
			errs = append(errs, fmt.Errorf("tunnel %s: its ends are of two families", t))
		case seen[t.Remote]:
			errs = append(errs, fmt.Errorf("tunnel %s: there is another one to this address", t))
		default:
			seen[t.Remote] = true
			wanted = append(wanted, t)
		}
	}
	return wanted, errors.Join(errs...)
}

// step has the changes that one tunnel needs.
type step struct {
	want dataplane.Tunnel
	name string
	// index is that of the link; 0 if it is to be made.
	index int
	set   bool // its parameters are others
	quiet bool // it makes IPv6 addresses of its own, and must not
	raise bool // it is down
	label bool // its alias is another one
}

// ends are the addresses by which a tunnel is recognised.
type ends struct{ local, remote netip.Addr }

func endsOf(t dataplane.Tunnel) ends { return ends{t.Local, t.Remote} }

// own says whether a tunnel is Coil's.
func own(f dataplane.Family, t rtnl.Tunnel) bool {
	return strings.HasPrefix(t.Name, prefixes[f]) && !t.Receiver
}

// prefixes are those of the names that dataplane.TunnelName gives.
var prefixes = map[dataplane.Family]string{dataplane.IPv4: "fou4_", dataplane.IPv6: "fou6_"}

// names is the number of names that dataplane.TunnelName has for an address.
var names = map[dataplane.Family]int{dataplane.IPv4: 1, dataplane.IPv6: 5}

// compare returns the steps to the wanted tunnels, and why some can't be had.
func compare(f dataplane.Family, want []dataplane.Tunnel, have []rtnl.Tunnel) (steps []step, errs []error) {
	byEnds := make(map[ends]rtnl.Tunnel, len(have))
	byName := make(map[string]rtnl.Tunnel, len(have))
	for _, h := range have {
		byEnds[endsOf(h.Spec)] = h
		byName[h.Name] = h
	}
	taken := make(map[string]bool, len(want)) // by new tunnels
	for _, w := range want {
		if h, ok := byEnds[endsOf(w)]; ok {
			if !own(f, h) {
				errs = append(errs, fmt.Errorf("tunnel %s: link %s, which isn't ours, has its addresses: %w", w, h.Link, rtnl.ErrExist))
				continue
			}
			spec := h.Spec
			spec.Alias = w.Alias
			steps = append(steps, step{w, h.Name, h.Index, !h.Exact || spec != w, h.HasIPv6 && !h.NoAutoAddress, !h.Up, w.Alias != "" && w.Alias != h.Alias})
			continue
		}
		s := step{want: w, quiet: true, raise: true, label: w.Alias != ""}
		for attempt := range names[f] {
			name := dataplane.TunnelName(w.Remote, attempt)
			h, exists := byName[name]
			switch {
			case !exists && !taken[name]:
				s.name = name
			case exists && h.Spec.Remote == w.Remote && own(f, h):
				// From another address of ours, which we have no more.
				s = step{w, name, h.Index, true, true, true, s.label}
			default:
				continue
			}
			break
		}
		if s.name == "" {
			name := dataplane.TunnelName(w.Remote, 0)
			errs = append(errs, fmt.Errorf("tunnel %s: its name belongs to link %s, which leads to %s: %w",
				w, byName[name].Link, byName[name].Spec.Remote, rtnl.ErrExist))
			continue
		}
		taken[s.name] = true
		steps = append(steps, s)
	}
	return steps, errs
}

// carryOut does the steps, each kind of request for all tunnels together, and notes the
// links of those that succeeded.
func (s *Syncer) carryOut(ctx context.Context, steps []step, links map[netip.Addr]Link, result *dataplane.Result) []error {
	failed := make([]error, len(steps))
	// send sends the request that a step needs, unless the step has failed.
	send := func(needs func(step) bool, request func(step) rtnl.Request, tolerated ...error) {
		var which []int
		var requests []rtnl.Request
		for i, st := range steps {
			if failed[i] == nil && needs(st) {
				which, requests = append(which, i), append(requests, request(st))
			}
		}
		for n, err := range s.handle.Each(ctx, requests...) {
			if !slices.ContainsFunc(tolerated, func(target error) bool { return errors.Is(err, target) }) {
				failed[which[n]] = err
			}
		}
	}
	isNew := func(st step) bool { return st.index == 0 }
	added := make([]bool, len(steps))
	send(isNew, func(st step) rtnl.Request { return rtnl.AddTunnel(st.name, st.want) })
	for i := range steps {
		st := &steps[i]
		switch added[i] = isNew(*st); {
		case failed[i] != nil:
			failed[i] = s.taken(ctx, *st, failed[i])
		case added[i]:
			st.index, failed[i] = s.handle.IndexByName(st.name)
		}
	}
	// By itself first: an ip6tnl that is changed takes its MTU from the way to the other end, and
	// IPv6, which isn't told, goes on with the old one for packets that it routes there.
	send(func(st step) bool { return st.set }, func(st step) rtnl.Request {
		return rtnl.SetLink(st.index, rtnl.LinkChange{MTU: st.want.MTU})
	})
	send(func(st step) bool { return st.set }, func(st step) rtnl.Request { return rtnl.SetTunnel(st.index, st.want) })
	// Before it comes up: the kernel would make an address otherwise. Without IPv6 there is
	// nothing to switch off.
	send(func(st step) bool { return st.quiet }, func(st step) rtnl.Request {
		return rtnl.SetLink(st.index, rtnl.LinkChange{NoAutoAddress: true})
	}, rtnl.ErrNoFamily)
	for i, st := range steps {
		if failed[i] == nil && st.raise { // one that is down may lack it after a crash
			failed[i] = s.arrive(ctx, st.index)
		}
	}
	send(func(st step) bool { return st.raise || st.label }, func(st step) rtnl.Request {
		return rtnl.SetLink(st.index, rtnl.LinkChange{Up: true, Alias: st.want.Alias})
	})
	var errs []error
	for i, st := range steps {
		switch {
		case failed[i] != nil:
			errs = append(errs, failed[i])
			continue
		case added[i]:
			result.Added++
		case st.set || st.quiet || st.raise || st.label:
			result.Replaced++
		}
		links[st.want.Remote] = Link{Index: st.index, Name: st.name, Alias: st.want.Alias}
	}
	return errs
}

// taken says whose the name is that a new tunnel can't have.
func (s *Syncer) taken(ctx context.Context, st step, err error) error {
	if !errors.Is(err, rtnl.ErrExist) {
		return err
	}
	if l, lookup := s.handle.LinkByName(ctx, st.name); lookup == nil {
		return fmt.Errorf("%w: link %s isn't ours", err, l)
	}
	return err
}

// Prune removes the own tunnels that aren't kept, many as fast as one. It goes on after a
// failure; a family that can't be read loses none.
func (s *Syncer) Prune(ctx context.Context, keep []dataplane.Tunnel) (dataplane.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := make(map[ends]bool, len(keep))
	for _, k := range keep {
		kept[endsOf(k)] = true
	}
	var result dataplane.Result
	var errs []error
	for _, f := range families {
		have, err := s.read(ctx, f)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		var links []Link
		for _, h := range have {
			if own(f, h) && !kept[endsOf(h.Spec)] {
				links = append(links, linkOf(h.Link))
			}
		}
		n, err := s.remove(ctx, links)
		result.Deleted += n
		errs = append(errs, err)
	}
	return result, errors.Join(errs...)
}

// Remove removes tunnels by their links, which must be those that Ensure or Add returned, and
// returns how many there were.
func (s *Syncer) Remove(ctx context.Context, links []Link) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.remove(ctx, links)
}

// mostAtOnce is how many links are removed at once: meanwhile nobody else can change links of the
// machine.
const mostAtOnce = 200

// remove removes links and returns how many.
func (s *Syncer) remove(ctx context.Context, links []Link) (n int, err error) {
	var errs []error
	for some := range slices.Chunk(links, mostAtOnce) {
		indexes := make([]int, 0, len(some))
		for _, l := range some {
			indexes = append(indexes, l.Index)
		}
		if len(some) > 1 && s.handle.DelTogether(ctx, indexes) == nil {
			n += len(some)
			continue
		}
		for _, l := range some {
			removed, err := s.handle.Apply(ctx, rtnl.ErrNotExist, rtnl.DelLink(l.Index))
			if n += removed; err != nil {
				errs = append(errs, fmt.Errorf("tunnel %s: %w", l.Name, err))
			}
		}
	}
	return n, join(errs)
}

// receivers are the names of the receivers.
var receivers = map[dataplane.Family]string{
	dataplane.IPv4: dataplane.ReceiverIPv4,
	dataplane.IPv6: dataplane.ReceiverIPv6,
}

// EnsureReceivers makes the links, and brings them up, that take packets out of FoU that no tunnel
// expects, with an MTU, or 0 for the one that they have. It returns the links that are there now. A receiver of another
// name, of which a namespace can't have two, is an error that names it (rtnl.ErrExist).
//
// All packets that are routed to a receiver get lost, since it sends nothing that names no tunnel (ip-link(8), external).
// The sender isn't told.
func (s *Syncer) EnsureReceivers(ctx context.Context, mtu int, families ...dataplane.Family) (map[dataplane.Family]int, error) {
	links := map[dataplane.Family]int{}
	var errs []error
	for _, f := range families {
		index, err := s.ensureReceiver(ctx, f, mtu)
		if err != nil {
			errs = append(errs, fmt.Errorf("receiver of %s: %w", f, err))
			continue
		}
		links[f] = index
	}
	return links, errors.Join(errs...)
}

// Sink returns the link by which all packets of a family get lost, once EnsureReceivers has made it.
func (s *Syncer) Sink(ctx context.Context, f dataplane.Family) (int, error) {
	l, err := s.handle.LinkByName(ctx, receivers[f])
	return l.Index, err
}

// ensureReceiver makes a receiver and returns its index; an MTU of 0 leaves the one that it has.
func (s *Syncer) ensureReceiver(ctx context.Context, f dataplane.Family, mtu int) (int, error) {
	have, err := s.handle.Tunnels(ctx, f)
	if err != nil {
		return 0, err
	}
	var l rtnl.Link
	for _, t := range have {
		if t.Receiver {
			l = t.Link
		}
	}
	switch {
	case l.Name == receivers[f]:
	case l.Name != "":
		return 0, fmt.Errorf("link %s receives already: %w", l, rtnl.ErrExist)
	default:
		if err := s.handle.Do(ctx, rtnl.AddReceiver(receivers[f], f)); err != nil {
			return 0, err
		}
		if l, err = s.handle.LinkByName(ctx, receivers[f]); err != nil {
			return 0, err
		}
	}
	var changes []rtnl.LinkChange
	if l.HasIPv6 && !l.NoAutoAddress {
		changes = append(changes, rtnl.LinkChange{NoAutoAddress: true})
	}
	if mtu != 0 && l.MTU != mtu {
		changes = append(changes, rtnl.LinkChange{MTU: mtu})
	}
	if !l.Up {
		changes = append(changes, rtnl.LinkChange{Up: true})
	}
	return l.Index, s.handle.Do(ctx, rtnl.Requests(changes, func(c rtnl.LinkChange) rtnl.Request { return rtnl.SetLink(l.Index, c) })...)
}

// RemoveReceivers removes what EnsureReceivers makes, but for some families; none is no error.
func (s *Syncer) RemoveReceivers(ctx context.Context, keep ...dataplane.Family) error {
	var errs []error
	for f, name := range receivers {
		if slices.Contains(keep, f) {
			continue
		}
		l, err := s.handle.LinkByName(ctx, name)
		if err == nil {
			err = s.handle.Do(ctx, rtnl.DelLink(l.Index))
		}
		if err != nil && !errors.Is(err, rtnl.ErrNotExist) {
			errs = append(errs, fmt.Errorf("receiver of %s: %w", f, err))
		}
	}
	return errors.Join(errs...)
}
