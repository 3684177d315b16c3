package coild

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"time"

	"github.com/spf13/pflag"

	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/node/selftest"
	plan "github.com/coil-net/coil/pkg/plan/selftest"
)

// selftestCommand is the first argument of what pods of "coilctl selftest" run. It is a command of coild since its image is on all nodes.
const selftestCommand = "selftest"

// selftestMain runs "coild selftest serve", or "coild selftest ask" with the questions after that, and returns the exit code.
func selftestMain(args []string) int {
	if len(args) > 0 && args[0] == "serve" {
		var o serveOptions
		return program.Main("coild selftest serve", args[1:], &o, o.run)
	}
	if len(args) == 0 || args[0] != "ask" {
		fmt.Fprintln(os.Stderr, "coild selftest: use serve, or ask QUESTION...")
		return 2
	}
	o, args := askOptions{}, args[1:]
	for len(args) > 0 && args[0] != "" && args[0][0] != '-' {
		o.words, args = append(o.words, args[0]), args[1:]
	}
	return program.Main("coild selftest ask", args, &o, o.run)
}

// serveOptions are the flags of "coild selftest serve".
type serveOptions struct {
	name string
	port int
}

// AddFlags implements program.Options.
func (o *serveOptions) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.name, "name", "", "what the server calls itself")
	fs.IntVar(&o.port, "port", plan.Port, "TCP and UDP port")
}

// Validate implements program.Options.
func (o *serveOptions) Validate() error {
	var errs []error
	if o.port < 1 || o.port > math.MaxUint16 {
		errs = append(errs, fmt.Errorf("--port=%d isn't within 1 and %d", o.port, math.MaxUint16))
	}
	if len(o.name) > 253 {
		errs = append(errs, errors.New("--name has more than 253 characters"))
	}
	return errors.Join(errs...)
}

func (o *serveOptions) run(ctx context.Context) error {
	return selftest.Server{Name: o.name, Port: uint16(o.port)}.Run(ctx)
}

// askOptions are the questions and flags of "coild selftest ask".
type askOptions struct {
	words     []string
	within    time.Duration
	questions []plan.Question
}

// AddFlags implements program.Options.
func (o *askOptions) AddFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&o.within, "timeout", 3*time.Second, "the longest time to wait for an answer")
}

// Validate implements program.Options.
func (o *askOptions) Validate() error {
	errs := []error{program.Positive("--timeout", o.within)}
	o.questions = nil
	for _, word := range o.words {
		q, err := plan.Parse(word)
		errs = append(errs, err)
		o.questions = append(o.questions, q)
	}
	if len(o.words) == 0 {
		errs = append(errs, errors.New("there is no question, such as udp:10.0.0.1:9380"))
	}
	return errors.Join(errs...)
}

// run prints the answers as one line.
func (o *askOptions) run(ctx context.Context) error {
	return json.NewEncoder(os.Stdout).Encode(selftest.Ask(ctx, o.questions, o.within))
}
