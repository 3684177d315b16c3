package egress

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/podnet"
)

// ErrUnguarded: coild has made the link of a client, and doesn't find its end on the node.
var ErrUnguarded = errors.New("the node doesn't keep what the pod sends past its tunnels")

// guard is the node's guard of a client while that changes: first all is allowed that was allowed or is
// to be, then the client changes, then the rest is forbidden. It doesn't depend on what a program in the
// pod does, nor on whether the client can be changed.
type guard struct {
	host Host
	mu   sync.Mutex // protects have and changed
	// link is the node's end of the client's link; 0 if there is none.
	link     int
	have, to dataplane.ClientGuard
	changed  int
}

// guard finds the guard that a client has. A pod that another plugin attached, and not by a veth to the
// node, has none.
func (in client) guard(ctx context.Context, c plan.Client, to plan.ClientState) (*guard, error) {
	g := &guard{host: in.host, to: to.ClientGuard()}
	if in.host == nil {
		return g, nil
	}
	host, err := in.host.HostLink(ctx, podnet.ID{ContainerID: c.ContainerID, IfName: c.Link}, in.ns, c.Address)
	if errors.Is(err, podnet.ErrNoHostLink) {
		if c.Wired && len(g.to.Destinations) > 0 {
			return g, fmt.Errorf("%w: %w", ErrUnguarded, err)
		}
		return g, nil
	}
	if err == nil {
		g.have, err = in.host.ClientGuard(ctx, host)
	}
	if err != nil {
		return g, fmt.Errorf("the node's guard of the client: %w", err)
	}
	g.link = host
	return g, nil
}

func (g *guard) widen(ctx context.Context) error {
	both, err := plan.WidenGuard(g.have, g.to)
	if err != nil {
		return err
	}
	return g.set(ctx, both)
}

// narrow doesn't end with coild, whose successor takes the kernel's guard for the wanted one at first.
func (g *guard) narrow(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	return g.set(ctx, g.to)
}

// narrowAfter narrows the guard after a time, though the client hasn't changed yet: a program in the pod may delay
// that, and closes something at worst. The function that it returns narrows the guard at once.
func (g *guard) narrowAfter(ctx context.Context, d time.Duration) (narrow func() error) {
	timer := time.AfterFunc(d, func() { _ = g.narrow(ctx) }) // an error comes again
	return func() error {
		timer.Stop()
		return g.narrow(ctx)
	}
}

func (g *guard) set(ctx context.Context, to dataplane.ClientGuard) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.link == 0 || g.have.Equal(to) {
		return nil
	}
	result, err := g.host.GuardClient(ctx, g.link, to)
	if err != nil {
		return fmt.Errorf("the node's guard of the client: %w", err)
	}
	g.have = to
	g.changed += result.Added + result.Replaced + result.Deleted
	return nil
}

// changes is how much was changed on the node.
func (g *guard) changes() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.changed
}

// checkGuard says whether the node's guard of a client is as it was made.
func (in client) checkGuard(ctx context.Context, c plan.Client, made plan.ClientState) error {
	g, err := in.guard(ctx, c, made)
	if err != nil || g.link == 0 {
		return err
	}
	return in.host.CheckClientGuard(ctx, g.link, g.to)
}
