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
