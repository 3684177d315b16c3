package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Check says which of the wanted tunnels, and of the receivers of their families, isn't as
// Ensure and EnsureReceivers make it, and returns the links of the tunnels that there are.
// Nothing is changed.
func (s *Syncer) Check(ctx context.Context, want []dataplane.Tunnel) (map[netip.Addr]Link, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	links := make(map[netip.Addr]Link, len(want))
	var errs []error
	for _, f := range families {
		wanted, problem := check(f, want)
		if errs = append(errs, problem); len(wanted) == 0 {
			continue
		}
		have, err := s.read(ctx, f)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		steps, problems := compare(f, wanted, have)
		errs = append(errs, problems...)
		for _, st := range steps {
			if st.index != 0 {
				links[st.want.Remote] = Link{Index: st.index, Name: st.name, Alias: st.want.Alias}
			}
			errs = append(errs, st.problem(have))
		}
		if !slices.ContainsFunc(have, func(t rtnl.Tunnel) bool { return t.Receiver && t.Name == receivers[f] && t.Up }) {
			errs = append(errs, fmt.Errorf("receiver %s is missing or down", receivers[f]))
		}
	}
	return links, errors.Join(errs...)
}

// Missing says, by their remote addresses, in which way wanted tunnels aren't as Ensure makes them. The error is about tunnels of which that can't be said. Nothing is changed.
func (s *Syncer) Missing(ctx context.Context, want []dataplane.Tunnel) (map[netip.Addr]error, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	wrong := map[netip.Addr]error{}
	var errs []error
	for _, f := range families {
		wanted, err := check(f, want)
		if errs = append(errs, err); len(wanted) == 0 {
			continue
		}
		have, err := s.read(ctx, f)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		steps, problems := compare(f, wanted, have)
		errs = append(errs, problems...)
		for _, st := range steps {
			if err := st.problem(have); err != nil {
				wrong[st.want.Remote] = err
			}
		}
	}
	return wrong, errors.Join(errs...)
}

// problem says in which way a tunnel isn't as it should be; nil if it is.
func (st step) problem(have []rtnl.Tunnel) error {
	switch {
	case st.index == 0:
		return fmt.Errorf("tunnel %s is missing", st.want)
	case st.set || st.label:
		t := have[slices.IndexFunc(have, func(t rtnl.Tunnel) bool { return t.Index == st.index })]
		return fmt.Errorf("tunnel %s is changed: link %s is %s, with the alias %q", st.want, st.name, t.Spec, t.Alias)
	case st.raise:
		return fmt.Errorf("tunnel %s is down: link %s", st.want, st.name)
	}
	return nil
}
