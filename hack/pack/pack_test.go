package pack

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestBuildPacksEveryProgram(t *testing.T) {
	useTools(t, "coil-tool")
	root := t.TempDir()
	write(t, filepath.Join(root, "go.mod"), "module example.org/m\n\ngo 1.26\n")
	for _, name := range []string{"coild", "coil", "coil-routers", "coil-router", "coil-egress", "coil-tool"} {
		write(t, filepath.Join(root, "cmd", name, "main.go"), "package main\n\nfunc main() { println(\""+name+"\") }\n")
	}
	write(t, filepath.Join(root, "cmd", "notes", "README.md"), "not a program")

	files, err := Build{Root: root}.Image(t.Context(), runtime.GOARCH, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, f := range files {
		paths = append(paths, f.Path+" "+filepath.Base(f.Source)+f.Link)
	}
	want := []string{"/coil coil", "/coil-egress coil-routers", "/coil-router coil-routers/coil-egress", "/coild coild"}
	if diff := cmp.Diff(want, paths); diff != "" {
		t.Errorf("programs (-want +got):\n%s", diff)
	}
}

// useTools replaces the list of tools for a test.
func useTools(t *testing.T, names ...string) {
	t.Helper()
	before := Tools
	Tools = names
	t.Cleanup(func() { Tools = before })
}

func TestToolHasTheVersion(t *testing.T) {
	root := t.TempDir()
	write(t, filepath.Join(root, "go.mod"), "module github.com/coil-net/coil\n\ngo 1.26\n")
	write(t, filepath.Join(root, "pkg", "app", "program", "program.go"), "package program\n\nvar version string\n\nfunc Version() string { return version }\n")
	write(t, filepath.Join(root, "cmd", "coil-tool", "main.go"),
		"package main\n\nimport \"github.com/coil-net/coil/pkg/app/program\"\n\nfunc main() { print(program.Version()) }\n")
	for _, version := range []string{"v1.2.3-rc.1", ""} {
		out := filepath.Join(t.TempDir(), "tool")
		if err := (Build{Root: root, Version: version}).Tool(t.Context(), "coil-tool", "linux/"+runtime.GOARCH, out); err != nil {
			t.Fatal(err)
		}
		if got, err := exec.Command(out).CombinedOutput(); err != nil || string(got) != version {
			t.Errorf("the tool prints %q (%v), want the version %q", got, err, version)
		}
	}
}

// Container engines build from the Dockerfile, which can't read this package.
func TestDockerfileBuildsTheSame(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "..", "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"-tags=grpcnotrace", "-trimpath"}
	for _, variable := range stamped {
		want = append(want, "-X="+variable+"=$VERSION")
	}
	for _, name := range slices.Sorted(maps.Keys(joined)) {
		want = append(want, "-e /"+name+"$")
	}
	for _, name := range Tools {
		want = append(want, "-e /"+name+"$")
	}
	for _, w := range want {
		if !bytes.Contains(b, []byte(w)) {
			t.Errorf("the Dockerfile lacks %q", w)
		}
	}
}

func TestBuildRefuses(t *testing.T) {
	t.Run("no programs", func(t *testing.T) {
		_, err := Build{Root: t.TempDir()}.Image(t.Context(), runtime.GOARCH, t.TempDir())
		if err == nil || !strings.Contains(err.Error(), "no programs") {
			t.Errorf("error %v, want one that says there are no programs", err)
		}
	})
	t.Run("a directory that isn't a program", func(t *testing.T) {
		root := t.TempDir()
		write(t, filepath.Join(root, "go.mod"), "module example.org/m\n\ngo 1.26\n")
		write(t, filepath.Join(root, "cmd", "lib", "lib.go"), "package lib\n")
		write(t, filepath.Join(root, "cmd", "prog", "main.go"), "package main\n\nfunc main() {}\n")
		_, err := Build{Root: root}.Image(t.Context(), runtime.GOARCH, t.TempDir())
		if err == nil || !strings.Contains(err.Error(), "cmd/lib") {
			t.Errorf("error %v, want one that names cmd/lib", err)
		}
	})
	t.Run("a program that needs a loader", func(t *testing.T) {
		var b bytes.Buffer
		h := elf.Header64{
			Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
			Type:  uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
			Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1,
		}
		for _, v := range []any{h, elf.Prog64{Type: uint32(elf.PT_INTERP), Off: 120}} {
			if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
				t.Fatal(err)
			}
		}
		path := filepath.Join(t.TempDir(), "prog")
		write(t, path, b.String())
		if err := static(path); !errors.Is(err, errDynamic) {
			t.Errorf("error %v, want %v", err, errDynamic)
		}
	})
}

// testImage has two programs that were written to disk at different times, one of them by two names.
func testImage(t *testing.T) Image {
	t.Helper()
	dir := t.TempDir()
	i := Image{Name: "registry.example/coil:v1", Arch: "arm64", Created: time.Unix(1700000000, 0).UTC(), Revision: "abc", Version: "v1"}
	for n, name := range []string{"coil", "coild"} {
		source := filepath.Join(dir, name)
		write(t, source, strings.Repeat(name, 1000))
		when := time.Now().Add(-time.Duration(n) * time.Hour)
		if err := os.Chtimes(source, when, when); err != nil {
			t.Fatal(err)
		}
		i.Files = append(i.Files, File{Path: "/" + name, Source: source, Size: int64(1000 * len(name))})
	}
	same := i.Files[1]
	same.Path, same.Link = "/coild-again", "/coild"
	i.Files = append(i.Files, same)
	return i
}

