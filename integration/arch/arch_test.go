package arch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// packages returns the packages of the module.
func packages(t *testing.T) []pkg {
	t.Helper()
	// -e: a package that doesn't compile is the compiler's to report.
	cmd := exec.CommandContext(t.Context(), "go", "list", "-e",
		"-json=ImportPath,Dir,Name,GoFiles,TestGoFiles,XTestGoFiles,Imports,Deps", "./...")
	cmd.Dir = filepath.Join("..", "..")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.Bytes())
	}
	var all []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if !slices.ContainsFunc(all, func(p pkg) bool { return p.path() == "pkg/apis/coil/v2" }) {
		t.Fatalf("go list found %d packages, but not the API", len(all))
	}
	return all
}

// parse returns the files of a package; those that don't parse are the
// compiler's to report.
func parse(fset *token.FileSet, p pkg, names []string) []*ast.File {
	var files []*ast.File
	for _, name := range names {
		if f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.ParseComments|parser.SkipObjectResolution); err == nil {
			files = append(files, f)
		}
	}
	return files
}

func TestImports(t *testing.T) {
	for _, p := range packages(t) {
		for _, problem := range importProblems(p) {
			t.Error(problem)
		}
	}
}

func TestLinks(t *testing.T) {
	for _, p := range packages(t) {
		for _, problem := range linkProblems(p) {
			t.Error(problem)
		}
	}
}

func TestCalls(t *testing.T) {
	fset := token.NewFileSet()
	for _, p := range packages(t) {
		if !product(p.path()) || generated(p.path()) {
			continue
		}
		for _, f := range parse(fset, p, p.GoFiles) {
			for _, problem := range callProblems(fset, p.path(), f) {
				t.Error(problem)
			}
		}
	}
}

func TestEveryPackageHasOneComment(t *testing.T) {
	fset := token.NewFileSet()
	for _, p := range packages(t) {
		if generated(p.path()) {
			continue
		}
		names := p.GoFiles
		if len(names) == 0 {
			names = append(p.TestGoFiles, p.XTestGoFiles...)
		}
		var with []string
		for _, f := range parse(fset, p, names) {
			if f.Doc != nil {
				with = append(with, filepath.Base(fset.File(f.Pos()).Name()))
			}
		}
		if len(with) != 1 {
			t.Errorf("%s has %d package comments, not one: %q", p.path(), len(with), with)
		}
	}
}

func TestExportedNamesHaveComments(t *testing.T) {
	fset := token.NewFileSet()
	for _, p := range packages(t) {
		if generated(p.path()) {
			continue
		}
		for _, f := range parse(fset, p, p.GoFiles) {
			if ast.IsGenerated(f) {
				continue
			}
			for _, problem := range docProblems(fset, f) {
				t.Error(problem)
			}
		}
	}
}

func TestRulesOnImports(t *testing.T) {
	for _, tt := range []struct {
		from, imp string
		ok        bool
	}{
		{"pkg/plan", "pkg/ipam", true},
		{"pkg/plan/client", "pkg/plan/plantest", false},
		{"pkg/plan", "pkg/reconcile", false},
		{"pkg/plan", "net/netip", true},
		{"pkg/plan", "net", false},
		{"pkg/plan", "os", false},
		{"pkg/plan", "k8s.io/api/core/v1", true},
		{"pkg/plan", "k8s.io/client-go/kubernetes", false},
		{"pkg/apis/coil/v2", "pkg/ipam", false},
		{"pkg/apis/coil/v2", "generated/clientset/versioned", false},
		{"generated/listers/coil/v2", "pkg/apis/coil/v2", true},
		{"pkg/kernel/route", "pkg/kernel/rtnl", true},
		{"pkg/kernel/route", "pkg/dataplane", true},
		{"pkg/kernel/route", "pkg/kube", false},
		{"pkg/kernel/sysctl", "pkg/atomicfile", true},
		{"pkg/keepalived", "pkg/atomicfile", true},
		{"pkg/keepalived", "pkg/kernel/rtnl", false},
		{"pkg/keepalived", "pkg/kube", false},
		{"pkg/kernel/rtnl", "github.com/vishvananda/netlink", true},
		{"pkg/kernel/route", "github.com/vishvananda/netlink", false},
		{"pkg/podnet", "github.com/vishvananda/netlink/nl", false},
		{"integration/lab", "github.com/vishvananda/netlink", true},
		{"pkg/openstack", "github.com/gophercloud/gophercloud/v2/openstack", true},
		{"pkg/controller/loadbalancer", "github.com/gophercloud/gophercloud/v2", false},
		{"pkg/controller/loadbalancer", "pkg/openstack", true},
		{"pkg/openstack", "pkg/controller/loadbalancer", false},
		{"pkg/store/sqlite", "modernc.org/sqlite", true},
		{"pkg/store/sqlite", "pkg/store", true},
		{"pkg/store", "pkg/store/sqlite", false},
		{"pkg/store", "modernc.org/sqlite", false},
		{"pkg/controller/pool", "pkg/reconcile", true},
		{"pkg/controller/pool", "pkg/controller/blockgc", false},
		{"pkg/controller/pool/internal", "pkg/controller/pool", true},
		{"pkg/controller/pool", "pkg/node/assign", false},
		{"pkg/node/assign", "pkg/node", true},
		{"pkg/node/assign", "pkg/node/server", false},
		{"pkg/node/assign", "pkg/podnet", true},
		{"pkg/node/floating/handover", "pkg/node/floating/tables", true},
		{"pkg/node/floating/handover", "pkg/node/floating/standby", false},
		{"pkg/node/floating/standby", "pkg/node/floating/handover", false},
		{"pkg/podnet", "pkg/node", false},
		{"pkg/cniplugin", "pkg/node/server", false},
		{"pkg/kube", "pkg/app/coild", false},
		{"pkg/app/coild", "pkg/node/server", true},
		{"cmd/coild", "pkg/app/coild", true},
		{"cmd/coild", "pkg/node/server", false},
		{"pkg/app/coild", "pkg/testkit", false},
		{"pkg/app/coild", "integration/lab", false},
		{"pkg/new", "fmt", false},
	} {
		imp := tt.imp
		if place(imp) != unplaced {
			imp = module + imp
		}
		problems := importProblems(pkg{ImportPath: module + tt.from, Imports: []string{imp}})
		if (len(problems) == 0) != tt.ok {
			t.Errorf("%s imports %s: problems %q, may it: %t", tt.from, tt.imp, problems, tt.ok)
		}
	}
}

