package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// function is a fuzz function.
type function struct {
	pkg, name string
	// dir is the folder of the package, program the file of its tests.
	dir, program string
}

func (f function) String() string { return f.pkg + " " + f.name }

// find returns the fuzz functions of packages, sorted.
func find(ctx context.Context, o options) ([]function, error) {
	patterns := o.packages
	if len(patterns) == 0 {
		patterns = []string{"./..."}
	}
	out, err := goCommand(ctx, append([]string{"list", "-json=ImportPath,Dir,TestGoFiles,XTestGoFiles"}, patterns...)...).Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", withStderr(err))
	}
	var all []function
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			ImportPath, Dir           string
			TestGoFiles, XTestGoFiles []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		for _, file := range slices.Concat(p.TestGoFiles, p.XTestGoFiles) {
			names, err := namesIn(filepath.Join(p.Dir, file))
			if err != nil {
				return nil, err
			}
			for _, name := range names {
				if o.match == nil || o.match.MatchString(name) {
					all = append(all, function{pkg: p.ImportPath, dir: p.Dir, name: name})
				}
			}
		}
	}
	slices.SortFunc(all, func(a, b function) int { return cmp.Compare(a.String(), b.String()) })
	return all, nil
}

// namesIn returns the names of the fuzz functions in a file.
func namesIn(path string) ([]string, error) {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && isFuzz(f.Name.Name) {
			names = append(names, f.Name.Name)
		}
	}
	return names, nil
}

// isFuzz says whether a name is that of a fuzz function (go help testfunc).
func isFuzz(name string) bool {
	rest, ok := strings.CutPrefix(name, "Fuzz")
	first, _ := utf8.DecodeRuneInString(rest)
	return ok && (rest == "" || !unicode.IsLower(first))
}
