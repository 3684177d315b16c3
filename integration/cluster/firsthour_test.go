package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/guide"
	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/cluster"
	"github.com/coil-net/coil/pkg/testkit"
)

// readFirstHour returns the page's kustomization.yaml, and its commands. Those by which README.md operates a cluster and finds what is wrong come when the Service is reached.
func readFirstHour(t *testing.T) (kustomization string, steps []guide.Step) {
	t.Helper()
	kustomization, steps = guide.Read(t, "FIRST-HOUR.md", "# The first hour", "\nPools go when")
	_, operate := guide.Read(t, "README.md", "\n## Operate\n", "\n## Figures\n")
	at := slices.IndexFunc(steps, func(s guide.Step) bool { return s.Place == "outside" }) + 1
	if kustomization == "" || len(steps) < 10 || at == 0 || len(operate) < 6 {
		t.Fatalf("kustomization %q, %d blocks of commands, and %d of README.md", kustomization, len(steps), len(operate))
	}
	fine := guide.Step{Commands: "coilctl status --wait=1m"} // how far other tests' objects are
	return kustomization, slices.Insert(steps, at, append([]guide.Step{fine}, operate...)...)
}

// The page has commands for each place: "node" and "outside" are shells there, "bird" a node with BIRD, and "fou" the operator's shell if the kernel has Foo over
// UDP.
func TestFirstHourPage(t *testing.T) {
	_, steps := readFirstHour(t)
	places := map[string]int{}
	for _, s := range steps {
		places[s.Place]++
	}
	for _, place := range []string{"", "node", "bird", "outside", "fou"} {
		if places[place] == 0 {
			t.Errorf("nothing is done at %q", place)
		}
	}
}

// FIRST-HOUR.md, and two sections of README.md, are followed word by word, in a cluster that has Coil already, with coil-lb-controller beside it. Its image of a web server is the lab's.
func TestFirstHour(t *testing.T) {
	e := use(t)
	ctx := t.Context()
	kustomization, steps := readFirstHour(t)
	shell := guide.NewShell(t, testkit.Must(e.KubectlCommand(ctx))(t).Path, e.Kubeconfig())
	testkit.Check(t, os.WriteFile(filepath.Join(shell.Dir, "kustomization.yaml"), []byte(kustomization), 0o644))
	t.Cleanup(func() { // the page does so itself, at its end
		_, err := e.Kubectl(context.WithoutCancel(ctx), "delete", "--ignore-not-found", "--wait=false", "namespace/first-hour", "namespace/internet",
			"addresspool/services", "addresspool/partners", "addresspool/default")
		testkit.Check(t, err)
	})
	e.control(t, "services")
	node := e.Nodes()[1]
	for _, s := range steps {
		e.follow(t, shell, node, s)
	}
}

// follow does what a page says. Names of its examples are those that things have here.
func (e env) follow(t *testing.T, shell *guide.Shell, node string, s guide.Step) {
	t.Helper()
	s = s.Renamed(strings.NewReplacer("busybox:1.37", tools, "shop/", "first-hour/", "-n shop", "-n first-hour", "'shop'", "'first-hour'", "shop|", "first-hour|", "coil-worker", node))
	ctx, began := t.Context(), time.Now()
	var out []byte
	var err error
	switch s.Place {
	case "node":
		out, err = e.Exec(ctx, node, "sh", "-ec", s.Commands)
	case "bird":
		e.bird(t, node)
		testkit.Eventually(t, 20*time.Second, "BIRD has the node's blocks", func() error {
			if out, err = e.Exec(ctx, node, "sh", "-ec", s.Commands); err == nil && !strings.Contains(string(out), "unicast") {
				err = fmt.Errorf("it has %s", out)
			}
			return err
		})
	case "outside":
		out, err = e.Exec(ctx, cluster.Fabric, "sh", "-ec", s.Commands)
	case "fou":
		if _, err := e.Exec(ctx, node, "ip", "fou", "show"); err != nil {
			e.event(t, "first-hour", "checkout", time.Minute, "no FoU")
			return
		}
		fallthrough
	default:
		out, err = shell.Run(ctx, s.Commands)
	}
	t.Logf("after %s:\n%s%s", time.Since(began), s.Commands, out)
	if err != nil {
		t.Fatalf("%v", err)
	}
	s.Check(t, string(out))
}

// bird starts BIRD on a node with the file of manifests/routing, until the test ends. Its router isn't there.
func (e env) bird(t *testing.T, node string) {
	t.Helper()
	conf := string(testkit.Must(os.ReadFile(filepath.Join(testkit.Must(build.Root())(t), "manifests/routing/bird.conf")))(t))
	conf = strings.NewReplacer("@ROUTER_ID@", "172.30.0.200", "@NODE_AS@", "64512", "@ROUTER_AS@", "64513", "@ROUTER4@", "172.30.0.201", "@ROUTER6@", "fd00:172:30::c9").Replace(conf)
	file := filepath.Join(t.TempDir(), "bird.conf")
	testkit.Check(t, os.WriteFile(file, []byte(conf), 0o644))
	testkit.Must(e.Exec(t.Context(), node, "sh", "-ec", "mkdir -p /run/bird; bird -c "+file))(t)
	t.Cleanup(func() { testkit.Must(e.Exec(context.WithoutCancel(t.Context()), node, "birdc", "down"))(t) })
}
