package coild

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
)

func parseCleanup(t *testing.T, args ...string) *cleanupOptions {
	t.Helper()
	var o cleanupOptions
	fs := pflag.NewFlagSet("coild cleanup", pflag.ContinueOnError)
	o.AddFlags(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return &o
}

// The installer's environment gives the defaults, flags win.
func TestCleanupPaths(t *testing.T) {
	paths := func(o *cleanupOptions) []string { return []string{o.CNIConfDir, o.CNIConfName, o.CNIBinDir} }
	env := []string{"CNI_ETC_DIR", "CNI_CONF_NAME", "CNI_BIN_DIR"}
	for _, k := range env {
		t.Setenv(k, "")
	}
	t.Setenv("COIL_NODE_NAME", "")
	want := []string{"/host/etc/cni/net.d", "10-coil.conflist", "/host/opt/cni/bin"}
	o := parseCleanup(t)
	if diff := cmp.Diff(want, paths(o)); diff != "" {
		t.Errorf("defaults (-want +got):\n%s", diff)
	}
	if err := o.Validate(); err != nil {
		t.Errorf("without the name of the Node: %v", err)
	}
	for i, v := range []string{"/e", "05-coil.conflist", "/b"} {
		t.Setenv(env[i], v)
	}
	if diff := cmp.Diff([]string{"/e", "05-coil.conflist", "/b"}, paths(parseCleanup(t))); diff != "" {
		t.Errorf("by environment (-want +got):\n%s", diff)
	}
	o = parseCleanup(t, "--cni-conf-dir=/f", "--cni-conf-name=", "--cni-bin-dir=/g")
	if diff := cmp.Diff([]string{"/f", "", "/g"}, paths(o)); diff != "" {
		t.Errorf("by flags (-want +got):\n%s", diff)
	}
	if err := o.Validate(); err != nil {
		t.Errorf("without a network configuration: %v", err)
	}
}

func TestCleanupValidate(t *testing.T) {
	err := parseCleanup(t, "--cni-bin-dir=bin", "--cni-conf-name=a/b", "--router-protocol-id=4", "--pod-table-id=254").Validate()
	for _, want := range []string{"--cni-bin-dir", "--cni-conf-name", "--router-protocol-id", "--pod-table-id"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v doesn't name %s", err, want)
		}
	}
}

func TestCleanupIsACommand(t *testing.T) {
	if got := Main([]string{"cleanup", "--force", "--state", "--stay", "--version"}); got != 0 {
		t.Errorf("exit code %d", got)
	}
	// To coild itself these mean nothing.
	if got := Main([]string{"--force", "--version"}); got != 2 {
		t.Errorf("exit code %d of coild", got)
	}
}
