package coilctl

import (
	"bytes"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/plan/health"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/plan/selftest"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestPrintable(t *testing.T) {
	for text, want := range map[string]string{
		"": "", "eth0 via 10.0.0.1 · ▇ ü日": "eth0 via 10.0.0.1 · ▇ ü日", `a\b`: `a\b`, "\x1b[2J": `\x1b[2J`, "a\nok  b\tc\r": `a\nok  b\tc\r`, "\u009b2J\x7f": `\u009b2J\x7f`,
		"a\x9b2J\xff": `a\x9b2J\xff`, "\u202egnp": `\u202egnp`, "\ufffd": "\ufffd", "a\u00a0b": `a\u00a0b`,
	} {
		if got := printable(text); got != want {
			t.Errorf("%q is printed as %s, want %s", text, got, want)
		}
	}
}

func TestPrintf(t *testing.T) {
	type state string
	var out bytes.Buffer
	err := printf(&out, "\x1b[1m%s\x1b[0m %-6s| %v %v %v %d\n%s", own("\x1b[32mok"), "\a", errors.New("\x1b"), state("\x1b"), metav1.Duration{Duration: time.Second}.Duration, 3, eachLine("a\x1b\nb\x1b\n"))
	const want = "\x1b[1m\x1b[32mok\x1b[0m \\a    | \\x1b \\x1b 1s 3\na\\x1b\nb\\x1b\n"
	if err != nil || out.String() != want {
		t.Errorf("%v, it prints %q, want %q", err, out.String(), want)
	}
}

// What others have written doesn't reach the terminal as it is, and makes no line of its own: neither in walks, in the findings of status, in tables, nor in errors.
func TestPrintsOthersEscaped(t *testing.T) {
	const evil, want = "x\x1b[2J\nok", `x\x1b[2J\nok`
	o, out := newWhy()
	o.IOStreams.ErrOut = out
	o.colour = colourAlways
	testkit.Check(t,
		o.show(diagnosis.Diagnosis{Subject: evil, Steps: []diagnosis.Step{{Step: "guard", State: diagnosis.Wrong, Seen: evil, Do: evil}}}),
		(&statusOptions{tool: o.tool}).show(health.Overview{Findings: []health.Finding{{Kind: "Node", Name: "n1", Reason: evil, Message: evil}}}, time.Now()),
		o.print(nil, []string{"NAME", "ATTENTION"}, [][]string{{"a", evil}}),
		o.showPath(diagnosis.Path{Subject: evil, Hops: []diagnosis.PathHop{{Where: evil, Hop: inspection.Hop{Links: []string{evil}}, Note: evil}}, Unknown: []string{evil}, Sources: []string{evil}}),
	)
	(&tester{selftestOptions: &selftestOptions{tool: o.tool}}).say(t.Context(), selftest.Check{Check: selftest.CheckPods, State: selftest.Skipped, Seen: evil, Found: []string{evil}, Do: evil})
	(&mover{drainOptions: &drainOptions{tool: o.tool}}).say("Pod %s", evil)
	text := out.String()
	if n := strings.Count(text, want); n != 16 || strings.Contains(text, "\x1b[2J") || strings.Contains(text, "\nok") {
		t.Errorf("%d texts of others are escaped in %q", n, text)
	}
	if !strings.Contains(text, "\x1b[31;1mWRONG\x1b[0m  guard") {
		t.Errorf("its own colours are missing in %q", text)
	}

	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		_, _ = w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,"message":"no\u001b[2J right"}`))
	}))
	defer api.Close()
	t.Setenv("KUBECONFIG", filepath.Join(t.TempDir(), "none"))
	if code, _, errOut := run("", "pools", "--server="+api.URL); code != 1 || errOut != "error: list addresspools: no\\x1b[2J right\n" {
		t.Errorf("exit code %d, %q", code, errOut)
	}
}

// Only print.go writes formatted text, so that no other place can forget to make it printable.
func TestPrinter(t *testing.T) {
	files := token.NewFileSet()
	names := testkit.Must(filepath.Glob("*.go"))(t)
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") || name == "print.go" {
			continue
		}
		ast.Inspect(testkit.Must(parser.ParseFile(files, name, nil, 0))(t), func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok {
				if p, ok := s.X.(*ast.Ident); ok && p.Name == "fmt" && (strings.HasPrefix(s.Sel.Name, "Fprint") || strings.HasPrefix(s.Sel.Name, "Print")) {
					t.Errorf("%s: use printf in place of fmt.%s", files.Position(s.Pos()), s.Sel.Name)
				}
			}
			return true
		})
	}
	if len(names) < 30 {
		t.Errorf("there are only %q", names)
	}
}
