package migrator

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/coil-net/coil/pkg/testkit"
)

// The place of the YAML is judged before anything is changed.
func TestDumpChecksOutput(t *testing.T) {
	dir := t.TempDir()
	if err := (&dump{Output: filepath.Join(dir, "none", "coil.yaml")}).check(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a folder that doesn't exist: error %v", err)
	}
	testkit.Check(t, (&dump{}).check(), (&dump{Output: filepath.Join(dir, "coil.yaml")}).check())
	if left := testkit.Must(os.ReadDir(dir))(t); len(left) > 0 {
		t.Errorf("%s is left", left[0].Name())
	}
}
