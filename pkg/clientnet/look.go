package clientnet

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/echo"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/store"
)

// Exists says whether a network namespace is still there.
func (n *Network) Exists(at store.Netns) (bool, error) {
	ns, err := open(at)
	if errors.Is(err, ErrGone) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, ns.Close()
}

// Ask asks routers by the tunnels of a client; see package kernel/echo.
func (n *Network) Ask(ctx context.Context, at store.Netns, wait time.Duration, questions []echo.Question) (answers []echo.Answer, err error) {
	err = visit(ctx, at, func(ns *netns.NS) (err error) {
		answers, err = echo.Ask(ctx, ns, wait, questions)
		return err
	})
	return answers, err
}

// Closed returns the routes of a client in tables 117 and 118. Some of them close destinations, others spare ranges
// inside of these.
func (n *Network) Closed(ctx context.Context, at store.Netns) (routes []dataplane.Route, err error) {
	err = n.inside(ctx, at, func(in namespace) (err error) {
		routes, err = in.routes.List(ctx)
		return err
	})
	return routes, err
}

// Silent returns the routers that take no flows of a client though it has a tunnel to them: a former process found them
// dead. A group that isn't there tells nothing.
func (n *Network) Silent(ctx context.Context, at store.Netns, c client.Client) (silent []netip.Addr, err error) {
	err = n.inside(ctx, at, func(in namespace) (err error) {
		silent, err = in.silent(ctx, c)
		return err
	})
	return silent, err
}

func (in namespace) silent(ctx context.Context, c client.Client) ([]netip.Addr, error) {
	have, err := in.nexthops.Groups(ctx)
	if err != nil || len(have) == 0 {
		return nil, err
	}
	if c, err = in.linked(ctx, c); err != nil {
		return nil, err
	}
	state := client.StateOf(c)
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
