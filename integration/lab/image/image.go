// Package image writes the container images that the lab itself brings: the sandbox of every pod
// and a tool box for tests. It needs no image builder and no registry; it knows nothing of where
// the images go.
package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"runtime"
	"slices"
	"strings"
	"time"
)

// Names under which a container runtime knows the images.
const (
	// Pause is the sandbox image.
	Pause = "localhost/coil-lab/pause:1"
	// Tools has busybox: sh, ping, ping6, wget, httpd, nc, ip and more. A pod that uses it needs
	// imagePullPolicy Never. Debian's static wget crashes with -T: use timeout(1).
	Tools = "localhost/coil-lab/tools:1"
)

// ErrNoBusybox says that there is no statically linked busybox to make the tools image from.
var ErrNoBusybox = errors.New("no static busybox in PATH: apt-get install busybox-static")

// File is an entry of an image's file system. Directories are made as needed.
type File struct {
	Path    string // absolute
	Mode    int64
	Content []byte
	Link    string // target, for a symbolic link
}

// Config is what the runtime does with the image.
type Config struct {
	Entrypoint []string
	Cmd        []string
	Env        []string
}

// epoch is the time of everything in an image, so that the same input gives the same bytes.
var epoch = time.Unix(0, 0).UTC()

// Write writes an image of one layer as a Docker archive, which `ctr images import` and
// `docker load` read.
func Write(w io.Writer, name string, files []File, c Config) error {
	layer, err := writeLayer(files)
	if err != nil {
		return fmt.Errorf("write image %s: %w", name, err)
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH,
		"os":           "linux",
		"created":      epoch,
		"config":       map[string]any{"Entrypoint": c.Entrypoint, "Cmd": c.Cmd, "Env": c.Env},
		"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + digest(layer)}},
		"history":      []map[string]any{{"created": epoch, "created_by": "coil-lab"}},
	})
	if err != nil {
		return err
	}
	configName, layerName := digest(config)+".json", digest(layer)+"/layer.tar"
	manifest, err := json.Marshal([]map[string]any{{
		"Config": configName, "RepoTags": []string{name}, "Layers": []string{layerName},
	}})
	if err != nil {
		return err
	}
	t := tar.NewWriter(w)
	for _, f := range []File{
		{Path: configName, Mode: 0o644, Content: config},
		{Path: layerName, Mode: 0o644, Content: layer},
		{Path: "manifest.json", Mode: 0o644, Content: manifest},
	} {
		if err := writeFile(t, f); err != nil {
			return fmt.Errorf("write image %s: %w", name, err)
		}
	}
	return t.Close()
}

// WriteTools writes the tools image from the machine's own busybox.
func WriteTools(ctx context.Context, w io.Writer) error {
	busybox, err := Busybox()
	if err != nil {
		return err
	}
	b, err := os.ReadFile(busybox)
	if err != nil {
		return err
	}
	list, err := exec.CommandContext(ctx, busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("list the applets of %s: %w", busybox, err)
	}
	return Write(w, Tools, toolFiles(b, strings.Fields(string(list))), Config{
		Cmd: []string{"/bin/sh"},
		Env: []string{"PATH=/bin"},
	})
}

// WritePause writes the sandbox image from the program in this package's folder pause.
func WritePause(w io.Writer, program string) error {
	b, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	return Write(w, Pause, []File{{Path: "/pause", Mode: 0o755, Content: b}}, Config{Entrypoint: []string{"/pause"}})
}

// Busybox returns the path of a statically linked busybox, or ErrNoBusybox.
func Busybox() (string, error) {
	p, err := exec.LookPath("busybox")
	if err != nil {
		return "", ErrNoBusybox
	}
	f, err := elf.Open(p)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", p, err)
	}
	defer f.Close()
	for _, h := range f.Progs {
		if h.Type == elf.PT_INTERP {
			return "", ErrNoBusybox
		}
	}
	return p, nil
}

func toolFiles(busybox []byte, applets []string) []File {
	files := []File{
		{Path: "/bin/busybox", Mode: 0o755, Content: busybox},
		{Path: "/etc/passwd", Mode: 0o644, Content: []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n")},
		{Path: "/etc/group", Mode: 0o644, Content: []byte("root:x:0:\nnogroup:x:65534:\n")},
		{Path: "/www/index.html", Mode: 0o644, Content: []byte("ok\n")},
	}
	for _, a := range applets {
		if a != "busybox" {
			files = append(files, File{Path: "/bin/" + a, Mode: 0o777, Link: "busybox"})
		}
	}
	return files
}

func writeLayer(files []File) ([]byte, error) {
	var b bytes.Buffer
	t := tar.NewWriter(&b)
	made := map[string]bool{"/": true}
	for _, f := range files {
		if err := makeDirs(t, path.Dir(f.Path), made); err != nil {
			return nil, err
		}
		f.Path = strings.TrimPrefix(f.Path, "/")
		if err := writeFile(t, f); err != nil {
			return nil, err
		}
	}
	// Something to write to for whoever isn't root.
	if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "tmp/", Mode: 0o1777, ModTime: epoch}); err != nil {
		return nil, err
	}
	return b.Bytes(), t.Close()
}

func makeDirs(t *tar.Writer, dir string, made map[string]bool) error {
	var missing []string
	for ; !made[dir]; dir = path.Dir(dir) {
		missing = append(missing, dir)
	}
	for _, d := range slices.Backward(missing) {
		made[d] = true
		h := &tar.Header{Typeflag: tar.TypeDir, Name: strings.TrimPrefix(d, "/") + "/", Mode: 0o755, ModTime: epoch}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
	}
	return nil
}

func writeFile(t *tar.Writer, f File) error {
	h := &tar.Header{Typeflag: tar.TypeReg, Name: f.Path, Mode: f.Mode, Size: int64(len(f.Content)), ModTime: epoch}
	if f.Link != "" {
		h.Typeflag, h.Linkname, h.Size = tar.TypeSymlink, f.Link, 0
	}
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	_, err := t.Write(f.Content)
	return err
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
