// Package rule makes the kernel's routing policy rules as they are wanted.
//
// It owns the rules of one protocol at some priorities, and those that an earlier
// Coil left there without a protocol. It must not know why a rule is wanted.
package rule

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// maxPasses bounds how often a Sync reads and writes: a rule without protocol
// may hide behind ours, so that the kernel removes ours first.
const maxPasses = 3

// Syncer owns the rules of one protocol at some priorities of a network
// namespace. Two Syncers must not own the same rules.
type Syncer struct {
	handle     *rtnl.Handle
	protocol   int
	priorities []int

	// mu is held while rules are read and written.
	mu sync.Mutex
}

// New returns a Syncer of the rules of a protocol at priorities.
func New(h *rtnl.Handle, protocol int, priorities ...int) *Syncer {
	return &Syncer{handle: h, protocol: protocol, priorities: priorities}
}

// Sync makes the wanted rules those that exist, each once: it adds first and
// deletes last. A rule that is wanted but has no protocol is replaced by one that
// has. Rules of other protocols, and rules without one that aren't wanted, stay.
// It goes on after a failure; the Result counts what was done and the error joins
// what wasn't. When the kernel can't be read completely, nothing is changed.
func (s *Syncer) Sync(ctx context.Context, want []dataplane.Rule) (dataplane.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var total dataplane.Result
	if err := s.check(want); err != nil {
		return total, err
	}
	for range maxPasses {
		have, err := s.read(ctx)
		if err != nil {
			return total, err
		}
		add, remove := s.compare(want, have)
		result, err := s.write(ctx, add, remove)
		total = total.Plus(result)
		if err != nil || len(remove) == 0 {
			return total, err
		}
	}
	return total, fmt.Errorf("rules of protocol %d at priorities %d: still changing after %d passes", s.protocol, s.priorities, maxPasses)
}

// Touch adds a rule that isn't wanted and removes it: the kernel forgets all routes that it has looked
// up for the rule's family. If it can't be removed, the next Sync does.
func (s *Syncer) Touch(ctx context.Context, r dataplane.Rule) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.check([]dataplane.Rule{r}); err != nil {
		return err
	}
	if err := s.handle.Do(ctx, rtnl.AddRule(r)); err != nil && !errors.Is(err, rtnl.ErrExist) {
		return err
	}
	return s.handle.Do(context.WithoutCancel(ctx), rtnl.DelRule(r))
}

func (s *Syncer) check(want []dataplane.Rule) error {
	var errs []error
	for _, r := range want {
		if r.Protocol != s.protocol || !slices.Contains(s.priorities, r.Priority) {
			errs = append(errs, fmt.Errorf("rule %s: not of protocol %d at priorities %d", r, s.protocol, s.priorities))
		}
		if r.Mark&^r.Mask != 0 { // without a mask the kernel would apply the rule to all packets
			errs = append(errs, fmt.Errorf("rule %s: mark %#x has bits outside of the mask %#x", r, r.Mark, r.Mask))
		}
	}
	return errors.Join(errs...)
}

// read returns the rules at the priorities, in order of evaluation.
func (s *Syncer) read(ctx context.Context) ([]rtnl.Rule, error) {
	var all []rtnl.Rule
	for _, family := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		rules, err := s.handle.Rules(ctx, family)
		if errors.Is(err, rtnl.ErrNoFamily) {
			continue // a kernel without this family has no rules of it
		}
		if err != nil {
			return nil, fmt.Errorf("read rules: %w", err)
		}
		all = append(all, rules...)
	}
	return slices.DeleteFunc(all, func(r rtnl.Rule) bool { return !slices.Contains(s.priorities, r.Priority) }), nil
}

// compare returns which rules to add and which to remove. Of several equal ones
// the first is kept.
func (s *Syncer) compare(want []dataplane.Rule, have []rtnl.Rule) (add []dataplane.Rule, remove []rtnl.Rule) {
	wanted := make(map[dataplane.Rule]bool, len(want))
	for _, w := range want {
		wanted[w] = true
	}
	kept := make(map[dataplane.Rule]bool, len(want))
	for _, h := range have {
		switch {
		case h.Protocol == s.protocol:
			if h.Exact && wanted[h.Rule] && !kept[h.Rule] {
				kept[h.Rule] = true
			} else {
				remove = append(remove, h)
			}
		case h.Protocol == unix.RTPROT_UNSPEC && h.Exact:
			ours := h.Rule
			ours.Protocol = s.protocol
			if wanted[ours] {
				remove = append(remove, h)
			}
		}
	}
	for _, w := range want {
		if !kept[w] {
			kept[w] = true
			add = append(add, w)
		}
	}
	return add, remove
}

// write adds and removes rules.
func (s *Syncer) write(ctx context.Context, add []dataplane.Rule, remove []rtnl.Rule) (result dataplane.Result, err error) {
	result.Added, err = s.handle.Apply(ctx, rtnl.ErrExist, rtnl.Requests(add, rtnl.AddRule)...)
	if err != nil {
		// The rules that are to be removed may be all that there are in place of those that are missing.
		return result, err
	}
	result.Deleted, err = s.handle.Apply(ctx, rtnl.ErrNotExist, rtnl.Requests(remove, rtnl.DelFoundRule)...)
	return result, err
}

// Missing returns the wanted rules that Sync would add. Nothing is changed.
func (s *Syncer) Missing(ctx context.Context, want []dataplane.Rule) ([]dataplane.Rule, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.check(want); err != nil {
		return nil, err
	}
	have, err := s.read(ctx)
	if err != nil {
		return nil, err
	}
	missing, _ := s.compare(want, have)
	return missing, nil
}

// List returns the rules of the Syncer's protocol at its priorities that Sync could keep.
func (s *Syncer) List(ctx context.Context) ([]dataplane.Rule, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	have, err := s.read(ctx)
	if err != nil {
		return nil, err
	}
	var rules []dataplane.Rule
	for _, h := range have {
		if h.Protocol == s.protocol && h.Exact {
			rules = append(rules, h.Rule)
		}
	}
	return rules, nil
}
