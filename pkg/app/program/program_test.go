package program

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"

	"github.com/spf13/pflag"

	"github.com/coil-net/coil/pkg/testkit"
)

type testOptions struct {
	name string
	bad  error
}

func (o *testOptions) AddFlags(fs *pflag.FlagSet) { fs.StringVar(&o.name, "name", "x", "a name") }
func (o *testOptions) Validate() error            { return o.bad }

func TestMainExitCodes(t *testing.T) {
	tests := []struct {
		name string
		args []string
		opts testOptions
		run  error
		want int
		ran  bool
	}{
		{name: "runs", args: []string{"--name", "y"}, want: 0, ran: true},
		{name: "flags of 2.x with and without values", args: []string{
			"--backend", "iptables", "--register-from-main", "--clear-routes-on-shutdown=true", "--zap-log-level", "debug",
			"--addressblock-gc-interval=5m", "--enable-cert-rotation", "--cert-dir=/certs", "--zap-devel", "--webhook-addr", ":9443",
		}, want: 0, ran: true},
		{name: "unknown flag", args: []string{"--nmae=y"}, want: 2},
		{name: "argument", args: []string{"y"}, want: 2},
		{name: "invalid options", opts: testOptions{bad: errors.New("COIL_NODE_NAME is not set")}, want: 2},
		{name: "run fails", run: errors.New("no"), want: 1, ran: true},
		{name: "version", args: []string{"--version"}, want: 0},
		{name: "help", args: []string{"--help"}, want: 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ran := false
			got := Main("test", tt.args, &tt.opts, func(context.Context) error { ran = true; return tt.run })
			if got != tt.want || ran != tt.ran {
				t.Errorf("exit code %d, ran %v; want %d, %v", got, ran, tt.want, tt.ran)
			}
		})
	}
}

// Each line names the program: what begins on the first line only is read as one problem with a long text.
func TestMainNamesProblems(t *testing.T) {
	stderr := testkit.Must(os.CreateTemp(t.TempDir(), ""))(t)
	old := os.Stderr
	os.Stderr = stderr
	t.Cleanup(func() { os.Stderr = old })
	o := &testOptions{bad: errors.Join(errors.New("--a is wrong"), errors.New("--b is wrong"))}
	Main("test", nil, o, func(context.Context) error { return nil })
	testkit.Check(t, stderr.Close())
	if got, want := string(testkit.Must(os.ReadFile(stderr.Name()))(t)), "test: --a is wrong\ntest: --b is wrong\n"; got != want {
		t.Errorf("standard error is %q, want %q", got, want)
	}
}

func TestWords(t *testing.T) {
	for _, tt := range []struct{ args, words, flags []string }{
		{nil, nil, nil},
		{[]string{"pod", "a"}, []string{"pod", "a"}, nil},
		{[]string{"pod", "--socket", "x"}, []string{"pod"}, []string{"--socket", "x"}},
		{[]string{"-h"}, nil, []string{"-h"}},
	} {
		if words, flags := Words(tt.args); !slices.Equal(words, tt.words) || !slices.Equal(flags, tt.flags) {
			t.Errorf("%q: %q, %q", tt.args, words, flags)
		}
	}
}

func TestVersion(t *testing.T) {
	built := Version()
	if built == "" {
		t.Error("there is no version without a release")
	}
	t.Cleanup(func() { version = "" })
	for _, tt := range []struct{ stamped, want string }{{"v1.2.3", "v1.2.3"}, {"", built}} {
		version = tt.stamped
		if got := Version(); got != tt.want {
			t.Errorf("stamped %q: version %q, want %q", tt.stamped, got, tt.want)
		}
	}
}
