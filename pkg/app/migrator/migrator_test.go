package migrator

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
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

// stderr returns what Main writes there, and its exit code.
func stderr(t *testing.T, args ...string) (string, int) {
	t.Helper()
	file := testkit.Must(os.CreateTemp(t.TempDir(), ""))(t)
	old := os.Stderr
	os.Stderr = file
	defer func() { os.Stderr = old }()
	code := Main(args)
	testkit.Check(t, file.Close())
	return string(testkit.Must(os.ReadFile(file.Name()))(t)), code
}

func TestUsage(t *testing.T) {
	for _, tt := range []struct {
		args []string
		code int
		says []string // beginnings of lines
	}{
		{nil, 2, []string{"coil-migrator moves"}},
		{[]string{"--help"}, 0, []string{"coil-migrator moves"}},
		{[]string{"foo"}, 2, []string{`coil-migrator: unknown command "foo"`, "coil-migrator moves"}},
		{[]string{"--namespace=x", "replace"}, 2, []string{`coil-migrator: unknown command "--namespace=x": the command comes first`}},
		{[]string{"replace", "--namespace=", "--daemonset=Bad_", "--interval=-1s"}, 2, []string{
			"coil-migrator replace: --interval", `coil-migrator replace: --namespace=""`, `coil-migrator replace: --daemonset="Bad_"`}},
		{[]string{"dump", "--etcd-prefix=", "--etcd-timeout=0s", "--etcd-tls-key=x", "--timeout=0s"}, 2, []string{
			"coil-migrator dump: --etcd-*: the timeout", "coil-migrator dump: --etcd-*: the client's certificate", "coil-migrator dump: --etcd-prefix", "coil-migrator dump: --timeout"}},
	} {
		got, code := stderr(t, tt.args...)
		if code != tt.code {
			t.Errorf("%q: exit code %d, want %d", tt.args, code, tt.code)
		}
		for _, want := range tt.says {
			if !strings.Contains("\n"+got, "\n"+want) {
				t.Errorf("%q: no line begins with %q:\n%s", tt.args, want, got)
			}
		}
	}
}
