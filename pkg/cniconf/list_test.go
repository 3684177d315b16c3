package cniconf

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/testkit"
)

func TestList(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{
		"99-loopback.conf":          `{"cniVersion": "1.0.0", "name": "lo", "type": "loopback"}`,
		"10-coil.conflist":          `{"cniVersion": "1.1.0", "name": "n", "plugins": [{"type": "coil"}, {"type": "portmap"}]}`,
		"10-coil.conflist.staged":   `{}`,
		"05-other.json":             `{"type": "bridge"}`,
		"07-half-written.conflist":  `{"plugins": [`,
		"11-of-nobody.conflist.bak": `{}`,
	} {
		testkit.Check(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	testkit.Check(t, os.Mkdir(filepath.Join(dir, "00-folder.conf"), 0o700))
	want := []File{
		{Name: "05-other.json", Plugins: []string{"bridge"}},
		{Name: "07-half-written.conflist"},
		{Name: "10-coil.conflist", Plugins: []string{"coil", "portmap"}},
		{Name: "99-loopback.conf", Plugins: []string{"loopback"}},
	}
	if diff := cmp.Diff(want, testkit.Must(List(dir))(t)); diff != "" {
		t.Errorf("configurations (-want +got):\n%s", diff)
	}
	if got, err := List(filepath.Join(dir, "none")); got != nil || err != nil {
		t.Errorf("of a folder that doesn't exist: %v, %v", got, err)
	}
	if _, err := List(filepath.Join(dir, "99-loopback.conf")); err == nil {
		t.Error("of a file: no error")
	}
}
