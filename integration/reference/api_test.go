// Package reference writes pages from definitions, manifests and sources: the reference of Coil's API,
// manifests/crd/README.md, the rights of its programs, manifests/rbac/README.md, and the list of packages in
// pkg/README.md. Its tests compare the pages.
//
// It reads files only. It must not know the purpose of a field or a right.
package reference

import (
	"encoding/json"
	"flag"
	"fmt"
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

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/coil-net/coil/pkg/testkit"
)

var update = flag.Bool("update", false, "write the pages")

const (
	root = "../.."

	// names and events begin the comments of constants that no kind of Coil's has.
	names  = "Names that Coil reads or writes"
	events = "Reasons of Events"
)

// TestAPI fails when the page isn't what the definitions and the sources say.
func TestAPI(t *testing.T) {
	groups := constants(t)
	var b strings.Builder
	b.WriteString("# API reference\n\n" +
		"Every kind of `coil.cybozu.com/v2`, written from the definitions of this folder and from the sources by\n" +
		"`go test ./integration/reference -update`. The API server makes all checks, when an object is written.\n")
	for _, crd := range definitions(t) {
		section(&b, crd, groups)
	}
	for _, part := range []struct{ heading, prefix string }{{"Names on objects of Kubernetes", names}, {"Events of coild about Egresses", events}} {
		fmt.Fprintf(&b, "\n## %s\n", part.heading)
		for _, title := range slices.Sorted(maps.Keys(groups)) {
			if strings.HasPrefix(title, part.prefix) {
				fmt.Fprintf(&b, "\n%s\n\n", title)
				table(&b, groups[title])
			}
		}
	}
	compare(t, "manifests/crd/README.md", b.String())
}

// compare fails when a page isn't what it should be, or writes it.
func compare(t *testing.T, page, want string) {
	t.Helper()
	path := filepath.Join(root, page)
	if *update {
		testkit.Check(t, os.WriteFile(path, []byte(want), 0o644))
		return
	}
	have, err := os.ReadFile(path)
	if d := cmp.Diff(want, string(have)); d != "" || err != nil {
		t.Errorf("%s: %v, go test ./integration/reference -update writes it (-want +got):\n%s", page, err, d)
	}
}

// definitions returns the kinds of manifests/crd.
func definitions(t *testing.T) (all []definition) {
	t.Helper()
	files := testkit.Must(filepath.Glob(filepath.Join(root, "manifests/crd/coil.*.yaml")))(t)
	for _, f := range files {
		var crd definition
		testkit.Check(t, yaml.Unmarshal(testkit.Must(os.ReadFile(f))(t), &crd))
		if len(crd.Spec.Versions) != 1 {
			t.Fatalf("%s has %d versions: there is no conversion", f, len(crd.Spec.Versions))
		}
		all = append(all, crd)
	}
	if len(all) == 0 {
		t.Fatal("there are no definitions")
	}
	return all
}

// section is what the page says of a kind.
func section(b *strings.Builder, crd definition, groups groups) {
	v, kind := crd.Spec.Versions[0], crd.Spec.Names.Kind
	whole := &v.Schema.OpenAPIV3Schema
	scope := map[string]string{"Cluster": "the cluster", "Namespaced": "a namespace"}[crd.Spec.Scope]
	fmt.Fprintf(b, "\n## %s\n\n%s Its scope is %s.\n\n| field | type | default | meaning |\n|---|---|---|---|\n", kind, plain(whole.Description), scope)
	object(b, "", whole)
	if checks := messages(whole); checks != "" {
		fmt.Fprintf(b, "\nOf the whole object is checked: %s.\n", checks)
	}
	b.WriteString("\n| column of `kubectl get` | field | meaning |\n|---|---|---|\n")
	for _, c := range v.Columns {
		meaning := cell(c.Description)
		if c.Priority > 0 {
			meaning = strings.TrimPrefix(meaning+"; with `-o wide`", "; ")
		}
		fmt.Fprintf(b, "| %s | %s | %s |\n", c.Name, code(c.JSONPath), meaning)
	}
	about := regexp.MustCompile(`\b` + kind + `(Failed|Complete)?\.$`)
	for _, title := range slices.Sorted(maps.Keys(groups)) {
		if about.MatchString(title) {
			fmt.Fprintf(b, "\n%s:\n\n", regexp.MustCompile(kind+`(\w+)\.$|\.$`).ReplaceAllString(title, "$1"))
			table(b, groups[title])
		}
	}
}

