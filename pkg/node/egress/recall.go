package egress

import (
	"context"
	"net/netip"
	"slices"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/store"
)

// Which routers are dead is known to the process that asks them, and to the groups that it made: a
// process that starts doesn't give new flows to a router that is listed still, and that the last one found
// dead. One that was draining then, and isn't now, is held to be dead until it has answered.

// recall makes the routers of a client dead that take none of its flows. Without an answer of the kernel
// they count as living, as in a client that is new.
func (m *Manager) recall(ctx context.Context, s *sandbox, c plan.Client) {
	if !slices.ContainsFunc(c.Egresses, func(e plan.ClientEgress) bool { return e.Direct && len(e.Routers) > 0 }) {
		return
	}
	silent, err := m.net.Silent(ctx, s.Netns, c)
	if err != nil {
		logged(ctx, s).V(2).Info("It isn't known which routers were dead", "reason", err)
	}
	for i, e := range c.Egresses {
		// What a cache has isn't changed.
		c.Egresses[i].Routers = slices.Clone(e.Routers)
		for j, r := range e.Routers {
			if r.State == plan.RouterLive && slices.Contains(silent, r.Addr) && !m.hasAnswered(routerKey{e.Name, r.Addr}) {
				c.Egresses[i].Routers[j].State = plan.RouterDead
			}
		}
	}
}

// hasAnswered says whether a router has answered this process.
func (m *Manager) hasAnswered(key routerKey) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.routers[key]
	return r != nil && !r.last.IsZero()
}

// Silent implements Network. A group that isn't there tells nothing.
func (k *Kernel) Silent(ctx context.Context, at store.Netns, c plan.Client) (silent []netip.Addr, err error) {
	err = k.inside(ctx, at, func(in client) (err error) {
		silent, err = in.silent(ctx, c)
		return err
	})
	return silent, err
}

func (in client) silent(ctx context.Context, c plan.Client) ([]netip.Addr, error) {
	have, err := in.nexthops.Groups(ctx)
	if err != nil || len(have) == 0 {
		return nil, err
	}
	if c, err = in.linked(ctx, c); err != nil {
		return nil, err
	}
	state := plan.ClientStateOf(c)
	// The error is about tunnels that aren't there, or not as they should be: those to new routers.
	links, _ := in.tunnels.Check(ctx, in.ns, in.handle, c.Port, state.Tunnels)
	var silent []netip.Addr
	for _, g := range state.Groups {
		i := slices.IndexFunc(have, func(h dataplane.NexthopGroup) bool { return h.ID == g.ID })
		if i < 0 || !g.Direct {
			continue
		}
		for _, a := range g.Members {
			l, tunnelled := links[a]
			if tunnelled && !slices.ContainsFunc(have[i].Members, func(n dataplane.NexthopMember) bool { return n.ID == dataplane.NexthopOf(l.Index) }) {
				silent = append(silent, a)
			}
		}
	}
	return silent, nil
}
