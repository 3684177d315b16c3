package rule

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Remove removes all rules of the Syncer's protocol at its priorities, and those that differ
// from one of earlier only by having no protocol, as an earlier Coil made them. It returns
// the rules that it removed, also beside an error.
func (s *Syncer) Remove(ctx context.Context, earlier []dataplane.Rule) ([]dataplane.Rule, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var removed []dataplane.Rule
	have, err := s.read(ctx)
	if err != nil {
		return nil, err
	}
	var errs []error
	// Rules with a protocol go first: they may stand before one without.
	for _, protocol := range []int{s.protocol, unix.RTPROT_UNSPEC} {
		for i, h := range have {
			if h.Protocol != protocol || protocol == unix.RTPROT_UNSPEC && !isEarlier(h, earlier) {
				continue
			}
			if other, ok := inFront(have[:i], h, s.protocol); ok {
				errs = append(errs, fmt.Errorf("rule %s: the kernel would remove another program's, %s, which stands before it", h.Rule, other.Rule))
				continue
			}
			switch err := s.handle.Do(ctx, rtnl.DelFoundRule(h)); {
			case err == nil:
				removed = append(removed, h.Rule)
			case !errors.Is(err, rtnl.ErrNotExist):
				errs = append(errs, err)
			}
		}
	}
	return removed, errors.Join(errs...)
}

// isEarlier says whether a rule is one of earlier but for the protocol.
func isEarlier(r rtnl.Rule, earlier []dataplane.Rule) bool {
	return r.Exact && slices.ContainsFunc(earlier, func(e dataplane.Rule) bool {
		e.Protocol = r.Protocol
		return e == r.Rule
	})
}

// inFront returns the rule of another protocol that the kernel would remove rather than r: for
// one without a protocol it takes the first of that priority and table, whatever else it has
// (rule_find() of net/core/fib_rules.c).
func inFront(before []rtnl.Rule, r rtnl.Rule, own int) (rtnl.Rule, bool) {
	if r.Protocol != unix.RTPROT_UNSPEC {
		return rtnl.Rule{}, false
	}
	i := slices.IndexFunc(before, func(b rtnl.Rule) bool {
		return b.Family == r.Family && b.Priority == r.Priority && b.Table == r.Table && b.Protocol != own &&
			(b.Protocol != unix.RTPROT_UNSPEC || !b.Exact || b.Rule != r.Rule)
	})
	if i < 0 {
		return rtnl.Rule{}, false
	}
	return before[i], true
}
