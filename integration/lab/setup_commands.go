package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/coil-net/coil/integration/lab/cluster"
	"github.com/coil-net/coil/integration/lab/preflight"
)

func runBuild(ctx context.Context, c *cli, args []string) error {
	version := c.flags.String("kubernetes-version", "", "pinned release, as 1.36 (default: the newest)")
	if _, err := c.parse(args, 0, 0); err != nil {
		return err
	}
	return cluster.Build(ctx, *version, c.log)
}

func runPreflight(_ context.Context, c *cli, args []string) error {
	if _, err := c.parse(args, 0, 0); err != nil {
		return err
	}
	if err := preflight.Check(preflight.Cluster, preflight.VM, preflight.Routing, preflight.Gateway); err != nil {
		return err
	}
	fmt.Fprintln(c.log, "nothing is missing")
	return nil
}

func runPackages(_ context.Context, c *cli, args []string) error {
	if _, err := c.parse(args, 0, 0); err != nil {
		return err
	}
	fmt.Fprintln(c.out, strings.Join(preflight.Packages(), " "))
	return nil
}
