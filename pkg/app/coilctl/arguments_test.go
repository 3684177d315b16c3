package coilctl_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/app/coilctl"
)

// A command with too few or too many arguments shows its use.
func TestArguments(t *testing.T) {
	for args, want := range map[string]string{
		"db dump":         "error: wrong number of arguments (got 0, want 1): coilctl db dump NODE [flags]\n",
		"trace shop/a":    "error: wrong number of arguments (got 1, want 2): coilctl trace [NAMESPACE/]POD DESTINATION[:PORT] [flags]\n",
		"pools drain a b": "error: wrong number of arguments (got 2, want 1): coilctl pools drain POOL [flags]\n",
		"blocks release":  "error: wrong number of arguments (got 0, want 1): coilctl blocks release BLOCK [flags]\n",
		"why service a b": "error: wrong number of arguments (got 2, want 1): coilctl why service [NAMESPACE/]NAME [flags]\n",
	} {
		var out, errOut bytes.Buffer
		if code := coilctl.Main(append([]string{"coilctl"}, strings.Fields(args)...), strings.NewReader(""), &out, &errOut); code != 1 || errOut.String() != want || out.Len() > 0 {
			t.Errorf("coilctl %s: exit code %d, %q and %q, want %q", args, code, errOut.String(), out.String(), want)
		}
	}
}
