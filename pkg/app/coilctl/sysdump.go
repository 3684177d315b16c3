package coilctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"
	"k8s.io/client-go/dynamic"

	"github.com/coil-net/coil/pkg/app/program"
)

// sysdumpOptions are the flags of the command sysdump.
type sysdumpOptions struct {
	*tool
	file     string
	nodes    []string
	maxNodes int
	since    time.Duration
	timeout  time.Duration

	on  clients
	any dynamic.Interface
}

// sysdump returns the command that collects what a bug report needs.
func (t *tool) sysdump() *cobra.Command {
	o := &sysdumpOptions{tool: t}
	c := &cobra.Command{
		Use: "sysdump", Short: "Collect what a bug report needs in one archive", Args: cobra.NoArgs,
		Long: "Collect what a bug report needs in one archive: all objects of Coil, Nodes and other objects of Kubernetes that Coil has to do with, logs and metrics of Coil's pods, what the coild of each node says and its record of " +
			"addresses, versions, and the output of coilctl status.\n\n" +
			"No Secret and no ConfigMap is read. Values of environment variables, annotations of other programs, and what looks like a token or a password are left out. Look through the archive all the same before you " +
			"give it to others: it has names and addresses. What can't be read is listed in errors.txt of the archive, and doesn't end the command. Ctrl-C leaves an archive with what there is.\n\n" +
			"Rights, of which any may be missing: list all kinds of coil.cybozu.com, nodes, pods, namespaces, services, events, endpointslices.discovery.k8s.io, leases.coordination.k8s.io, daemonsets.apps and deployments.apps; " +
			"get pods/log and pods/proxy, and get and create pods/exec.",
		Example: "  coilctl sysdump\n  coilctl sysdump --node=worker-1 --node=worker-2 --since=15m -f bug.tar.gz",
		RunE:    func(c *cobra.Command, _ []string) error { return o.run(c.Context()) },
	}
	c.Flags().StringVarP(&o.file, "filename", "f", "", "archive that is written, or - for the standard output (default coil-sysdump-TIME.tar.gz)")
	c.Flags().StringSliceVar(&o.nodes, "node", nil, "nodes whose coild, pods and logs are read, in place of all")
	c.Flags().IntVar(&o.maxNodes, "max-nodes", 50, "the most nodes that are read without --node: those with findings first, then by name")
	c.Flags().DurationVar(&o.since, "since", time.Hour, "how far back logs go")
	c.Flags().DurationVar(&o.timeout, "timeout", 10*time.Minute, "the longest time for all that is read")
	complete(c, "node", t.completeNames(resourceNodes))
	return c
}

func (o *sysdumpOptions) run(ctx context.Context) (err error) {
	switch {
	case o.since <= 0 || o.timeout <= 0:
		return errors.New("--since and --timeout must be longer than nothing")
	case o.maxNodes < 0:
		return fmt.Errorf("--max-nodes can't be %d", o.maxNodes)
	}
	if o.on, err = o.connect(); err != nil {
		return err
	}
	cfg, err := o.config()
	if err != nil {
		return err
	}
	if o.any, err = dynamic.NewForConfig(cfg); err != nil {
		return err
	}
	began := time.Now()
	if o.file == "" {
		o.file = "coil-sysdump-" + began.UTC().Format("20060102T150405Z") + ".tar.gz"
	}
	out := o.Out
	if o.file != standardOutput {
		f, err := os.OpenFile(o.file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("%s is there already: use another name", o.file)
		}
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		out = f
	} else if f, is := o.Out.(*os.File); is && term.IsTerminal(int(f.Fd())) {
		return errors.New("an archive isn't for a terminal: use --filename")
	}
	return o.write(ctx, newArchive(out, began, o.progress()))
}

// write reads everything and writes it. An error means that the archive isn't whole.
func (o *sysdumpOptions) write(ctx context.Context, a *archive) error {
	reading, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	if err := a.text("README.txt", readme); err != nil {
		return err
	}
	found := o.survey(reading, a)
	if err := a.add(reading, o.entries(found)); err != nil {
		return err
	}
	if err := a.close(); err != nil {
		return err
	}
	name := o.file
	if name == standardOutput {
		name = "the archive"
	}
	switch {
	case a.files == 0 && ctx.Err() == nil:
		return errors.Join(fmt.Errorf("nothing could be read: %s", a.first()), o.discard())
	case ctx.Err() != nil:
		return fmt.Errorf("interrupted: %s has what was read until then", name)
	}
	printf(o.ErrOut, "%s has %d whole files", name, a.files)
	if n := len(a.problems); n > 0 {
		printf(o.ErrOut, "; %d things couldn't be read, see errors.txt in it", n)
	}
	printf(o.ErrOut, ". Look through it before you give it to others\n")
	return nil
}

// discard removes an archive that has nothing.
func (o *sysdumpOptions) discard() error {
	if o.file == standardOutput {
		return nil
	}
	return os.Remove(o.file)
}

// progress tells how far reading is: on a terminal in one line, otherwise once for each folder of the archive.
func (o *sysdumpOptions) progress() func(done, all int, name string) {
	f, is := o.ErrOut.(*os.File)
	if is && term.IsTerminal(int(f.Fd())) {
		return func(done, all int, name string) {
			printf(o.ErrOut, "\r\x1b[K%d/%d %s", done, all, name)
			if done == all {
				printf(o.ErrOut, "\r\x1b[K")
			}
		}
	}
	last := ""
	return func(done, all int, name string) {
		if folder := folderOf(name); folder != last {
			last = folder
			printf(o.ErrOut, "reading %s, from file %d of %d on\n", folder, done, all)
		}
	}
}

// versions says what runs.
func (o *sysdumpOptions) versions(found *surveyed) func(context.Context, io.Writer) error {
	return func(ctx context.Context, w io.Writer) error {
		v := map[string]any{"coilctl": program.Version(), "time": found.at.UTC().Format(time.RFC3339), "images": found.images, "nodes": found.systems}
		api, err := serverVersion(ctx, o.on.core)
		if err == nil {
			v["apiServer"] = api
		}
		return errors.Join(err, writeYAML(w, v))
	}
}

// readme is README.txt of an archive.
const readme = `This is an archive of coilctl sysdump, for a report of a fault of Coil.

README.txt            this text
versions.yaml         versions of coilctl, the API server, Coil's images, and the nodes' kernels, systems and runtimes
status.txt            what coilctl status says
objects/              objects of the API server, a file for each kind. Pods are those of Coil
nodes/NODE/           pods of a node; what its coild says (coild.json) and its record of addresses (record.json)
logs/NAMESPACE/POD/   logs of Coil's pods: those of nodes/, and all that no DaemonSet has. previous.log is of a container that has ended
metrics/              metrics of these pods
index.txt             all files with their sizes
errors.txt            what couldn't be read, or only in part, and why

No Secret and no ConfigMap was read. Values of environment variables, annotations of programs other than Coil and Kubernetes, and what looks like a
token or a password are replaced by REMOVED or left out. Of pods that aren't Coil's there is only where they are, their addresses and how they are.
Names, labels, addresses and logs are as they were: look through them before you give the archive to others.
`
