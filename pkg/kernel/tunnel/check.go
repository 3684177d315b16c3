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
	links := make(map[netip.Addr]Link, len(want))
	err := s.look(ctx, want, func(f dataplane.Family, steps []step, have []rtnl.Tunnel) (errs []error) {
		for _, st := range steps {
			if st.index != 0 {
				links[st.want.Remote] = Link{Index: st.index, Name: st.name, Alias: st.want.Alias}
			}
			errs = append(errs, st.problem(have))
		}
		if !slices.ContainsFunc(have, func(t rtnl.Tunnel) bool { return t.Receiver && t.Name == receivers[f] && t.Up }) {
			errs = append(errs, fmt.Errorf("receiver %s is missing or down", receivers[f]))
		}
		return errs
	})
	return links, err
}

// Missing says, by their remote addresses, in which way wanted tunnels aren't as Ensure makes them. The error is about tunnels of which that can't be said. Nothing is changed.
func (s *Syncer) Missing(ctx context.Context, want []dataplane.Tunnel) (map[netip.Addr]error, error) {
	wrong := map[netip.Addr]error{}
	err := s.look(ctx, want, func(_ dataplane.Family, steps []step, have []rtnl.Tunnel) []error {
		for _, st := range steps {
			if err := st.problem(have); err != nil {
				wrong[st.want.Remote] = err
			}
		}
		return nil
	})
	return wrong, err
}

// look has judge see what each family lacks, and what it has. The error has those of judge, and why something can't be seen.
func (s *Syncer) look(ctx context.Context, want []dataplane.Tunnel, judge func(f dataplane.Family, steps []step, have []rtnl.Tunnel) []error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
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
		errs = append(append(errs, problems...), judge(f, steps, have)...)
	}
	return errors.Join(errs...)
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
