// Package netnstest makes network namespaces for tests and looks at what is in
// them.
//
// It owns the life of these namespaces: they are bound to a path, as a
// container runtime does it, and are gone when the test is over. Package netlab
// does what is to be done in them. It must not know what is tested. The machine's
// own namespace is changed only by tests in a virtual machine, which ask for it by the zero NS.
package netnstest

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// NS is a network namespace for a test; its lo is up. The zero value is the
// machine's own, which only tests in a virtual machine may change.
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

// Open opens the network namespace at a path until the test is over.
func Open(tb testing.TB, path string) *NS {
	tb.Helper()
	ns, err := netns.Open(path)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := ns.Close(); err != nil {
			tb.Errorf("close network namespace: %v", err)
		}
	})
	return &NS{NS: ns, Path: path}
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

// Lab is the namespace for functions that return errors.
func (n *NS) Lab() *netlab.NS { return &netlab.NS{NS: n.NS} }

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

// Configure runs commands of ip(8) as netlab.NS.IP does; the test fails if one fails.
func (n *NS) Configure(tb testing.TB, commands ...string) {
	tb.Helper()
	// Not the test's context: there are commands of clean-ups, too.
	testkit.Check(tb, n.Lab().IP(context.Background(), commands...))
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
	cmd := exec.Command(name, args...)
	if stdin != "" {
		cmd.Stdin = strings.NewReader(stdin)
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := n.Lab().Exec(cmd); err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out.Bytes())
	}
	return strings.TrimRight(out.String(), "\n"), nil
}

// Ping sends one echo request from the namespace and waits for the answer. A
// link-local destination has the index of the link as zone.
func (n *NS) Ping(dst netip.Addr, timeout time.Duration) error { return n.Lab().Ping(dst, timeout) }

// SourceOf pings dst, an address of the namespace to, and returns the source
// address that the echo request arrives with.
func (n *NS) SourceOf(to *NS, dst netip.Addr, timeout time.Duration) (netip.Addr, error) {
	return n.Lab().SourceOf(to.Lab(), dst, timeout)
}
