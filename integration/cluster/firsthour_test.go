package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/cluster"
	"github.com/coil-net/coil/pkg/testkit"
)

// step is a block of commands of a page.
type step struct {
	// place is where they run: "" is the operator's shell, "node" and "outside" a shell there, "bird" a node with BIRD, and "fou" the operator's shell if the
	// kernel has Foo over UDP.
	place, commands string
	// prints are beginnings of lines that they print, in this order.
	prints []string
}

var fenced = regexp.MustCompile("(?ms)^(?:<!-- (\\w+) -->\n)?```(\\w+)\n(.*?)^```$")

// readPage returns the first file of YAML of a part of a page, and its commands.
func readPage(t *testing.T, page, from, to string) (file string, steps []step) {
	t.Helper()
	text := string(testkit.Must(os.ReadFile(filepath.Join(testkit.Must(build.Root())(t), page)))(t))
	_, text, begins := strings.Cut(text, from)
	text, _, ends := strings.Cut(text, to)
	if !begins || !ends {
		t.Fatalf("%s has no part from %q to %q", page, from, to)
	}
	for _, block := range fenced.FindAllStringSubmatch(text, -1) {
		place, kind, lines := block[1], block[2], block[3]
		switch {
		case kind == "yaml" && file == "":
			file = lines
		case kind == "console":
			steps = append(steps, step{place: place, commands: lines})
		case kind == "text" && len(steps) > 0 && steps[len(steps)-1].prints == nil:
			steps[len(steps)-1].prints = strings.Split(strings.TrimSpace(lines), "\n")
		case kind != "sh": // of other shells, or without an end
			t.Errorf("what is this block for?\n%s", block[0])
		}
	}
	return file, steps
}

// readFirstHour returns the page's kustomization.yaml, and its commands. Those by which README.md operates a cluster and finds what is wrong come when the Service is reached.
func readFirstHour(t *testing.T) (kustomization string, steps []step) {
	t.Helper()
	kustomization, steps = readPage(t, "FIRST-HOUR.md", "# The first hour", "\nPools go when")
	_, operate := readPage(t, "README.md", "\n## Operate\n", "\n## Figures\n")
	at := slices.IndexFunc(steps, func(s step) bool { return s.place == "outside" }) + 1
	if kustomization == "" || len(steps) < 10 || at == 0 || len(operate) < 6 {
		t.Fatalf("kustomization %q, %d blocks of commands, and %d of README.md", kustomization, len(steps), len(operate))
	}
	fine := step{commands: "coilctl status --wait=1m"} // how far other tests' objects are
	return kustomization, slices.Insert(steps, at, append([]step{fine}, operate...)...)
}

var (
	ages    = regexp.MustCompile(`\b(\d+[dhms])+\b`)
	numbers = regexp.MustCompile(`[0-9a-f]*\d[0-9a-f]*`)
)

// alike is a line without what differs each time: numbers, addresses, and the width of columns.
func alike(line string) string {
	return strings.Join(strings.Fields(numbers.ReplaceAllLiteralString(ages.ReplaceAllLiteralString(line, "N"), "N")), " ")
}

// check compares what commands have printed with what the page says.
func (s step) check(t *testing.T, out string) {
	t.Helper()
	rest := strings.Split(out, "\n")
	for _, want := range s.prints {
		at := -1
		for i, line := range rest {
			if strings.HasPrefix(alike(line), alike(want)) {
				at = i
				break
			}
		}
		if at < 0 {
			t.Errorf("the page has %q, but this was printed by\n%s:\n%s", want, s.commands, out)
			return
		}
		rest = rest[at+1:]
	}
}

// The page has commands for each place, and lines are compared without what differs each time.
func TestFirstHourPage(t *testing.T) {
	for text, want := range map[string]string{
		"default-0   coil-worker   10.100.0.32/27   fd00:100::20/123   4m12s": "default-N coil-worker N.N.N.N/N N:N::N/N N",
		"ok     routes     the table of pods":                                 "ok routes the table of pods",
	} {
		if got := alike(text); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	_, steps := readFirstHour(t)
	places := map[string]int{}
	for _, s := range steps {
		places[s.place]++
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
	dir := e.shell(t, kustomization)
	t.Cleanup(func() { // the page does so itself, at its end
		_, err := e.Kubectl(context.WithoutCancel(ctx), "delete", "--ignore-not-found", "--wait=false", "namespace/first-hour", "namespace/internet",
			"addresspool/services", "addresspool/partners", "addresspool/default")
		testkit.Check(t, err)
	})
	e.control(t, "services")
	node := e.Nodes()[1]
	for _, s := range steps {
		e.follow(t, dir, node, s)
	}
}

// follow does what a page says. Names of its examples are those that things have here.
func (e env) follow(t *testing.T, dir, node string, s step) {
	t.Helper()
	here := strings.NewReplacer("busybox:1.37", tools, "shop/", "first-hour/", "-n shop", "-n first-hour", "coil-worker", node)
	s.commands = here.Replace(s.commands)
	for i := range s.prints {
		s.prints[i] = here.Replace(s.prints[i])
	}
	ctx, began := t.Context(), time.Now()
	var out []byte
	var err error
	switch s.place {
	case "node":
		out, err = e.Exec(ctx, node, "sh", "-ec", s.commands)
	case "bird":
		e.bird(t, node)
		testkit.Eventually(t, 20*time.Second, "BIRD has the node's blocks", func() error {
			if out, err = e.Exec(ctx, node, "sh", "-ec", s.commands); err == nil && !strings.Contains(string(out), "unicast") {
				err = fmt.Errorf("it has %s", out)
			}
			return err
		})
	case "outside":
		out, err = e.Exec(ctx, cluster.Fabric, "sh", "-ec", s.commands)
	case "fou":
		if _, err := e.Exec(ctx, node, "ip", "fou", "show"); err != nil {
			e.event(t, "first-hour", "checkout", time.Minute, "no FoU")
			return
		}
		fallthrough
	default:
		shell := exec.CommandContext(ctx, "bash", "-ec", s.commands)
		shell.Dir, shell.Env = dir, append(os.Environ(), "KUBECONFIG="+e.Kubeconfig(), "PATH="+dir+":"+os.Getenv("PATH"))
		out, err = shell.CombinedOutput()
	}
	t.Logf("after %s:\n%s%s", time.Since(began), s.commands, out)
	if err != nil {
		t.Fatalf("%v", err)
	}
	s.check(t, string(out))
}

// shell makes the operator's folder. kubectl doesn't install Coil again, which would be another image: that is asked of the API server only.
func (e env) shell(t *testing.T, kustomization string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	kubectl := testkit.Must(e.KubectlCommand(t.Context()))(t)
	script := fmt.Sprintf("#!/bin/sh\ncase \"$1 $2\" in \"apply -k\") set -- \"$@\" --dry-run=server ;; esac\nKUBECACHEDIR=%s exec %s \"$@\"\n", dir, kubectl.Path)
	coilctl := testkit.Must((&build.Builder{Log: os.Stderr}).Own(t.Context(), "cmd/coilctl"))(t)
	testkit.Check(t, os.WriteFile(filepath.Join(dir, "kubectl"), []byte(script), 0o755), os.Symlink(coilctl, filepath.Join(dir, "coilctl")),
		os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(kustomization), 0o644), os.Symlink(testkit.Must(build.Root())(t), filepath.Join(dir, "coil")))
	return dir
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
