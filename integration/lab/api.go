package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/coil-net/coil/integration/lab/controlplane"
)

func runAPI(ctx context.Context, c *cli, args []string) (err error) {
	opts := controlplane.Options{Log: c.log}
	c.flags.StringVar(&opts.KubernetesVersion, "kubernetes-version", "", "pinned release to run, as 1.36 (default: the newest)")
	c.flags.StringVar(&opts.Dir, "dir", "", "directory of data and logs, kept afterwards (default: a temporary one)")
	c.flags.StringArrayVar(&opts.APIServerArgs, "apiserver-arg", nil, "further flag of kube-apiserver; repeatable")
	command, err := c.parse(args, 0, -1)
	if err != nil {
		return err
	}
	api, err := controlplane.StartAPI(ctx, opts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, api.Stop()) }()
	if len(command) == 0 {
		fmt.Fprintf(c.out, "export KUBECONFIG=%s\n", api.Kubeconfig())
		fmt.Fprintln(c.log, "the API server is ready; interrupt to stop it")
		<-ctx.Done()
		return nil
	}
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+api.Kubeconfig())
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, c.out, c.log
	return cmd.Run()
}