func TestRulesOnLinks(t *testing.T) {
	for _, tt := range []struct {
		path, dep string
		ok        bool
	}{
		{"cmd/coil", "google.golang.org/grpc", true},
		{"cmd/coil", "k8s.io/client-go/rest", false},
		{"cmd/coil", "modernc.org/sqlite/lib", false},
		{"cmd/coil-ipam-controller", "k8s.io/client-go/rest", true},
		{"cmd/coil-ipam-controller", module + "pkg/kernel/route", false},
		{"pkg/controller/pool", module + "pkg/store/sqlite", false},
		{"pkg/controller/pool", module + "pkg/store", true},
		{"cmd/coild", module + "pkg/store/sqlite", true},
		{"cmd/coild", "testing", false},
		{"pkg/openstack", "k8s.io/api/core/v1", false},
		{"pkg/openstack", module + "pkg/apis/coil/v2", false},
		{"cmd/coild", "k8s.io/client-go/kubernetes/scheme", false},
		{"cmd/coild", "k8s.io/client-go/rest", true},
		{"cmd/coil-egress", "k8s.io/api/rbac/v1", false},
		{"cmd/coil-egress", "k8s.io/api/discovery/v1", true},
		{"cmd/coil-egress-controller", "k8s.io/api/rbac/v1", true},
	} {
		problems := linkProblems(pkg{ImportPath: module + tt.path, Deps: []string{tt.dep}})
		if (len(problems) == 0) != tt.ok {
			t.Errorf("%s links %s: problems %q, may it: %t", tt.path, tt.dep, problems, tt.ok)
		}
	}
}

func TestRulesOnSources(t *testing.T) {
	for _, tt := range []struct {
		path, imports, stmt string
		problems            int
	}{
		{"pkg/plan", `"time"`, "time.Sleep(1)", 1},
		{"pkg/plan", `clock "time"`, "clock.Sleep(1)", 1},
		{"pkg/plan", `"time"`, "time.Now()", 0},
		{"pkg/app/coild", `"os/exec"`, `exec.Command("ip")`, 1},
		{"pkg/keepalived", `"os/exec"`, `exec.Command("keepalived")`, 0},
		{"pkg/app/coild", `"os"`, "os.Exit(1)", 0},
		{"pkg/node/server", `"os"`, "os.Exit(1)", 1},
		{"pkg/node/server", `"k8s.io/klog/v2"`, "klog.Fatalf(``)", 1},
		{"pkg/node/server", `"log"`, "log.Fatalln()", 1},
		{"pkg/node/server", `"context"`, "context.TODO()", 1},
		{"pkg/node/server", `"context"`, "context.WithoutCancel(nil)", 0},
		{"cmd/coild", `"context"`, "context.Background()", 0},
		{"pkg/node/server", `"fmt"`, "panic(fmt.Sprint())", 1},
		{"pkg/node/server", `"strings"`, "strings.Contains(err.Error(), ``)", 1},
		{"pkg/node/server", `"strings"`, "strings.Contains(err.Text, ``)", 0},
	} {
		fset := token.NewFileSet()
		src := fmt.Sprintf("package x\nimport %s\nfunc f() { %s }", tt.imports, tt.stmt)
		f, err := parser.ParseFile(fset, "x.go", src, 0)
		if err != nil {
			t.Fatal(err)
		}
		if got := callProblems(fset, tt.path, f); len(got) != tt.problems {
			t.Errorf("%s in %s: problems %q, want %d", tt.stmt, tt.path, got, tt.problems)
		}
	}
}

func TestRulesOnComments(t *testing.T) {
	for src, want := range map[string]int{
		"func F() {}":                                     1,
		"// F does.\nfunc F() {}":                         0,
		"// Does.\nfunc F() {}":                           1,
		"// F: does.\nfunc F() {}":                        0,
		"// An F does.\ntype F int":                       0,
		"// Fs do.\ntype F int":                           0,
		"// Words.\nconst (\n\t// A is.\n\tA = 1\n)":      0,
		"// Words.\nconst (\n\t// That is.\n\tA = 1\n)":   1,
		"func f() {}":                                     0,
		"type t int\nfunc (t) F() {}":                     0,
		"// T is.\ntype T int\nfunc (*T) F() {}":          1,
		"// T is.\ntype T int\nfunc (T) String()":         0,
		"// T is.\ntype T[A any] int\nfunc (t *T[A]) F()": 1,
		"const (\n\tA = 1\n\tB = 2 // B is.\n)":           1,
		"// A and B are.\nconst (\n\tA = 1\n\tB = 2\n)":   0,
	} {
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, "x.go", "package x\n"+src, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		if got := docProblems(fset, f); len(got) != want {
			t.Errorf("%q: problems %q, want %d", src, got, want)
		}
	}
}
