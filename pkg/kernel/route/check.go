package route

import (
	"context"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Missing returns the wanted routes that Sync would add, or put in the place of others of
// the Syncer's protocol. Nothing is changed.
func (s *Syncer) Missing(ctx context.Context, want []dataplane.Route) ([]dataplane.Route, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	want, err := s.check(want)
	if err != nil {
		return nil, err
	}
	have, err := s.read(ctx, s.protocol)
	if err != nil {
		return nil, err
	}
	d := compare(want, have)
	return append(d.add, d.replace...), nil
}
