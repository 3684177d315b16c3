// Command lab starts real Kubernetes clusters on one machine, for demos, tests and benchmarks.
// It owns the command line; what it does is in the packages below it.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/pflag"
)

// command is one verb of the command line.
type command struct {
	usage string // what follows the verb
	help  string
	run   func(ctx context.Context, c *cli, args []string) error
}

// cli is what every command gets: its flags to declare and parse, and the outputs.
type cli struct {
	verb    string
	command command
	flags   *pflag.FlagSet
	out     io.Writer // results
	log     io.Writer // progress
}

// errUsage says that the command line is wrong and that the user has been told.
var errUsage = errors.New("usage")

func commands() map[string]command {
	return map[string]command{
		"up":         {"[flags]", "start a cluster with Coil and print its KUBECONFIG", runUp},
		"down":       {"[--name NAME | --all]", "remove a cluster, whatever state it is in", runDown},
		"status":     {"[--name NAME]", "show the machines and their components", runStatus},
		"exec":       {"[--name NAME] MACHINE [--] CMD...", "run a command inside a node, or inside the fabric", runExec},
		"poweroff":   {"[--name NAME] NODE", "cut the power of a node", runPowerOff},
		"poweron":    {"[--name NAME] NODE", "start a node again: same disk, new boot ID", runPowerOn},
		"stop":       {"[--name NAME] MACHINE COMPONENT", "kill a component, such as kubelet, and keep it down", runStop},
		"start":      {"[--name NAME] MACHINE COMPONENT", "start a component again", runStart},
		"logs":       {"[--name NAME] [MACHINE [COMPONENT]]", "print logs", runLogs},
		"image":      {"[--name NAME] import TAR...", "give images to all nodes", runImage},
		"kubeconfig": {"[--name NAME]", "print the path of the kubeconfig", runKubeconfig},
		"kubectl":    {"[--name NAME] [--] ARG...", "run the kubectl of the cluster's release", runKubectl},
		"api":        {"[flags] [--] [CMD...]", "start etcd and kube-apiserver only, until CMD ends or an interrupt", runAPI},
		"vm":         {"[flags] [--] CMD...", "run a command with another kernel and this machine's files", runVM},
		"build":      {"[--kubernetes-version X.Y]", "build all that clusters need, into the cache", runBuild},
		"preflight":  {"", "check that this machine has what the lab needs", runPreflight},
		"packages":   {"", "print the Debian packages that the lab needs", runPackages},
	}
}

// order is that of the help text.
var order = []string{
	"up", "down", "status", "exec", "poweroff", "poweron", "stop", "start", "logs", "image", "kubeconfig", "kubectl",
	"api", "vm", "build", "preflight", "packages",
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run executes one command line and returns the exit status.
func run(ctx context.Context, args []string, out, log io.Writer) int {
	if len(args) == 0 || args[0] == "help" || args[0] == "--help" || args[0] == "-h" {
		help(out)
		return 0
	}
	cmd, ok := commands()[args[0]]
	if !ok {
		fmt.Fprintf(log, "lab: unknown command %q\n", args[0])
		help(log)
		return 2
	}
	c := &cli{verb: args[0], command: cmd, out: out, log: log}
	c.flags = pflag.NewFlagSet(args[0], pflag.ContinueOnError)
	c.flags.SetInterspersed(false) // what follows the first argument may be another program's
	c.flags.SetOutput(log)
	c.flags.Usage = func() {
		fmt.Fprintf(log, "usage: lab %s %s\n%s\n%s", c.verb, cmd.usage, cmd.help, c.flags.FlagUsages())
	}
	err := cmd.run(ctx, c, args[1:])
	var exit interface{ ExitCode() int } // of os/exec or of a virtual machine
	switch {
	case err == nil || errors.Is(err, pflag.ErrHelp):
		return 0
	case errors.Is(err, errUsage):
		return 2
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		// A command that the user gave: it has said itself what is wrong.
		return exit.ExitCode()
	}
	fmt.Fprintf(log, "lab %s: %v\n", c.verb, err)
	return 1
}

// parse parses the command's flags and checks the number of arguments; most < 0 means any.
func (c *cli) parse(args []string, least, most int) ([]string, error) {
	if err := c.flags.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return nil, err
		}
		return nil, errUsage
	}
	rest := c.flags.Args()
	if len(rest) < least || most >= 0 && len(rest) > most {
		c.flags.Usage()
		return nil, errUsage
	}
	return rest, nil
}

func help(w io.Writer) {
	fmt.Fprintln(w, "lab starts real Kubernetes clusters on this machine. It needs root, except for \"api\".")
	all := commands()
	for _, verb := range order {
		fmt.Fprintf(w, "  lab %-46s %s\n", strings.TrimSpace(verb+" "+all[verb].usage), all[verb].help)
	}
	fmt.Fprintln(w, "Every command has --help.")
}
