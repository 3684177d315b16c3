package routes

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
)

// daemon is the routing daemon of a node. It can be started again after it was killed.
type daemon interface {
	start(ctx context.Context) error
	kill()
	logs(n int) string
}

// variant is how a network is.
type variant struct {
	// external is eBGP: each node has an AS of its own.
	external bool
	// families are those of nodes; nil are both, IPv4 first. pools are those of pods.
	families, pools []rig.Family
	// flags are further ones of coild.
	flags []string
	// bfd says that daemons and router have BFD.
	bfd bool
	// daemon makes that of a node, with a folder of its own.
	daemon func(t testing.TB, n *node, dir string) daemon
}

// onBIRD is BIRD with the configuration of manifests/routing.
func onBIRD(t testing.TB, n *node, dir string) daemon {
	text := fill(t, "bird.conf", n)
	for _, f := range both {
		if _, ok := n.routers[f]; !ok {
			text = withoutBlock(t, text, fmt.Sprintf("protocol bgp router%d ", f))
		}
	}
	return newBIRD(dir, n.NetnsPath, text)
}

// withoutBlock removes a block as the README says for a family that nodes don't have.
func withoutBlock(t testing.TB, text, begin string) string {
	from := strings.Index(text, begin)
	to := strings.Index(text[max(from, 0):], "\n}\n")
	if from < 0 || to < 0 {
		t.Fatalf("there is no block %q", begin)
	}
	return text[:from] + text[from+to+len("\n}\n"):]
}

// placeholder is what admins replace.
var placeholder = regexp.MustCompile(`@[A-Z0-9_]+@`)

// fill returns a file of manifests/routing with the placeholders replaced for a node.
func fill(t testing.TB, file string, n *node) string {
	values := map[string]string{
		"@ROUTER_ID@": routerID(n).String(), "@NODE_AS@": strconv.Itoa(n.as), "@ROUTER_AS@": strconv.Itoa(routerAS),
		"@ROUTER4@": n.routers[rig.IPv4].String(), "@ROUTER6@": n.routers[rig.IPv6].String(),
	}
	text := manifest(t, file)
	if n.bfd {
		text = strings.NewReplacer("#BFD ", "", "!BFD ", "").Replace(text)
	}
	return placeholder.ReplaceAllStringFunc(text, func(p string) string {
		v, ok := values[p]
		if !ok {
			t.Fatalf("%s has the placeholder %s, which the test doesn't know", file, p)
		}
		return v
	})
}

// routerID is the node's IPv4 address, or, if it has none, a number of its own.
func routerID(n *node) netip.Addr {
	if n.Addr4.IsValid() {
		return n.Addr4
	}
	return netip.AddrFrom4([4]byte{192, 0, 2, byte(n.number)})
}

// manifest returns a file of manifests/routing.
func manifest(t testing.TB, file string) string {
	root, err := build.Root()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, "manifests/routing", file))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// onFRR is FRR with a configuration of manifests/routing.
func onFRR(file string) func(testing.TB, *node, string) daemon {
	return func(t testing.TB, n *node, dir string) daemon {
		return newFRR(dir, n.NetnsPath, fill(t, file, n), fill(t, "daemons", n))
	}
}

// frr is FRR in a network namespace. It has mounts of its own, so that it finds its
// folders where it looks for them, and PIDs of its own, so that nothing outlives it.
type frr struct {
	rig.Program
	netns              func() string // its path, which is another one after a boot
	dir, text, daemons string
}

// newFRR prepares one with a configuration and a file "daemons".
func newFRR(dir string, netns func() string, text, daemons string) *frr {
	f := &frr{netns: netns, dir: dir, text: text, daemons: daemons}
	f.Log = filepath.Join(dir, "log")
	return f
}

// frrInit does what FRR's own script does, in the foreground: it starts the programs that
// the file "daemons" names, with its options.
const frrInit = `set -eu
mount -t tmpfs none /var/tmp
mkdir -p /run/frr
mount --bind "$1/run" /run/frr
zebra=yes staticd=yes
. "$1/daemons"
for program in zebra bgpd bfdd staticd; do
  eval "want=\${$program:-no} options=\${${program}_options:-}"
  [ "$want" = yes ] || continue
  /usr/lib/frr/$program $options -f /dev/null --log stdout &
done
wait
`

// start starts it and gives it the configuration as "vtysh -b" does.
func (f *frr) start(ctx context.Context) error {
	owner, err := user.Lookup("frr")
	if err != nil {
		return err
	}
	uid, _ := strconv.Atoi(owner.Uid)
	gid, _ := strconv.Atoi(owner.Gid)
	run := filepath.Join(f.dir, "run")
	err = errors.Join(os.RemoveAll(run), os.MkdirAll(run, 0o755), os.Chown(run, uid, gid))
	for name, text := range map[string]string{"init": frrInit, "daemons": f.daemons, "frr.conf": f.text} {
		err = errors.Join(err, os.WriteFile(filepath.Join(f.dir, name), []byte(text), 0o644))
	}
	if err != nil {
		return err
	}
	f.Path, f.Netns = "unshare", f.netns()
	f.Args = []string{"--mount", "--pid", "--fork", "--kill-child", "sh", filepath.Join(f.dir, "init"), f.dir}
	if err := f.Start(); err != nil {
		return err
	}
	if err := testkit.Within(ctx, 20*time.Second, func() error {
		if !f.Running() {
			return fmt.Errorf("FRR has ended:\n%s", f.Logs(20))
		}
		programs := []string{"zebra", "bgpd", "staticd"}
		if strings.Contains(f.daemons, "\nbfdd=yes") {
			programs = append(programs, "bfdd")
		}
		for _, program := range programs {
			if _, err := os.Stat(filepath.Join(run, program+".vty")); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return err
	}
	_, err = f.vtysh(ctx, "-f", filepath.Join(f.dir, "frr.conf"))
	return err
}

// vtysh runs FRR's shell and returns its output. A command that it doesn't know is an
// error.
func (f *frr) vtysh(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--target", strconv.Itoa(f.PID()), "--mount", "--", "vtysh"}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("vtysh %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

func (f *frr) kill() { f.Kill() }

func (f *frr) logs(n int) string { return f.Logs(n) }
