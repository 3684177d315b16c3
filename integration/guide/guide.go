// Package guide lets tests follow a page word by word. It reads the commands of a page, runs those of the operator, and compares their output with the page.
//
// It owns the way in which such a page is written. It must not know the page's subject, nor the places of commands other than the operator's shell.
//
//	_, steps := guide.Read(t, "FIRST-HOUR.md", "\n## A way out\n", "\n## All of it on one page\n")
//	shell := guide.NewShell(t, kubectl, kubeconfig)
//	for _, s := range steps {
//		out, err := shell.Run(ctx, s.Commands)
//		s.Check(t, string(out))
//	}
package guide

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

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/pkg/testkit"
)

// Step is a block of commands of a page: ```console.
type Step struct {
	// Place is the comment before the block, such as <!-- node -->: where the commands run. "" is the operator's shell.
	Place    string
	Commands string
	// Prints are beginnings of lines that they print, in this order: the block ```text that follows.
	Prints []string
}

var fenced = regexp.MustCompile("(?ms)^(?:<!-- (\\w+) -->\n)?```(\\w+)\n(.*?)^```$")

// Read returns the first file of YAML of a part of a page, if there is one, and its commands. Commands that end only when they are interrupted are ```sh, and
// are left out.
func Read(t *testing.T, page, from, to string) (file string, steps []Step) {
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
			steps = append(steps, Step{Place: place, Commands: lines})
		case kind == "text" && len(steps) > 0 && steps[len(steps)-1].Prints == nil:
			steps[len(steps)-1].Prints = strings.Split(strings.TrimSpace(lines), "\n")
		case kind != "sh":
			t.Errorf("what is this block for?\n%s", block[0])
		}
	}
	return file, steps
}

// Renamed returns the step with other names than the page has for its examples.
func (s Step) Renamed(here *strings.Replacer) Step {
	s.Commands, s.Prints = here.Replace(s.Commands), slices.Clone(s.Prints)
	for i, p := range s.Prints {
		s.Prints[i] = here.Replace(p)
	}
	return s
}

var (
	ages    = regexp.MustCompile(`\b(\d+[dhms])+\b`)
	numbers = regexp.MustCompile(`[0-9a-f]*\d[0-9a-f]*`)
)

// alike returns a line without numbers, addresses and the width of columns, which differ each time.
func alike(line string) string {
	return strings.Join(strings.Fields(numbers.ReplaceAllLiteralString(ages.ReplaceAllLiteralString(line, "N"), "N")), " ")
}

// Missing returns the first line of the page that the output lacks, "" for none. Numbers, addresses and the width of columns aren't compared.
func (s Step) Missing(out string) string {
	rest := strings.Split(out, "\n")
	for _, want := range s.Prints {
		at := slices.IndexFunc(rest, func(line string) bool { return strings.HasPrefix(alike(line), alike(want)) })
		if at < 0 {
			return want
		}
		rest = rest[at+1:]
	}
	return ""
}

// Check fails the test if a line is missing.
func (s Step) Check(t *testing.T, out string) {
	t.Helper()
	if want := s.Missing(out); want != "" {
		t.Errorf("the page has %q, but this was printed by\n%s:\n%s", want, s.Commands, out)
	}
}

// Shell is the operator's, in a folder of its own with a copy of the repository, coil. It has kubectl and coilctl.
type Shell struct {
	Dir string
	env []string
}

// NewShell makes one for a cluster, with a kubectl. kubectl apply -k is a dry run: the cluster has Coil, of which that would be another image.
func NewShell(t *testing.T, kubectl, kubeconfig string) *Shell {
	t.Helper()
	dir := t.TempDir()
	script := fmt.Sprintf("#!/bin/sh\ncase \"$1 $2\" in \"apply -k\") set -- \"$@\" --dry-run=server ;; esac\nKUBECACHEDIR=%s exec %s \"$@\"\n", dir, kubectl)
	coilctl := testkit.Must((&build.Builder{Log: os.Stderr}).Own(t.Context(), "cmd/coilctl"))(t)
	testkit.Check(t, os.WriteFile(filepath.Join(dir, "kubectl"), []byte(script), 0o755), os.Symlink(coilctl, filepath.Join(dir, "coilctl")),
		os.Symlink(testkit.Must(build.Root())(t), filepath.Join(dir, "coil")))
	return &Shell{Dir: dir, env: append(os.Environ(), "KUBECONFIG="+kubeconfig, "PATH="+dir+":"+os.Getenv("PATH"))}
}

// Run runs commands until one fails, and returns their output.
func (s *Shell) Run(ctx context.Context, commands string) ([]byte, error) {
	shell := exec.CommandContext(ctx, "bash", "-ec", commands)
	shell.Dir, shell.Env = s.Dir, s.env
	return shell.CombinedOutput()
}
