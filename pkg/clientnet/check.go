package clientnet

import (
	"context"
	"errors"
	"fmt"

	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/store"
)

// Check returns an error for each object of a client that isn't as Client made it. Objects of others aren't looked
// at, and nothing is changed.
func (n *Network) Check(ctx context.Context, at store.Netns, c client.Client, made client.State) error {
	return n.inside(ctx, at, func(in namespace) error { return in.check(ctx, c, made) })
}

func (in namespace) check(ctx context.Context, c client.Client, made client.State) error {
	links, err := in.tunnels.Check(ctx, in.ns, in.handle, c.Port, made.Tunnels)
	errs := []error{err}
	indexes, accepting := linksOf(links)
	rules, err := in.rules.Missing(ctx, made.Rules)
	errs = append(errs, err, missing("rule", rules))
	sinks, err := in.sinks(ctx, made.Sinks()...)
	errs = append(errs, err)
	// The routes into a tunnel that is missing went with it.
	routes, err := in.routes.Missing(ctx, made.By(indexes, sinks))
	errs = append(errs, err, missing("route", routes), in.checkGroups(ctx, made, indexes))
	if made.Filter != nil {
		errs = append(errs, in.withTable(func(t *nft.Table) error { return t.Check(ctx, made.Filter.Ruleset()) }))
	}
	_, err = in.linked(ctx, c)
	errs = append(errs, err)
	return errors.Join(append(errs, compare(in.ns, append(settingsOf(c.Link, spreadOf(made)), accepting)...))...)
}

// missing is the error that objects of a kind are missing or differ, nil without any.
func missing[T any](kind string, all []T) error {
	var errs []error
	for _, x := range all {
		errs = append(errs, fmt.Errorf("%s %v is missing, or differs", kind, x))
	}
	return errors.Join(errs...)
}
