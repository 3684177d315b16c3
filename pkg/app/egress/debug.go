package egress

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/natgateway"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/plan/inspection"
)

// debugCommand is the first argument that asks a running coil-egress.
const debugCommand = "debug"

// defaultSocket is in a file system that each container has for itself, and that can be written to also if its root can't.
const defaultSocket = "/dev/coil-egress-debug.sock"

// debugOptions are the flags of "coil-egress debug".
type debugOptions struct {
	Socket  string
	Timeout time.Duration
	path    string
	// wrong says why the words ask for nothing; nil if they do.
	wrong error
}

// debugMain runs "coil-egress debug" with the arguments after that, and returns the exit code: words, then flags.
func debugMain(args []string) int {
	words, flags := program.Words(args)
	o := &debugOptions{}
	o.path, o.wrong = natgateway.DebugPath(words)
	return program.Main(programName+" "+debugCommand, flags, o, o.run)
}

// AddFlags implements program.Options.
func (o *debugOptions) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Socket, "debug-socket", defaultSocket, "unix socket at which coil-egress is asked")
	fs.DurationVar(&o.Timeout, "timeout", 3*time.Second, "the longest time to wait for the answer")
}

// Validate implements program.Options.
func (o *debugOptions) Validate() error {
	return errors.Join(o.wrong, program.Absolute("--debug-socket", o.Socket), program.Positive("--timeout", o.Timeout))
}

// run prints the answer.
func (o *debugOptions) run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	if _, err := observe.AskSocket(ctx, o.Socket, o.path, inspection.Limit, os.Stdout); err != nil {
		return fmt.Errorf("ask coil-egress: %w", err)
	}
	return nil
}

// serveDebug answers what people ask until ctx ends. Clients are served without it, too.
func serveDebug(ctx context.Context, socket string, d *natgateway.Debug) error {
	if socket == "" {
		return nil
	}
	if err := d.Serve(ctx, socket); err != nil {
		klog.FromContext(ctx).Error(err, "Nobody can ask what is wrong")
	}
	return nil
}
