package reference

import (
	"fmt"
	"go/doc"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/testkit"
)

// packages begins the part of pkg/README.md that is written from the comments of packages.
const packages = "## Packages\n"

// TestPackages fails when the page of the design doesn't list exactly the packages that there are, each with the first
// sentence of its comment.
func TestPackages(t *testing.T) {
	const page = "pkg/README.md"
	text, _, _ := strings.Cut(string(testkit.Must(os.ReadFile(filepath.Join(root, page)))(t)), packages)
	var b strings.Builder
	b.WriteString(text + packages + "\n`go test ./integration/reference -update` writes this list from the comments of the packages.\n\n" +
		"| package | |\n|---|---|\n")
	for _, dir := range folders(t, "pkg") {
		if said := synopsis(t, dir); said != "" {
			fmt.Fprintf(&b, "| [%[1]s](%[1]s) | %[2]s |\n", strings.TrimPrefix(dir, "pkg/"), said)
		}
	}
	compare(t, page, b.String())
}

// folders returns the folders below one, sorted, without those of test data.
func folders(t *testing.T, below string) (all []string) {
	t.Helper()
	testkit.Check(t, filepath.WalkDir(filepath.Join(root, below), func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return err
		}
		if e.Name() == "testdata" {
			return filepath.SkipDir
		}
		dir, err := filepath.Rel(root, path)
		all = append(all, filepath.ToSlash(dir))
		return err
	}))
	slices.Sort(all)
	return all
}

// synopsis returns the first sentence of a package's comment without the name of the package, or "" for a folder without
// sources. A package without a comment fails the test.
func synopsis(t *testing.T, dir string) string {
	t.Helper()
	sources := slices.DeleteFunc(testkit.Must(filepath.Glob(filepath.Join(root, dir, "*.go")))(t), func(f string) bool {
		return strings.HasSuffix(f, "_test.go")
	})
	for _, f := range sources {
		parsed := testkit.Must(parser.ParseFile(token.NewFileSet(), f, nil, parser.PackageClauseOnly|parser.ParseComments))(t)
		if parsed.Doc == nil {
			continue
		}
		said, ok := strings.CutPrefix(new(doc.Package).Synopsis(parsed.Doc.Text()), "Package "+parsed.Name.Name+" ")
		if !ok {
			t.Errorf("the comment of %s begins without the words Package %s", dir, parsed.Name.Name)
		}
		return strings.ReplaceAll(said, "|", "\\|")
	}
	if len(sources) > 0 {
		t.Errorf("package %s has no comment", dir)
	}
	return ""
}
