// Package vmtest runs a test in a virtual machine with another kernel: the test starts
// itself there.
//
// It owns how a test comes to its machine. It must not know what is tested.
package vmtest

import (
	"flag"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/coil-net/coil/integration/lab/vm"
	"github.com/coil-net/coil/pkg/testkit"
)

// inside is set in the environment of a test that runs in a machine.
const inside = "COIL_TEST_IN_VM"

// Reexec returns true in the machine, with the modules loaded. Otherwise it boots one, runs
// the calling test there and takes its output and result: the caller then returns. A machine takes ten
// seconds to boot and runs all subtests of the caller. Arguments and output of the options aren't
// used; their environment is added to the caller's. There is no network but lo, and a file that is
// written is gone with the machine.
//
//	if vmtest.Reexec(t, vm.Options{Kernel: "6.12"}, "veth", "fou") {
//		t.Run("…", …)
//	}
func Reexec(t *testing.T, o vm.Options, modules ...string) bool {
	t.Helper()
	testkit.Need(t, testkit.VM)
	if os.Getenv(inside) != "" {
		return true
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	o.Args = []string{"sh", "-c", "modprobe -a " + strings.Join(modules, " ") + ` && exec "$@"`, "sh",
		self, "-test.v", "-test.run=" + pattern(t.Name(), flag.Lookup("test.run").Value.String())}
	// In the machine everything is at hand that network namespaces need.
	o.Env = append(append(os.Environ(), o.Env...), inside+"=1", "COIL_TEST_TIERS=vm,netns,apiserver")
	o.Stdout, o.Stderr, o.Log = t.Output(), t.Output(), os.Stderr
	if err := vm.Run(t.Context(), o); err != nil {
		t.Fatalf("in the machine: %v", err)
	}
	return false
}

// pattern selects a test by its name, and of its subtests those that the pattern by which it
// was itself selected does.
func pattern(name, selected string) string {
	var elements []string
	for e := range strings.SplitSeq(name, "/") {
		elements = append(elements, "^"+regexp.QuoteMeta(e)+"$")
	}
	if of := strings.Split(selected, "/"); len(of) > len(elements) {
		elements = append(elements, of[len(elements):]...)
	}
	return strings.Join(elements, "/")
}
