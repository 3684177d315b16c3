package ruleset_test

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/testkit"
)

var update = flag.Bool("update", false, "write the rules into README.md")

// rules are between two comments of the page, the first of which names their file.
var rules = regexp.MustCompile(`(?s)<!-- rules: (\S+) -->\n.*?<!-- end -->`)

// The page has the rules that the tests of kernel/nft compare with the kernel.
func TestPage(t *testing.T) {
	const page = "README.md"
	have := string(testkit.Must(os.ReadFile(page))(t))
	found := 0
	want := rules.ReplaceAllStringFunc(have, func(part string) string {
		found++
		name := rules.FindStringSubmatch(part)[1]
		text := testkit.Must(os.ReadFile(filepath.Join("..", "..", "kernel", "nft", "testdata", name)))(t)
		return "<!-- rules: " + name + " -->\n```nft\n" + string(text) + "```\n<!-- end -->"
	})
	if found != 4 {
		t.Errorf("the page has the rules of %d tables", found)
	}
	if *update {
		testkit.Check(t, os.WriteFile(page, []byte(want), 0o644))
		return
	}
	if d := cmp.Diff(want, have); d != "" {
		t.Errorf("%s (-want +got), go test -update writes it:\n%s", page, d)
	}
}
