package egress

import (
	"context"
	"slices"

	"github.com/coil-net/coil/pkg/plan/client"
)

// Which routers are dead is known to the process that asks them, and to the groups that it made: a
// process that starts doesn't give new flows to a router that is listed still, and that the last one found
// dead. One that was draining then, and isn't now, is held to be dead until it has answered.

// recall makes the routers of a client dead that take none of its flows. Without an answer of the kernel
// they count as living, as in a client that is new.
func (m *Manager) recall(ctx context.Context, s *sandbox, c client.Client) {
	if !slices.ContainsFunc(c.Egresses, func(e client.Egress) bool { return e.Direct && len(e.Routers) > 0 }) {
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
			if r.State == client.RouterLive && slices.Contains(silent, r.Addr) && !m.cfg.Health.Answered(e.Name, r.Addr) {
				c.Egresses[i].Routers[j].State = client.RouterDead
			}
		}
	}
}
