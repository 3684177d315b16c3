// Package coilctl composes coilctl, the operator's command.
//
// It owns commands, flags, and what is printed. It must not decide what is right or wrong in a cluster.
//
// A command is in the file of its name, and in those whose names begin so: its flags and help first, then what it does. Beside them:
//
//	lists.go           the form of the commands that list objects (nodes, blocks, ...), and watch.go their --watch
//	objects.go         which kinds of objects these read, and status, pools and serve, too; fetch.go reads lists for one question
//	examiner*.go       reads what package diagnosis judges, for why, trace, db check and selftest
//	ask.go             runs "coild debug" and "coil-egress debug" in pods
//	output.go          formats and colours; complete.go completes names in shells
package coilctl

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/pkg/app/program"
)

// userAgent names the program to the API server.
const userAgent = "coilctl"

// tool is what all commands share.
type tool struct {
	genericiooptions.IOStreams
	flags  *genericclioptions.ConfigFlags
	format string
	colour string
	// wide says that tables have all columns.
	wide  bool
	clock *clock
}

// exitError is an error with an exit code of its own.
type exitError struct {
	error
	code int
}

// Main runs the command that args ask for, the first of which is the program's own path. It returns the exit code of the process: 0, or another one after an error,
// which it has printed: 1, or that of the error.
func Main(args []string, in io.Reader, out, errOut io.Writer) int {
	ctx, stop := interrupts()
	defer stop()
	klog.SetOutput(errOut)
	c := newCommand(args[0], genericiooptions.IOStreams{In: in, Out: out, ErrOut: errOut})
	rest := args[1:]
	if strings.HasPrefix(filepath.Base(args[0]), "kubectl_complete-") { // kubectl starts it so for a shell
		rest = append([]string{cobra.ShellCompRequestCmd}, rest...)
	}
	c.SetArgs(rest)
	if err := c.ExecuteContext(ctx); err != nil {
		printf(errOut, "error: %s\n", eachLine(err.Error()))
		if own := (exitError{}); errors.As(err, &own) {
			return own.code
		}
		return 1
	}
	return 0
}

// newCommand returns the command of a program that was started by this path.
func newCommand(path string, streams genericiooptions.IOStreams) *cobra.Command {
	t := &tool{IOStreams: streams, flags: genericclioptions.NewConfigFlags(true), clock: &clock{}}
	root := &cobra.Command{
		Use: "coilctl", Short: "Show what Coil does in a cluster", Version: program.Version(),
		SilenceUsage: true, SilenceErrors: true, DisableAutoGenTag: true,
	}
	if strings.HasPrefix(filepath.Base(path), "kubectl") {
		root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl coil"}
	}
	root.SetVersionTemplate(root.Name() + " {{.Version}}\n") // as all programs of Coil print it
	root.SetIn(streams.In)
	root.SetOut(streams.Out)
	root.SetErr(streams.ErrOut)
	t.flags.AddFlags(root.PersistentFlags())
	root.PersistentFlags().StringVarP(&t.format, "output", "o", formatTable, "format of the output: "+strings.Join(formats, ", "))
	root.PersistentFlags().StringVar(&t.colour, "color", colourAuto, "colours: auto (on a terminal, unless NO_COLOR is set), always, never")
	root.PersistentPreRunE = func(*cobra.Command, []string) error { return t.validate() }
	complete(root, "output", fixed(formats))
	complete(root, "color", fixed(colours))
	complete(root, "namespace", t.completeNames(resourceNamespaces))
	root.AddCommand(t.convert(), t.db(), t.pools(), t.selftest(), t.serve(), t.status(), t.sysdump(), t.trace(), t.why())
	root.AddCommand(t.lists()...)
	return root
}

// exactly accepts so many arguments. Its error shows the command's use.
func exactly(n int) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) == n {
			return nil
		}
		return fmt.Errorf("wrong number of arguments (got %d, want %d): %s", len(args), n, c.UseLine())
	}
}

// validate says what is wrong with the flags of all commands.
func (t *tool) validate() error {
	var errs []error
	if !oneOf(t.format, formats) {
		errs = append(errs, fmt.Errorf("--output can't be %q: choose one of %s", t.format, strings.Join(formats, ", ")))
	}
	if !oneOf(t.colour, colours) {
		errs = append(errs, fmt.Errorf("--color can't be %q: choose one of %s", t.colour, strings.Join(colours, ", ")))
	}
	if t.format == formatWide {
		t.format, t.wide = formatTable, true
	}
	return errors.Join(errs...)
}

// config is that of clients.
func (t *tool) config() (*rest.Config, error) {
	cfg, err := t.flags.ToRESTConfig()
	if err != nil {
		return nil, err
	}
	cfg.UserAgent = userAgent
	cfg.Wrap(t.clock.listening)
	cfg.QPS = -1 // the API server shares itself out, and a command makes a dozen of requests
	return cfg, nil
}

// coil returns a client of Coil's API.
func (t *tool) coil() (versioned.Interface, error) {
	cfg, err := t.config()
	if err != nil {
		return nil, err
	}
	return versioned.NewForConfig(cfg)
}

// core returns a client of Kubernetes' own API.
func (t *tool) core() (kubernetes.Interface, error) {
	cfg, err := t.config()
	if err != nil {
		return nil, err
	}
	cfg.ContentType, cfg.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	return kubernetes.NewForConfig(cfg)
}
