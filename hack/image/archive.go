package main

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Media types of the OCI image specification. The layer isn't compressed: that keeps it
// the same whatever Go version packs it, and cheap to import; registries' clients compress.
const (
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar"
)

// file is an executable of the image.
type file struct {
	path   string // in the image, absolute
	source string // on disk
	size   int64  // bytes
	link   string // in the image, the path of the same file that comes before; empty if this is the first
}

// image is what an archive is made from.
type image struct {
	name     string // full name with tag
	arch     string // GOARCH
	created  time.Time
	revision string // commit; may be empty
	files    []file
}

// written tells about an archive.
type written struct {
	digest string // of the manifest, as sha256:<hex>
	size   int64  // of the archive in bytes
}

// descriptor names a blob (OCI image specification, descriptor.md).
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

// writeFile writes the archive to path, which is replaced only by a complete one.
func (i image) writeFile(path string) (w written, err error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return written{}, err
	}
	layer, err := os.CreateTemp(dir, ".layer-*")
	if err != nil {
		return written{}, err
	}
	defer os.Remove(layer.Name())
	defer layer.Close()
	out, err := os.CreateTemp(dir, ".image-*")
	if err != nil {
		return written{}, err
	}
	defer os.Remove(out.Name()) // fails after the rename, and should
	defer out.Close()
	if w, err = i.write(out, layer); err != nil {
		return written{}, fmt.Errorf("write image %s: %w", i.name, err)
	}
	err = errors.Join(out.Chmod(0o644), out.Close())
	if err != nil {
		return written{}, err
	}
	info, err := os.Stat(out.Name())
	if err != nil {
		return written{}, err
	}
	w.size = info.Size()
	return w, os.Rename(out.Name(), path)
}

// write writes an OCI image layout as a tar archive, with the file that older engines'
// "load" reads beside it. scratch is an empty file for the layer, whose digest has to be
// known before it is put into the archive.
func (i image) write(out io.Writer, scratch io.ReadWriteSeeker) (written, error) {
	layer, err := i.writeLayer(scratch)
	if err != nil {
		return written{}, err
	}
	if _, err := scratch.Seek(0, io.SeekStart); err != nil {
		return written{}, err
	}
	config, configJSON, err := blob(typeConfig, i.config(layer.Digest))
	if err != nil {
		return written{}, err
	}
	manifest, manifestJSON, err := blob(typeManifest, map[string]any{
		"schemaVersion": 2, "mediaType": typeManifest, "config": config, "layers": []descriptor{layer},
	})
	if err != nil {
		return written{}, err
	}
	manifest.Platform = &platform{Architecture: i.arch, OS: "linux"}
	// containerd takes the whole name from the first annotation; the second is the specification's.
	manifest.Annotations = map[string]string{
		"io.containerd.image.name":          i.name,
		"org.opencontainers.image.ref.name": i.name,
	}
	index, err := json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": typeIndex, "manifests": []descriptor{manifest},
	})
	if err != nil {
		return written{}, err
	}
	docker, err := json.Marshal([]map[string]any{{
		"Config": config.path(), "RepoTags": []string{i.name}, "Layers": []string{layer.path()},
	}})
	if err != nil {
		return written{}, err
	}

	t := archive{tar.NewWriter(out), i.created}
	err = errors.Join(
		t.dir("blobs/"), t.dir("blobs/sha256/"),
		t.copy(layer.path(), 0o644, scratch, layer.Size),
		t.bytes(config.path(), configJSON),
		t.bytes(manifest.path(), manifestJSON),
		t.bytes("index.json", index),
		t.bytes("manifest.json", docker),
		t.bytes("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)),
		t.Close(),
	)
	return written{digest: manifest.Digest}, err
}

func (i image) config(layer string) map[string]any {
	labels := map[string]string{
		"org.opencontainers.image.title":    "Coil",
		"org.opencontainers.image.licenses": "Apache-2.0",
	}
	if i.revision != "" {
		labels["org.opencontainers.image.revision"] = i.revision
	}
	return map[string]any{
		"architecture": i.arch,
		"os":           "linux",
		"created":      i.created,
		// No entry point: which program runs is the manifests' choice.
		"config":  map[string]any{"User": "0:0", "WorkingDir": "/", "Env": []string{"PATH=/"}, "Labels": labels},
		"rootfs":  map[string]any{"type": "layers", "diff_ids": []string{layer}},
		"history": []map[string]any{{"created": i.created, "created_by": "coil hack/image"}},
	}
}

func (i image) writeLayer(w io.Writer) (descriptor, error) {
	sum := counter{hash: sha256.New()}
	t := archive{tar.NewWriter(io.MultiWriter(w, &sum)), i.created}
	for _, f := range i.files {
		if err := t.file(f); err != nil {
			return descriptor{}, err
		}
	}
	if err := t.Close(); err != nil {
		return descriptor{}, err
	}
	return descriptor{MediaType: typeLayer, Digest: digest(sum.hash), Size: sum.n}, nil
}

// path is the blob's place in an image layout.
func (d descriptor) path() string { return "blobs/" + strings.Replace(d.Digest, ":", "/", 1) }

func blob(mediaType string, v any) (descriptor, []byte, error) {
	b, err := json.Marshal(v) // sorts the keys of maps
	if err != nil {
		return descriptor{}, nil, err
	}
	h := sha256.New()
	h.Write(b)
	return descriptor{MediaType: mediaType, Digest: digest(h), Size: int64(len(b))}, b, nil
}

func digest(h hash.Hash) string { return "sha256:" + hex.EncodeToString(h.Sum(nil)) }

// counter hashes and counts what is written to it.
type counter struct {
	hash hash.Hash
	n    int64
}

func (c *counter) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return c.hash.Write(p)
}

// archive writes tar entries that belong to root and have one fixed time.
type archive struct {
	*tar.Writer
	time time.Time
}

func (t archive) dir(name string) error {
	return t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755, ModTime: t.time, Format: tar.FormatUSTAR})
}

func (t archive) bytes(name string, b []byte) error {
	return t.copy(name, 0o644, strings.NewReader(string(b)), int64(len(b)))
}

func (t archive) file(f file) error {
	if f.link != "" {
		return t.WriteHeader(&tar.Header{Typeflag: tar.TypeLink, Name: strings.TrimPrefix(f.path, "/"), Linkname: strings.TrimPrefix(f.link, "/"),
			Mode: 0o755, ModTime: t.time, Format: tar.FormatUSTAR})
	}
	r, err := os.Open(f.source)
	if err != nil {
		return err
	}
	defer r.Close()
	return t.copy(strings.TrimPrefix(f.path, "/"), 0o755, r, f.size)
}

func (t archive) copy(name string, mode int64, r io.Reader, size int64) error {
	err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: size, ModTime: t.time, Format: tar.FormatUSTAR})
	if err != nil {
		return err
	}
	_, err = io.CopyN(t, r, size)
	return err
}