// others are parts of objects that Kubernetes describes.
var others = map[string]string{
	"spec.allowedNamespaces":     "[LabelSelector](https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/label-selector/)",
	"spec.strategy":              "[DeploymentStrategy](https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/deployment-v1/#DeploymentSpec)",
	"spec.sessionAffinityConfig": "[SessionAffinityConfig](https://kubernetes.io/docs/reference/kubernetes-api/service-resources/service-v1/#ServiceSpec)",
	"spec.template.spec":         "[PodSpec](https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#PodSpec)",
}

// condition is a metav1.Condition.
const condition = "[Condition](https://github.com/kubernetes/community/blob/master/contributors/devel/sig-architecture/api-conventions.md#typical-status-properties)"

// object writes a row for each field of an object and of the objects in it.
func object(b *strings.Builder, path string, of *schema) {
	var all []string
	for name := range of.Properties {
		if path != "" || name != "apiVersion" && name != "kind" && name != "metadata" {
			all = append(all, name)
		}
	}
	slices.Sort(all)
	for _, name := range all {
		p := of.Properties[name]
		full := strings.TrimPrefix(path+"."+name, ".")
		kind, inner := typeOf(&p)
		other, known := others[full]
		if inner != nil && inner.Properties["observedGeneration"].Type != "" && inner.Properties["reason"].Type != "" {
			other, known = "list of "+condition, true
		}
		if known {
			kind = other
		}
		if slices.Contains(of.Required, name) && p.Default == nil {
			kind += ", required"
		}
		value := ""
		if p.Default != nil {
			value = code(string(p.Default))
		}
		meaning := plain(p.Description)
		if checks := strings.Trim(bounds(&p)+"; "+messages(&p), "; "); checks != "" {
			meaning += " Checked: " + checks + "."
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s |\n", code(full), kind, value, strings.TrimSpace(cell(meaning)))
		if inner != nil && !known {
			if p.Type == "array" {
				full += "[]"
			}
			object(b, full, inner)
		}
	}
}

// typeOf returns the type of a field, and the object that it has or consists of.
func typeOf(p *schema) (string, *schema) {
	switch {
	case p.IntOrString:
		return "integer or string", nil
	case p.Type == "array":
		kind, inner := typeOf(p.Items)
		return "list of " + kind, inner
	case p.AdditionalProperties != nil:
		return "map of strings", nil
	case p.Type == "object":
		return "object", p
	case p.Format != "" && p.Type == "string":
		return p.Format, nil
	}
	return p.Type, nil
}

// bounds are the checks of a field that the schema has words for.
func bounds(p *schema) string {
	var all []string
	for _, bound := range []struct {
		text string
		n    *json.Number
	}{
		{"at least %s", p.Minimum}, {"at most %s", p.Maximum}, {"at least %s items", p.MinItems}, {"at most %s items", p.MaxItems},
		{"at least %s bytes", p.MinLength}, {"at most %s bytes", p.MaxLength},
	} {
		if bound.n != nil {
			all = append(all, fmt.Sprintf(bound.text, *bound.n))
		}
	}
	if len(p.Enum) > 0 {
		all = append(all, "one of `"+strings.Join(p.Enum, "`, `")+"`")
	}
	return strings.Join(all, ", ")
}

// messages are what the API server says when a rule of a field, or of its items, isn't met.
func messages(p *schema) string {
	rules := slices.Clone(p.Rules)
	if p.Items != nil {
		rules = append(rules, p.Items.Rules...)
	}
	var all []string
	for _, r := range rules {
		text := cell(r.Message)
		if field := strings.TrimPrefix(r.FieldPath, "."); field != "" && !strings.HasPrefix(text, field) {
			text = code(field) + " " + text
		}
		if r.Message != "" && !slices.Contains(all, text) { // a rule whose message is computed is told by its field
			all = append(all, text)
		}
	}
	return strings.Join(all, "; ")
}

// constant is a value of the API, or of Coil's words in it.
type constant struct{ name, value, doc string }

// groups are declarations of constants by their comment.
type groups map[string][]constant

// constants returns the groups of the API and of the packages that write conditions and Events.
func constants(t *testing.T) groups {
	t.Helper()
	all := groups{}
	fset := token.NewFileSet()
	testkit.Check(t, filepath.WalkDir(filepath.Join(root, "pkg"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		f, err := parser.ParseFile(fset, path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, decl := range f.Decls {
			g, ok := decl.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST || g.Doc == nil || !g.Lparen.IsValid() {
				continue
			}
			doc := strings.Join(strings.Fields(g.Doc.Text()), " ")
			for _, prefix := range []string{"Condition types of", "Reasons of", names} {
				if strings.HasPrefix(doc, prefix) {
					all[doc] = append(all[doc], values(g)...)
				}
			}
		}
		return nil
	}))
	var words []string
	for _, group := range all {
		for _, c := range group {
			words = append(words, c.name, code(c.value))
		}
	}
	for _, group := range all {
		for i, c := range group {
			group[i].doc = c.name + replaced(strings.TrimPrefix(c.doc, c.name), words)
		}
	}
	return all
}

// replaced is text with other words, which are in pairs.
func replaced(text string, words []string) string {
	for pair := range slices.Chunk(words, 2) {
		text = regexp.MustCompile(`\b`+pair[0]+`\b`).ReplaceAllLiteralString(text, pair[1])
	}
	return text
}

// values returns the constants of a declaration that are strings.
func values(g *ast.GenDecl) (all []constant) {
	for _, s := range g.Specs {
		v, ok := s.(*ast.ValueSpec)
		if !ok || len(v.Names) != 1 || len(v.Values) != 1 {
			continue
		}
		lit, ok := v.Values[0].(*ast.BasicLit)
		if !ok || lit.Kind != token.STRING {
			continue
		}
		value, _ := strconv.Unquote(lit.Value)
		all = append(all, constant{v.Names[0].Name, value, strings.Join(strings.Fields(v.Doc.Text()), " ")})
	}
	return all
}

// table writes a row for each constant. Words of the sources in comments become the values that users see.
func table(b *strings.Builder, all []constant) {
	b.WriteString("| value | meaning |\n|---|---|\n")
	for _, c := range all {
		doc := strings.TrimLeft(strings.TrimPrefix(c.doc, c.name), ":, ")
		fmt.Fprintf(b, "| %s | %s |\n", code(c.value), cell(doc))
	}
}

// code is text in the font of code, within a cell of a table.
func code(s string) string { return "`" + cell(s) + "`" }

// cell is text that doesn't end the cell of a table that it is in.
func cell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }

// plain is a description in one line. The first word of a field's is its name in Go.
func plain(description string) string { return strings.Join(strings.Fields(description), " ") }

// definition is what the page tells of a CustomResourceDefinition.
type definition struct {
	Spec struct {
		Scope    string
		Names    struct{ Kind string }
		Versions []struct {
			Schema  struct{ OpenAPIV3Schema schema }
			Columns []struct {
				Name, Description, JSONPath string
				Priority                    int
			} `json:"additionalPrinterColumns"`
		}
	}
}

// schema is the schema of a field, or of a whole object, as far as the page tells it.
type schema struct {
	Type, Format, Description string
	Properties                map[string]schema
	AdditionalProperties      *schema
	Items                     *schema
	Required                  []string
	Default                   json.RawMessage
	Enum                      []string
	Minimum, Maximum          *json.Number
	MinItems, MaxItems        *json.Number
	MinLength, MaxLength      *json.Number
	IntOrString               bool                                  `json:"x-kubernetes-int-or-string"`
	Rules                     []struct{ Message, FieldPath string } `json:"x-kubernetes-validations"`
}
