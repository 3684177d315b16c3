package cniconf_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/cniconf"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestRemove(t *testing.T) {
	const list = `{"cniVersion":"1.1.0","name":"k8s-pod-network","plugins":[{"type":"coil","socket":"/run/coild.sock"}]}`
	const name = "10-coil.conflist"
	others := map[string]string{"10-coil.conflist.bak": "x", "20-other.conflist": "{}", ".20-other.conflist.tmp-1": ""}
	for _, tt := range []struct {
		what  string
		files map[string]string
		want  []string // removed
		err   error
	}{
		{"nothing there", nil, nil, nil},
		{"in use and staged", map[string]string{name: list, name + ".staged": list}, []string{name, name + ".staged"}, nil},
		{"only staged", map[string]string{name + ".staged": list}, []string{name + ".staged"}, nil},
		{"of another plugin", map[string]string{name: `{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"bridge"}]}`, name + ".staged": list},
			[]string{name + ".staged"}, cniconf.ErrNotCoils},
		{"no configuration", map[string]string{name: "{"}, nil, cniconf.ErrNotCoils},
		{"half written", map[string]string{"." + name + ".tmp-1": ""}, nil, nil},
	} {
		t.Run(tt.what, func(t *testing.T) {
			dir := t.TempDir()
			left := []string{}
			for _, files := range []map[string]string{others, tt.files} {
				for f, content := range files {
					if err := os.WriteFile(filepath.Join(dir, f), []byte(content), 0o600); err != nil {
						t.Fatal(err)
					}
					if !slices.Contains(tt.want, f) && f != "."+name+".tmp-1" {
						left = append(left, f)
					}
				}
			}
			slices.Sort(left)
			got, err := cniconf.Remove(dir, name)
			if !errors.Is(err, tt.err) || tt.err == nil && err != nil {
				t.Errorf("error %v", err)
			}
			var removed []string
			for _, f := range got {
				removed = append(removed, filepath.Base(f))
			}
			if diff := cmp.Diff(tt.want, removed); diff != "" {
				t.Errorf("removed (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(left, testkit.FilesIn(t, dir)); diff != "" {
				t.Errorf("left (-want +got):\n%s", diff)
			}
		})
	}
	if got, err := cniconf.Remove(filepath.Join(t.TempDir(), "none"), name); err != nil || got != nil {
		t.Errorf("without the folder: %q, %v", got, err)
	}
}
