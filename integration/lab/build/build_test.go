package build

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseModule(t *testing.T) {
	m, err := parseModule([]byte(`// comment
module example.org/x

go 1.26.0

tool (
	k8s.io/kubernetes/cmd/kubelet
	k8s.io/kubernetes/cmd/kubectl
)

require (
	k8s.io/kubectl v0.0.0 // indirect
	k8s.io/kubernetes v1.36.3 // indirect
)

replace (
	k8s.io/kubectl => k8s.io/kubectl v0.36.3
)
`))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"kubelet": "k8s.io/kubernetes/cmd/kubelet",
		"kubectl": "k8s.io/kubernetes/cmd/kubectl",
	}
	if d := cmp.Diff(want, m.packages); d != "" {
		t.Errorf("packages (-want +got):\n%s", d)
	}
	if m.version != "v1.36.3" {
		t.Errorf("version is %q, want v1.36.3", m.version)
	}
	if flags := strings.Join(m.flags(), " "); !strings.Contains(flags, "component-base/version.gitVersion=v1.36.3") {
		t.Errorf("flags %q don't stamp the version", flags)
	}
	if _, err := parseModule([]byte("module x\ntool example.org/cmd/y\n")); err == nil {
		t.Error("a module that requires nothing of its tools was accepted")
	}
}

func TestPinnedModulesProvideEveryProgram(t *testing.T) {
	mods, err := new(Builder).modules()
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]int{}
	for _, m := range mods {
		for n := range m.packages {
			have[n]++
		}
	}
	for _, n := range []string{
		"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl",
		"containerd", "containerd-shim-runc-v2", "ctr", "loopback", "ptp", "host-local", "portmap",
	} {
		if have[n] != 1 {
			t.Errorf("%d modules provide %s, want 1", have[n], n)
		}
	}
}

func TestSelectVersion(t *testing.T) {
	versions := []string{"v1.36.3", "v1.36.1", "v1.33.6"}
	for _, tc := range []struct{ want, got string }{
		{"", "v1.36.3"},
		{"1.36", "v1.36.3"},
		{"v1.36.1", "v1.36.1"},
		{"v1.33", "v1.33.6"},
		{"1.3", ""}, // a component is whole or it doesn't match
		{"1.40", ""},
	} {
		got, err := selectVersion(versions, tc.want)
		if got != tc.got || (err != nil) != (tc.got == "") {
			t.Errorf("selectVersion(%q) = %q, %v; want %q", tc.want, got, err, tc.got)
		}
	}
}

func TestCompareVersions(t *testing.T) {
	for _, tc := range []struct {
		a, b string
		want int
	}{{"v1.9.0", "v1.10.0", -1}, {"v1.36.3", "v1.36.3", 0}, {"v2.0.0", "v1.99.9", 1}} {
		if got := compareVersions(tc.a, tc.b); got != tc.want {
			t.Errorf("compareVersions(%s, %s) = %d, want %d", tc.a, tc.b, got, tc.want)
		}
	}
}

func TestProgressSeparatesPackagesFromMessages(t *testing.T) {
	var out bytes.Buffer
	p := newProgress(&out, "x")
	for _, s := range []string{"go: downloading a v1\nfm", "t\nk8s.io/api/core/v1\n", "# k8s.io/broken\nfile.go:1:2: undefined\n"} {
		if _, err := p.Write([]byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	p.finish(false)
	if p.packages != 2 || p.fetched != 1 {
		t.Errorf("counted %d packages and %d downloads, want 2 and 1", p.packages, p.fetched)
	}
	if got := p.messages(); !strings.HasPrefix(got, "# k8s.io/broken\nfile.go:1:2: undefined") {
		t.Errorf("messages are %q", got)
	}
}

func TestProgramsNamesWhatNobodyProvides(t *testing.T) {
	_, err := new(Builder).Programs(t.Context(), "no-such-program")
	if err == nil || !strings.Contains(err.Error(), "no-such-program") {
		t.Errorf("error is %v, want one that names the program", err)
	}
}

func TestProgramsWithoutGo(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := new(Builder).Programs(t.Context(), "etcd")
	if err == nil || !strings.Contains(err.Error(), "install Go") {
		t.Errorf("error is %v, want one that says what to install", err)
	}
}

func TestOwnKeepsAnUnchangedProgram(t *testing.T) {
	b := new(Builder)
	first, err := b.Own(t.Context(), "integration/lab/image/pause")
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(first)
	if err != nil {
		t.Fatal(err)
	}
	linked := commands(t)
	known, err := b.Own(t.Context(), "integration/lab/image/pause")
	if err != nil || known != first {
		t.Errorf("the second time it is %s, %v; want %s", known, err, first)
	}
	if out := linked(); out != "" {
		t.Errorf("the go command was asked for what this process has built:\n%s", out)
	}
	owned.Clear() // as another process finds it
	second, err := b.Own(t.Context(), "integration/lab/image/pause")
	if err != nil {
		t.Fatal(err)
	}
	after, err := os.Stat(second)
	if err != nil {
		t.Fatal(err)
	}
	if first != second || !os.SameFile(before, after) {
		t.Error("an unchanged program was replaced")
	}
	if out := linked(); !strings.Contains(out, "WORK=") || strings.Contains(out, "/link -o ") {
		t.Errorf("an unchanged program was linked again, or the commands are unknown:\n%s", out)
	}
}

// commands records from now on what "go build" runs (go help build: -x).
func commands(t *testing.T) func() string {
	t.Helper()
	real, err := exec.LookPath("go")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	script := fmt.Sprintf("#!/bin/sh\n[ \"$1\" = build ] || exec %[1]s \"$@\"\nshift\nexec %[1]s build -x \"$@\" 2>>%[2]s\n", real, log)
	if err := os.WriteFile(filepath.Join(dir, "go"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return func() string {
		out, err := os.ReadFile(log)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // none was run
			t.Fatal(err)
		}
		return string(out)
	}
}
