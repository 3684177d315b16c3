// Package netnstest makes network namespaces for tests and looks at what is in
// them.
//
// It owns the life of these namespaces: they are bound to a path, as a
// container runtime does it, and are gone when the test is over. It must not
// know what is tested. The machine's own namespace is never changed.
package netnstest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/testkit"
)

// NS is a network namespace for a test; its lo is up.
type NS struct {
	*netns.NS
	// Path is where the namespace is bound.
	Path string
}

// New makes a network namespace and removes it when the test is over. The test
// must be one of the tier Netns.
func New(tb testing.TB) *NS {
	tb.Helper()
	testkit.Need(tb, testkit.Netns)
	path := filepath.Join(tb.TempDir(), "netns")
	Make(tb, path)
	ns, err := netns.Open(path)
	if err != nil {
		Remove(tb, path)
		tb.Fatalf("open network namespace: %v", err)
	}
	n := &NS{NS: ns, Path: path}
	tb.Cleanup(func() {
		if err := ns.Close(); err != nil {
			tb.Errorf("close network namespace: %v", err)
		}
		if _, err := os.Stat(path); err == nil {
			Remove(tb, path)
		}
	})
	n.IP(tb, "link", "set", "lo", "up")
	return n
}

// Make makes a namespace and binds it to a path where nothing is yet.
func Make(tb testing.TB, path string) {
	tb.Helper()
	if err := bind(path); err != nil {
		tb.Fatalf("make network namespace: %v", err)
	}
}

// bind makes a namespace and binds it to a path.
func bind(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o600)
	if err != nil {
		return fmt.Errorf("create mount point: %w", err)
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("create mount point: %w", err)
	}
	ns, err := netns.New()
	if err != nil {
		return err
	}
	defer ns.Close()
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", ns.Fd()), path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind to %s: %w", path, err)
	}
	return nil
}

// Remove unbinds the namespace at a path and removes the path, as a runtime does
// at the end of a pod.
func Remove(tb testing.TB, path string) {
	tb.Helper()
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
		tb.Errorf("unmount %s: %v", path, err)
	}
	if err := os.Remove(path); err != nil {
		tb.Errorf("remove mount point: %v", err)
	}
}

// IP runs iproute2's ip in the namespace and returns what it prints; the test
// fails if it fails.
func (n *NS) IP(tb testing.TB, args ...string) string {
	tb.Helper()
	out, err := n.Run("ip", args...)
	if err != nil {
		tb.Fatalf("%v", err)
	}
	return out
}

// Batch has one ip run many commands, a line each, with the same options.
func (n *NS) Batch(tb testing.TB, options, commands string) string {
	tb.Helper()
	out, err := n.run(commands, "ip", append(strings.Fields(options), "-batch", "-")...)
	if err != nil {
		tb.Fatalf("%v, of\n%s", err, commands)
	}
	return out
}

// Run runs a program in the namespace and returns its output.
func (n *NS) Run(name string, args ...string) (string, error) { return n.run("", name, args...) }

func (n *NS) run(stdin, name string, args ...string) (string, error) {
	var out []byte
	// A process is born where the thread is that starts it. nsenter(1) would be one more to start.
	err := n.Do(func() (err error) {
		cmd := exec.Command(name, args...)
		if stdin != "" {
			cmd.Stdin = strings.NewReader(stdin)
		}
		out, err = cmd.CombinedOutput()
		return err
	})
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return strings.TrimRight(string(out), "\n"), nil
}
