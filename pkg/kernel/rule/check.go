package rule

import (
	"context"

	"github.com/coil-net/coil/pkg/dataplane"
)

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
