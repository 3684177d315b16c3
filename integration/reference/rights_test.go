package reference

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/coil-net/coil/pkg/testkit"
)

// head is what the page says before the tables.
//
//go:embed testdata/rights.md
var head string

// TestRights fails when the page isn't what the manifests say, or when one of them gives a right without a comment that
// says why.
func TestRights(t *testing.T) {
	var b strings.Builder
	b.WriteString(head)
	files := append(testkit.Must(filepath.Glob(filepath.Join(root, "manifests/rbac/*.yaml")))(t), filepath.Join(root, "manifests/services/rbac.yaml"), filepath.Join(root, "manifests/services/gateway-rbac.yaml"))
	found := 0
	for _, f := range files {
		for _, r := range roles(t, f) {
			fmt.Fprintf(&b, "\n## %s %s\n\n| resources | verbs | why |\n|---|---|---|\n", r.kind, r.name)
			for _, rule := range r.rules {
				found++
				if rule.why == "" {
					t.Errorf("%s, line %d: no comment says why %s has this right", f, rule.line, r.name)
				}
				fmt.Fprintf(&b, "| %s | %s | %s |\n", cell(rule.resources), rule.verbs, cell(rule.why))
			}
		}
	}
	if found == 0 {
		t.Error("no program has a right")
	}
	compare(t, "manifests/rbac/README.md", b.String())
}

// role is a Role or ClusterRole.
type role struct {
	kind, name string
	rules      []rule
}

// rule is a right, and the comment above it.
type rule struct {
	resources, verbs, why string
	line                  int
}

// roles returns the roles of a file.
func roles(t *testing.T, file string) (all []role) {
	t.Helper()
	decoder := yaml.NewDecoder(bytes.NewReader(testkit.Must(os.ReadFile(file))(t)))
	for {
		var doc struct {
			Kind     string
			Metadata struct{ Name string }
			Rules    []yaml.Node
		}
		err := decoder.Decode(&doc)
		if errors.Is(err, io.EOF) {
			return all
		}
		testkit.Check(t, err)
		if len(doc.Rules) == 0 {
			continue
		}
		r := role{doc.Kind, doc.Metadata.Name, nil}
		for _, node := range doc.Rules {
			var right struct {
				APIGroups     []string `yaml:"apiGroups"`
				Resources     []string
				ResourceNames []string `yaml:"resourceNames"`
				Verbs         []string
			}
			testkit.Check(t, node.Decode(&right))
			resources := "`" + strings.Join(right.Resources, "`, `") + "`"
			if group := strings.Join(right.APIGroups, ", "); group != "" {
				resources += " of " + group
			}
			if len(right.ResourceNames) > 0 {
				resources += ", only `" + strings.Join(right.ResourceNames, "`, `") + "`"
			}
			why := strings.Fields(strings.ReplaceAll(node.HeadComment, "#", " "))
			r.rules = append(r.rules, rule{resources, strings.Join(right.Verbs, ", "), strings.Join(why, " "), node.Line})
		}
		all = append(all, r)
	}
}
