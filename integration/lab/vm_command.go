package main

import (
	"context"
	"os"

	"github.com/coil-net/coil/integration/lab/vm"
)

func runVM(ctx context.Context, c *cli, args []string) error {
	opts := vm.Options{Stdin: os.Stdin, Stdout: c.out, Stderr: c.log, Log: c.log}
	c.flags.StringVar(&opts.Kernel, "kernel", "6.1", "series of Debian's kernels: 6.1 or 6.12")
	c.flags.StringVar(&opts.Accel, "accel", vm.Auto, "kvm, tcg, or auto: KVM when it works here")
	c.flags.IntVar(&opts.CPUs, "cpus", 2, "number of processors")
	c.flags.IntVar(&opts.Memory, "memory", 2048, "memory in MiB, also for all that is written")
	var err error
	if opts.Args, err = c.parse(args, 1, -1); err != nil {
		return err
	}
	return vm.Run(ctx, opts)
}
