package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/testkit"
)

// The files are those that would be written, and there are no other dashboards.
func TestFiles(t *testing.T) {
	dir := filepath.Join("../..", folder)
	want := testkit.Must(written(dir))(t)
	for name, content := range want {
		have, err := os.ReadFile(filepath.Join(dir, name))
		if diff := cmp.Diff(string(content), string(have)); diff != "" || err != nil {
			t.Errorf("%s: %v; go run ./hack/monitoring writes it (-want +got):\n%s", name, err, diff)
		}
	}
	for _, path := range testkit.Must(filepath.Glob(filepath.Join(dir, "dashboards/*.json")))(t) {
		if _, ok := want["dashboards/"+filepath.Base(path)]; !ok {
			t.Errorf("no value of this package is %s", path)
		}
	}
}
