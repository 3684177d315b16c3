package reference

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/testkit"
)

// A user who reads the reason of an Event, or the type or the reason of a condition, finds it in a page of a program.
func TestReasons(t *testing.T) {
	var pages strings.Builder
	for _, page := range testkit.Must(filepath.Glob(filepath.Join(root, "cmd/*/*.md")))(t) {
		pages.Write(testkit.Must(os.ReadFile(page))(t))
	}
	words := wordsOfStatus(t)
	for _, known := range []string{"RepeatedlyDestroyed", "NoHolder", "PoolExhausted", "EgressNotAllowed", "ForwardingBlocked", "Served", "Exhausted", "StandbyInStep"} {
		if words[known] == "" {
			t.Errorf("%s wasn't found in the sources", known)
		}
	}
	for _, word := range slices.Sorted(maps.Keys(words)) {
		if !strings.Contains(pages.String(), "`"+word+"`") {
			t.Errorf("no page has %s (%s)", word, words[word])
		}
	}
}

var (
	// camelCase is how Kubernetes has reasons and types of conditions.
	camelCase = regexp.MustCompile(`^[A-Z][A-Za-z]+$`)
	// reasonName is the name of a constant with a reason. Others are found where they are used.
	reasonName = regexp.MustCompile(`^[rR]eason[A-Z]`)
)

// reasonOfEvent is which argument of Eventf is the reason; see package k8s.io/client-go/tools/events.
const reasonOfEvent = 3

// wordsOfStatus returns reasons of Events, and types and reasons of conditions, with the place of each.
func wordsOfStatus(t *testing.T) map[string]string {
	t.Helper()
	files := token.NewFileSet()
	constants, used, places := map[string]string{}, map[string]token.Pos{}, map[string]string{}
	use := func(e ast.Expr) {
		switch e := e.(type) {
		case *ast.BasicLit:
			if text, err := strconv.Unquote(e.Value); err == nil && camelCase.MatchString(text) {
				places[text] = files.Position(e.Pos()).String()
			}
		case *ast.Ident:
			used[e.Name] = e.Pos()
		case *ast.SelectorExpr:
			used[e.Sel.Name] = e.Pos()
		}
	}
	testkit.Check(t, filepath.WalkDir(filepath.Join(root, "pkg"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GenDecl:
				if n.Tok == token.CONST {
					collect(n, constants, use)
				}
			case *ast.CallExpr:
				switch name := typeName(n.Fun); {
				case name == "Eventf" && len(n.Args) > reasonOfEvent:
					use(n.Args[reasonOfEvent])
				case name == "warn":
					for _, arg := range n.Args {
						use(arg)
					}
				}
			case *ast.CompositeLit:
				if typeName(n.Type) == "Condition" {
					for _, e := range n.Elts {
						if kv, ok := e.(*ast.KeyValueExpr); ok && (typeName(kv.Key) == "Type" || typeName(kv.Key) == "Reason") {
							use(kv.Value)
						}
					}
				}
			}
			return true
		})
		return nil
	}))
	for name, pos := range used {
		if text := constants[name]; camelCase.MatchString(text) {
			places[text] = files.Position(pos).String()
		}
	}
	return places
}

// collect adds constants with texts, and uses those that are reasons by their names.
func collect(decl *ast.GenDecl, constants map[string]string, use func(ast.Expr)) {
	for _, spec := range decl.Specs {
		v := spec.(*ast.ValueSpec)
		for i, name := range v.Names {
			if i >= len(v.Values) {
				continue
			}
			if lit, ok := v.Values[i].(*ast.BasicLit); ok && lit.Kind == token.STRING {
				constants[name.Name], _ = strconv.Unquote(lit.Value)
			}
			if reasonName.MatchString(name.Name) {
				use(v.Values[i])
			}
		}
	}
}

// typeName is the last part of a name.
func typeName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}