func TestArchiveIsAnOCILayout(t *testing.T) {
	img := testImage(t)
	path := filepath.Join(t.TempDir(), "out", "image.tar")
	info, err := img.WriteFile(path)
	if err != nil {
		t.Fatal(err)
	}
	entries := readTar(t, path)
	for name, b := range entries {
		if want, ok := strings.CutPrefix(name, "blobs/sha256/"); ok && want != "" {
			if got := sum(b); got != want {
				t.Errorf("blob %s has digest %s", want, got)
			}
		}
	}
	get := func(d descriptor) []byte {
		t.Helper()
		b := entries["blobs/sha256/"+strings.TrimPrefix(d.Digest, "sha256:")]
		if int64(len(b)) != d.Size {
			t.Errorf("blob %s has %d bytes, its descriptor says %d", d.Digest, len(b), d.Size)
		}
		return b
	}
	var layout struct{ ImageLayoutVersion string }
	parse(t, entries["oci-layout"], &layout)
	if layout.ImageLayoutVersion != "1.0.0" {
		t.Errorf("oci-layout: %+v", layout)
	}
	var index struct{ Manifests []descriptor }
	parse(t, entries["index.json"], &index)
	if len(index.Manifests) != 1 {
		t.Fatalf("%d manifests in the index, want 1", len(index.Manifests))
	}
	m := index.Manifests[0]
	if m.Digest != info.Digest || m.Annotations["io.containerd.image.name"] != img.Name {
		t.Errorf("manifest %s named %q; want %s named %q", m.Digest, m.Annotations, info.Digest, img.Name)
	}
	if diff := cmp.Diff(&platform{Architecture: "arm64", OS: "linux"}, m.Platform); diff != "" {
		t.Errorf("platform (-want +got):\n%s", diff)
	}
	var manifest struct {
		Config descriptor
		Layers []descriptor
	}
	parse(t, get(m), &manifest)
	var config struct {
		Architecture, OS string
		Config           struct {
			User   string
			Labels map[string]string
		}
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	parse(t, get(manifest.Config), &config)
	if config.Architecture != "arm64" || config.OS != "linux" || config.Config.User != "0:0" {
		t.Errorf("config %+v", config)
	}
	if l := config.Config.Labels; l["org.opencontainers.image.revision"] != "abc" || l["org.opencontainers.image.version"] != "v1" {
		t.Errorf("labels %v, want those of revision abc and version v1", l)
	}
	if len(manifest.Layers) != 1 || !cmp.Equal(config.RootFS.DiffIDs, []string{manifest.Layers[0].Digest}) {
		t.Fatalf("layers %v and diff IDs %v differ", manifest.Layers, config.RootFS.DiffIDs)
	}
	// The form that older engines load.
	var docker []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	parse(t, entries["manifest.json"], &docker)
	if len(docker) != 1 || entries[docker[0].Config] == nil || entries[docker[0].Layers[0]] == nil ||
		!cmp.Equal(docker[0].RepoTags, []string{img.Name}) {
		t.Errorf("manifest.json %+v", docker)
	}

	var got []string
	layer := tar.NewReader(bytes.NewReader(get(manifest.Layers[0])))
	for {
		h, err := layer.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, strings.TrimSpace(fmt.Sprintf("%s %o %d:%d %d %d %s", h.Name, h.Mode, h.Uid, h.Gid, h.Size, h.ModTime.Unix(), h.Linkname)))
	}
	want := []string{"coil 755 0:0 4000 1700000000", "coild 755 0:0 5000 1700000000", "coild-again 755 0:0 0 1700000000 coild"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("layer (-want +got):\n%s", diff)
	}
}

func TestArchiveIsReproducible(t *testing.T) {
	dir := t.TempDir()
	var archives [2][]byte
	for n := range archives {
		path := filepath.Join(dir, fmt.Sprint(n))
		if _, err := testImage(t).WriteFile(path); err != nil {
			t.Fatal(err)
		}
		var err error
		if archives[n], err = os.ReadFile(path); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(archives[0], archives[1]) {
		t.Error("the same programs gave different archives")
	}
}

func TestFailureKeepsTheOldArchive(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "image.tar")
	write(t, path, "old")
	img := testImage(t)
	img.Files[1].Source = filepath.Join(dir, "missing")
	if _, err := img.WriteFile(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v, want one about the missing program", err)
	}
	left, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "old" || len(left) != 1 {
		t.Errorf("archive %q (%v) and %d files in its directory; want the old one alone", b, err, len(left))
	}
}

func readTar(t *testing.T, path string) map[string][]byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	entries := map[string][]byte{}
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return entries
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		entries[h.Name] = b
	}
}

func parse(t *testing.T, b []byte, into any) {
	t.Helper()
	if err := json.Unmarshal(b, into); err != nil {
		t.Fatalf("parse %q: %v", b, err)
	}
}

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
}
