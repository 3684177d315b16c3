package image

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestWrite(t *testing.T) {
	files := []File{
		{Path: "/a/b/file", Mode: 0o755, Content: []byte("x")},
		{Path: "/a/b/link", Mode: 0o777, Link: "file"},
	}
	var first, second bytes.Buffer
	for _, w := range []*bytes.Buffer{&first, &second} {
		if err := Write(w, "localhost/coil-lab/x:1", files, Config{Entrypoint: []string{"/a/b/file"}}); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("the same input gave two different images")
	}

	outer := readTar(t, first.Bytes())
	var manifest []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(outer["manifest.json"], &manifest); err != nil {
		t.Fatal(err)
	}
	if len(manifest) != 1 || len(manifest[0].Layers) != 1 || manifest[0].RepoTags[0] != "localhost/coil-lab/x:1" {
		t.Fatalf("manifest is %+v", manifest)
	}
	layer := outer[manifest[0].Layers[0]]
	var config struct {
		OS     string
		Config struct{ Entrypoint []string }
		Rootfs struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	if err := json.Unmarshal(outer[manifest[0].Config], &config); err != nil {
		t.Fatal(err)
	}
	if want := "sha256:" + digest(layer); len(config.Rootfs.DiffIDs) != 1 || config.Rootfs.DiffIDs[0] != want {
		t.Errorf("diff IDs are %v, want %s", config.Rootfs.DiffIDs, want)
	}
	if config.OS != "linux" || config.Config.Entrypoint[0] != "/a/b/file" {
		t.Errorf("config is %+v", config)
	}
	inner := readTar(t, layer)
	want := map[string][]byte{"a/": {}, "a/b/": {}, "a/b/file": []byte("x"), "a/b/link": []byte("-> file"), "tmp/": {}}
	if d := cmp.Diff(want, inner); d != "" {
		t.Errorf("layer (-want +got):\n%s", d)
	}
}

func TestToolFilesDoesNotLinkBusyboxToItself(t *testing.T) {
	for _, f := range toolFiles([]byte("elf"), []string{"ash", "busybox", "sh"}) {
		if f.Path == "/bin/busybox" && f.Link != "" {
			t.Error("busybox is a link to itself")
		}
	}
}

func TestBusyboxIsMissing(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	if _, err := Busybox(); !errors.Is(err, ErrNoBusybox) {
		t.Errorf("error is %v, want ErrNoBusybox", err)
	}
	// A dynamically linked program doesn't run in an image without libraries.
	for _, dynamic := range []string{"/bin/ls", "/usr/bin/env"} {
		if err := os.Symlink(dynamic, filepath.Join(dir, "busybox")); err != nil {
			t.Fatal(err)
		}
		if _, err := Busybox(); !errors.Is(err, ErrNoBusybox) {
			t.Errorf("with %s as busybox: error is %v, want ErrNoBusybox", dynamic, err)
		}
		if err := os.Remove(filepath.Join(dir, "busybox")); err != nil {
			t.Fatal(err)
		}
	}
}

// readTar returns the files of a tar archive; a link's content is its target.
func readTar(t *testing.T, b []byte) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	r := tar.NewReader(bytes.NewReader(b))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if h.Linkname != "" {
			content = []byte("-> " + h.Linkname)
		}
		files[h.Name] = content
	}
}
