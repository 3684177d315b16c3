package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"text/tabwriter"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/integration/lab/cluster"
)

// nameFlag declares --name.
func (c *cli) nameFlag() *string {
	return c.flags.String("name", cluster.DefaultName, "name of the cluster")
}

// open parses a command line that has --name and opens that cluster.
func (c *cli) open(args []string, least, most int) (*cluster.Cluster, []string, error) {
	name := c.nameFlag()
	rest, err := c.parse(args, least, most)
	if err != nil {
		return nil, nil, err
	}
	if os.Geteuid() != 0 {
		return nil, nil, errors.New("clusters belong to root: run it with sudo, or in a root shell")
	}
	cl, err := cluster.Open("", *name)
	return cl, rest, err
}

func runUp(ctx context.Context, c *cli, args []string) error {
	opts := cluster.Options{Log: c.log}
	c.flags.StringVar(&opts.Name, "name", cluster.DefaultName, "name of the cluster; its nodes' names begin with it")
	c.flags.IntVar(&opts.Nodes, "nodes", 3, "number of nodes, that of the control plane included")
	c.flags.StringVar(&opts.KubernetesVersion, "kubernetes-version", "", "pinned release to run, as 1.36 (default: the newest)")
	c.flags.StringArrayVar(&opts.Images, "image", nil, "archive that every node imports; repeatable (default: what make image builds)")
	c.flags.StringArrayVar(&opts.Kustomize, "kustomize", nil, "directory to apply; repeatable (default: one of integration/lab/manifests)")
	c.flags.BoolVar(&opts.ReferenceCNI, "reference-cni", false, "connect pods by the reference plugins; needs --no-coil")
	family := c.flags.String("ip-family", "dual", "ipv4, ipv6 or dual")
	noCoil := c.flags.Bool("no-coil", false, "neither build nor install Coil")
	if _, err := c.parse(args, 0, 0); err != nil {
		return err
	}
	var err error
	if opts.Families, err = parseFamilies(*family); err != nil {
		return err
	}
	if opts.ReferenceCNI && !*noCoil {
		return errors.New("--reference-cni needs --no-coil: a node has one network")
	}
	if !*noCoil {
		if err := opts.AddCoil(ctx); err != nil {
			return err
		}
	}
	cl, err := cluster.Up(ctx, opts)
	if err != nil {
		return fmt.Errorf("%w\nlab logs --name %s shows more; lab down --name %s removes what was started", err, opts.Name, opts.Name)
	}
	if !*noCoil || opts.ReferenceCNI {
		fmt.Fprintln(c.log, "waiting for the nodes to be ready")
		if err := cl.WaitReady(ctx); err != nil {
			return fmt.Errorf("wait for the nodes: %w", err)
		}
		if err := cl.WaitWorkloads(ctx, "kube-system"); err != nil {
			return fmt.Errorf("wait for kube-system: %w", err)
		}
	}
	fmt.Fprintf(c.log, "the cluster is up: %s\n", strings.Join(cl.Nodes(), " "))
	fmt.Fprintf(c.out, "export KUBECONFIG=%s\n", cl.Kubeconfig())
	return nil
}

func parseFamilies(s string) ([]cluster.Family, error) {
	switch s {
	case "ipv4":
		return []cluster.Family{cluster.IPv4}, nil
	case "ipv6":
		return []cluster.Family{cluster.IPv6}, nil
	case "dual":
		return []cluster.Family{cluster.IPv4, cluster.IPv6}, nil
	}
	return nil, fmt.Errorf("address family %q: want ipv4, ipv6 or dual", s)
}

func runDown(ctx context.Context, c *cli, args []string) error {
	name := c.nameFlag()
	all := c.flags.Bool("all", false, "every cluster of this machine")
	if _, err := c.parse(args, 0, 0); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("clusters belong to root: run it with sudo, or in a root shell")
	}
	names := []string{*name}
	if *all {
		var err error
		if names, err = cluster.List(""); err != nil {
			return err
		}
	}
	var errs []error
	for _, n := range names {
		errs = append(errs, cluster.Down(ctx, "", n))
	}
	return errors.Join(errs...)
}

