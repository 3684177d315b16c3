package arch

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/token"
	"slices"
	"strconv"
	"strings"
)

// rule forbids a call, or any use, of names of a package.
type rule struct {
	library string
	names   []string // empty: all; a star at the end is any rest
	allowed []string // prefixes of the packages that may
	why     string
}

// calls is what product code doesn't call.
var calls = []rule{
	// keepalived ends, or drops all addresses, when it reads a file that it doesn't take, and only "keepalived -t" knows.
	{"os/exec", nil, []string{"pkg/keepalived/"}, "product code starts no programs, save keepalived -t"},
	{"time", []string{"Sleep"}, nil, "wait for a condition, a timer or the context"},
	{"k8s.io/client-go/tools/cache", []string{"WaitForCacheSync", "WaitForNamedCacheSync*"}, nil, "they look ten times a second: cache.WaitFor is told"},
	{"os", []string{"Exit"}, []string{"cmd/", "pkg/app/"}, "return an error"},
	{"log", []string{"Fatal*", "Panic*"}, nil, "return an error"},
	{"k8s.io/klog/v2", []string{"Fatal*", "Exit*"}, []string{"pkg/app/"}, "return an error"},
	{"context", []string{"Background", "TODO"}, []string{"cmd/", "pkg/app/"}, "take the context of the caller, or context.WithoutCancel of it to undo"},
}

// callProblems returns what a file of product code calls that it must not.
func callProblems(fset *token.FileSet, path string, file *ast.File) []string {
	var out []string
	imports := importNames(file)
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			if id, ok := n.Fun.(*ast.Ident); ok && id.Name == "panic" {
				out = append(out, fmt.Sprintf("%s: panic: return an error that names the broken invariant", fset.Position(n.Pos())))
			}
			if matchesErrorText(n, imports) {
				out = append(out, fmt.Sprintf("%s: the text of an error is compared: use errors.Is or errors.As", fset.Position(n.Pos())))
			}
		case *ast.SelectorExpr:
			id, ok := n.X.(*ast.Ident)
			if !ok {
				return true
			}
			for _, r := range calls {
				if imports[id.Name] == r.library && r.forbids(n.Sel.Name) &&
					!slices.ContainsFunc(r.allowed, func(prefix string) bool { return below(path, prefix) }) {
					out = append(out, fmt.Sprintf("%s: %s.%s: %s", fset.Position(n.Pos()), id.Name, n.Sel.Name, r.why))
				}
			}
		}
		return true
	})
	return out
}

func (r rule) forbids(name string) bool {
	if len(r.names) == 0 {
		return true
	}
	return slices.ContainsFunc(r.names, func(pattern string) bool {
		prefix, any := strings.CutSuffix(pattern, "*")
		return name == pattern || any && strings.HasPrefix(name, prefix)
	})
}

// importNames maps the names by which a file knows its imports to their paths.
func importNames(file *ast.File) map[string]string {
	names := map[string]string{}
	for _, imp := range file.Imports {
		path, err := strconv.Unquote(imp.Path.Value)
		if err != nil {
			continue // the compiler complains
		}
		name := path[strings.LastIndex(path, "/")+1:]
		if path == "k8s.io/klog/v2" {
			name = "klog"
		}
		if imp.Name != nil {
			name = imp.Name.Name
		}
		names[name] = path
	}
	return names
}

// matchesErrorText reports whether a call of package strings has an argument
// x.Error().
func matchesErrorText(call *ast.CallExpr, imports map[string]string) bool {
	fun, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	if id, ok := fun.X.(*ast.Ident); !ok || imports[id.Name] != "strings" {
		return false
	}
	if !slices.Contains([]string{"Contains", "HasPrefix", "HasSuffix", "EqualFold", "Index"}, fun.Sel.Name) {
		return false
	}
	return slices.ContainsFunc(call.Args, func(arg ast.Expr) bool {
		c, ok := arg.(*ast.CallExpr)
		if !ok || len(c.Args) != 0 {
			return false
		}
		sel, ok := c.Fun.(*ast.SelectorExpr)
		return ok && sel.Sel.Name == "Error"
	})
}

// docProblems returns the exported names of a file that have no doc comment, or
// one that doesn't begin with the name.
func docProblems(fset *token.FileSet, file *ast.File) []string {
	var out []string
	check := func(name *ast.Ident, own, group *ast.CommentGroup) {
		switch {
		case !name.IsExported():
		case own == nil && group == nil:
			out = append(out, fmt.Sprintf("%s: %s has no doc comment", fset.Position(name.Pos()), name.Name))
		case own != nil && !begins(own.Text(), name.Name):
			out = append(out, fmt.Sprintf("%s: the doc comment of %s doesn't begin with it", fset.Position(name.Pos()), name.Name))
		}
	}
	for _, decl := range file.Decls {
		switch d := decl.(type) {
		case *ast.FuncDecl:
			if exportedReceiver(d) && !wellKnown(d) {
				check(d.Name, d.Doc, nil)
			}
		case *ast.GenDecl:
			// The comment of a declaration in parentheses is about all of it.
			own, group := d.Doc, (*ast.CommentGroup)(nil)
			if d.Lparen.IsValid() {
				own, group = nil, d.Doc
			}
			for _, spec := range d.Specs {
				switch s := spec.(type) {
				case *ast.TypeSpec:
					check(s.Name, cmp.Or(s.Doc, own), group)
				case *ast.ValueSpec:
					for i, name := range s.Names {
						if i > 0 { // the comment is about the first
							check(name, nil, cmp.Or(s.Doc, own, s.Comment, group))
							continue
						}
						check(name, cmp.Or(s.Doc, own), cmp.Or(s.Comment, group))
					}
				}
			}
		}
	}
	return out
}

// begins reports whether a doc comment begins with a name, with or without an
// article before it.
func begins(doc, name string) bool {
	words := append(strings.Fields(doc), "", "")
	is := func(word string) bool { return strings.TrimRight(word, ":,.'s") == strings.TrimRight(name, "s") }
	return is(words[0]) || slices.Contains([]string{"A", "An", "The"}, words[0]) && is(words[1])
}

// wellKnown reports whether a method is one that the standard library defines,
// so that there is nothing to say about it.
func wellKnown(d *ast.FuncDecl) bool {
	return d.Recv != nil && slices.Contains([]string{"Error", "Unwrap", "String"}, d.Name.Name)
}

// exportedReceiver reports whether a function is no method, or one of an
// exported type.
func exportedReceiver(d *ast.FuncDecl) bool {
	if d.Recv == nil {
		return true
	}
	typ := d.Recv.List[0].Type
	for {
		switch t := typ.(type) {
		case *ast.StarExpr:
			typ = t.X
		case *ast.IndexExpr:
			typ = t.X
		case *ast.IndexListExpr:
			typ = t.X
		case *ast.Ident:
			return t.IsExported()
		default:
			return false
		}
	}
}
