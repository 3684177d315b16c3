package apiserver

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// example is an object that a page shows.
type example struct {
	page, text      string
	metav1.TypeMeta `json:",inline"`
	Metadata        metav1.ObjectMeta `json:"metadata"`
}

// block is a fenced block of a page with YAML, or with a command that reads some.
var block = regexp.MustCompile("(?ms)^( *)```(yaml|console)\n(.*?)^ *```$")

// heredoc is the text that a command reads.
var heredoc = regexp.MustCompile(`(?ms)<<'EOF'\n(.*?)^EOF$`)

// examples returns the objects that the project's pages show as a whole.
func examples(t *testing.T) (all []example) {
	t.Helper()
	root := testkit.Must(build.Root())(t)
	testkit.Check(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".md" {
			return err
		}
		page, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, m := range block.FindAllStringSubmatch(string(page), -1) {
			text := regexp.MustCompile("(?m)^"+m[1]).ReplaceAllString(m[3], "")
			if m[2] == "console" {
				read := heredoc.FindStringSubmatch(text)
				if read == nil {
					continue
				}
				text = read[1]
			}
			for _, object := range strings.Split(text, "\n---\n") {
				e := example{page: strings.TrimPrefix(path, root+"/"), text: object}
				if err := yaml.Unmarshal([]byte(object), &e); err == nil && e.APIVersion != "" && e.Kind != "" {
					all = append(all, e)
				}
			}
		}
		return nil
	}))
	return all
}

// The API server accepts the objects that pages show. It also accepts those of the demo that need a kernel with tunnels.
func TestExamplesAreValid(t *testing.T) {
	api := own(t, controlplane.Options{})
	testkit.Check(t, installCRDs(t.Context(), api.RESTConfig(), readCRDs))
	core := testkit.Must(kubernetes.NewForConfig(api.RESTConfig()))(t)
	seen := map[string]int{}
	dir, pages := t.TempDir(), ""
	args := []string{"create", "--dry-run=server", "--validate=strict"}
	for i, e := range examples(t) {
		if !strings.HasPrefix(e.APIVersion, "coil.cybozu.com/") && e.Kind != "Service" {
			continue
		}
		seen[e.Kind]++
		if ns := e.Metadata.Namespace; ns != "" {
			_, err := core.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, metav1.CreateOptions{})
			if err != nil && !apierrors.IsAlreadyExists(err) {
				t.Fatal(err)
			}
		}
		file := filepath.Join(dir, fmt.Sprint(i, ".yaml"))
		testkit.Check(t, os.WriteFile(file, []byte(e.text), 0o644))
		args = append(args, "--filename="+file)
		pages += fmt.Sprintf("%s is of %s:\n%s\n", file, e.page, e.text)
	}
	// One kubectl for all of them reads the schemas once, and goes on after a file with an error.
	out, err := api.Kubectl(t.Context(), args...)
	if n := strings.Count(string(out), "created (server dry run)"); err != nil || n != len(args)-3 {
		t.Errorf("%d of %d examples are accepted: %v\n%s", n, len(args)-3, err, pages)
	}
	for _, kind := range []string{"AddressPool", "Egress", "EgressPolicy", "EgressClusterPolicy", "Service"} {
		if seen[kind] == 0 {
			t.Errorf("no page shows an object of kind %s", kind)
		}
	}
	for _, file := range []string{"pools.yaml", "egress.yaml"} {
		if out, err := api.Kubectl(t.Context(), "apply", "--validate=strict", "-f", "../demo/"+file); err != nil {
			t.Errorf("%s: %v: %s", file, err, out)
		}
	}
}