func runExec(_ context.Context, c *cli, args []string) error {
	cl, rest, err := c.open(args, 2, -1)
	if err != nil {
		return err
	}
	machine, command := rest[0], rest[1:]
	if command[0] == "--" {
		command = command[1:]
	}
	line, err := cl.EnterArgs(machine, command...)
	if err != nil {
		return err
	}
	path, err := exec.LookPath(line[0])
	if err != nil {
		return err
	}
	// The command takes this process's place, and with it the terminal and the signals.
	return unix.Exec(path, line, os.Environ())
}

func runPowerOff(ctx context.Context, c *cli, args []string) error {
	cl, rest, err := c.open(args, 1, 1)
	if err != nil {
		return err
	}
	return cl.PowerOff(ctx, rest[0])
}

func runPowerOn(ctx context.Context, c *cli, args []string) error {
	cl, rest, err := c.open(args, 1, 1)
	if err != nil {
		return err
	}
	return cl.PowerOn(ctx, rest[0])
}

func runStop(ctx context.Context, c *cli, args []string) error {
	cl, rest, err := c.open(args, 2, 2)
	if err != nil {
		return err
	}
	return cl.Stop(ctx, rest[0], rest[1])
}

func runStart(ctx context.Context, c *cli, args []string) error {
	cl, rest, err := c.open(args, 2, 2)
	if err != nil {
		return err
	}
	return cl.Start(ctx, rest[0], rest[1])
}

func runLogs(_ context.Context, c *cli, args []string) error {
	cl, rest, err := c.open(args, 0, 2)
	if err != nil {
		return err
	}
	machines := slices.Concat([]string{cluster.Fabric}, cl.Nodes())
	component := ""
	if len(rest) > 0 {
		machines = rest[:1]
	}
	if len(rest) > 1 {
		component = rest[1]
	}
	for _, m := range machines {
		if err := cl.Logs(c.out, m, component); err != nil {
			return err
		}
	}
	return nil
}

func runImage(ctx context.Context, c *cli, args []string) error {
	cl, rest, err := c.open(args, 2, -1)
	if err != nil {
		return err
	}
	if rest[0] != "import" {
		c.flags.Usage()
		return errUsage
	}
	for _, archive := range rest[1:] {
		if err := cl.ImportImage(ctx, archive); err != nil {
			return err
		}
	}
	return nil
}

func runKubeconfig(_ context.Context, c *cli, args []string) error {
	cl, _, err := c.open(args, 0, 0)
	if err != nil {
		return err
	}
	fmt.Fprintln(c.out, cl.Kubeconfig())
	return nil
}

func runKubectl(ctx context.Context, c *cli, args []string) error {
	cl, rest, err := c.open(args, 0, -1)
	if err != nil {
		return err
	}
	cmd, err := cl.KubectlCommand(ctx, rest...)
	if err != nil {
		return err
	}
	// As for exec: the terminal and the signals are kubectl's.
	return unix.Exec(cmd.Path, cmd.Args, cmd.Env)
}

func runStatus(ctx context.Context, c *cli, args []string) error {
	cl, _, err := c.open(args, 0, 0)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(c.out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "MACHINE\tPOWER\tCOMPONENT\tSTATE\tRESTARTS")
	for _, m := range cl.Status(ctx) {
		switch {
		case !m.On:
			fmt.Fprintf(w, "%s\toff\t\t\t\n", m.Name)
		case m.Problem != nil:
			fmt.Fprintf(w, "%s\ton\t\t%v\t\n", m.Name, m.Problem)
		}
		for _, s := range m.Components {
			fmt.Fprintf(w, "%s\ton\t%s\t%s\t%d\n", m.Name, s.Name, componentState(s.PID, s.Wanted), s.Restarts)
		}
	}
	return w.Flush()
}

func componentState(pid int, wanted bool) string {
	switch {
	case pid != 0:
		return "running"
	case wanted:
		return "starting"
	}
	return "stopped"
}
