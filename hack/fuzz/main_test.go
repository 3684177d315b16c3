package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// sources is a module with fuzz functions of each kind.
var sources = map[string]string{
	"go.mod": "module example.org/m\n\ngo 1.26\n",
	"good/good_test.go": `package good
import "testing"
func FuzzGood(f *testing.F) { f.Add("a"); f.Fuzz(func(t *testing.T, s string) {}) }
func Fuzzy(f *testing.F)    {}
func TestBad(t *testing.T)  { t.Error("isn't for this program") }
`,
	"bad/bad_test.go": `package bad
import "testing"
func FuzzGrows(f *testing.F) {
	f.Add("a")
	f.Fuzz(func(t *testing.T, s string) { if s != "a" { t.Errorf("it is %q", s) } })
}
func FuzzSeed(f *testing.F) {
	f.Add("a")
	f.Fuzz(func(t *testing.T, s string) { if s == "a" { t.Error("the seed is bad") } })
}
`,
	"none/none_test.go":     "package none\n",
	"broken/broken_test.go": "package broken\nimport \"testing\"\nfunc FuzzX(f *testing.F) { undefined() }\n",
}

func TestRun(t *testing.T) {
	for _, tt := range []struct {
		name     string
		packages string
		match    string
		failed   bool
		err      string
		want     []string
		not      string
	}{
		{
			name: "all pass", packages: "./good ./none",
			want: []string{"ok   example.org/m/good FuzzGood 1s, ", " inputs, ", "\n1 fuzz functions, 0 failed, in "}, not: "FAIL",
		},
		{
			name: "some fail", packages: "./good ./bad", failed: true,
			want: []string{
				"ok   example.org/m/good FuzzGood", "--- FAIL example.org/m/bad FuzzGrows", "it is ", "/bad/testdata/fuzz/FuzzGrows/",
				"once more: go test -run='^FuzzGrows$/^", "--- FAIL example.org/m/bad FuzzSeed", "the seed is bad", "\n3 fuzz functions, 2 failed, in ",
			},
		},
		{name: "one of them", packages: "./good ./bad", match: "^FuzzGood$", want: []string{"\n1 fuzz functions, 0 failed, in "}, not: "example.org/m/bad"},
		{name: "none", packages: "./none", err: "there is no fuzz function"},
		{name: "doesn't compile", packages: "./broken", err: "undefined: undefined"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, content := range sources {
				path := filepath.Join(dir, name)
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)); err != nil {
					t.Fatal(err)
				}
			}
			t.Chdir(dir)
			var out strings.Builder
			err := run(t.Context(), options{time: time.Second, match: regexp.MustCompile(tt.match), packages: strings.Fields(tt.packages), corpus: t.TempDir()}, &out)
			t.Log(out.String())
			if errors.Is(err, errFailed) != tt.failed || tt.err == "" && err != nil && !tt.failed || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Errorf("the error is %v, want %q, or failed functions: %t", err, tt.err, tt.failed)
			}
			for _, s := range tt.want {
				if !strings.Contains(out.String(), s) {
					t.Errorf("the output lacks %q", s)
				}
			}
			if tt.not != "" && strings.Contains(out.String(), tt.not) {
				t.Errorf("the output has %q", tt.not)
			}
		})
	}
}

func TestExpired(t *testing.T) {
	const up = "fuzz: elapsed: 10s, execs: 5 (1/sec), new interesting: 0 (total: 3)\n--- FAIL: FuzzX (10.01s)\n    context deadline exceeded\nFAIL\n"
	for text, want := range map[string]bool{
		up: true,
		strings.Replace(up, "FAIL\n", "    \n    Failing input written to testdata/fuzz/FuzzX/1\nFAIL\n", 1): false,
		strings.Replace(up, "context", "x_test.go:3: context", 1):                                            false,
		"--- FAIL: FuzzX (0s)\n    --- FAIL: FuzzX/seed#0 (0s)\n        context deadline exceeded\n":         false,
		"ok\n": false,
	} {
		if got := expired(text); got != want {
			t.Errorf("%t, want %t: %q", got, want, text)
		}
	}
}

func TestFind(t *testing.T) {
	all, err := find(t.Context(), options{packages: []string{"../../pkg/plan/...", "../../pkg/cniplugin/..."}})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"/pkg/plan FuzzEgressRefs", "/pkg/cniplugin FuzzToCNIError", "/pkg/cniplugin/unary FuzzAnswer"} {
		if !slices.ContainsFunc(all, func(f function) bool { return strings.HasSuffix(f.String(), want) }) {
			t.Errorf("%s isn't among %v", want, all)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := find(ctx, options{}); err == nil {
		t.Error("no error although go list was ended")
	}
}
