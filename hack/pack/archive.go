package pack

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

// File is an executable of an image.
type File struct {
	Path   string // in the image, absolute
	Source string // on disk
	Size   int64  // bytes
	Link   string // in the image, the path of the same file that comes before; empty if this is the first
}

// Image is the content of an archive.
type Image struct {
	Name     string    // full name with tag
	Arch     string    // GOARCH
	Created  time.Time // of everything in it
	Revision string    // commit; may be empty
	Version  string    // of the release; empty if it is none
	Files    []File
}

// Written tells about an archive.
type Written struct {
	Digest string // of the manifest, as sha256:<hex>
	Size   int64  // of the archive in bytes
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

// WriteFile writes the archive to path, which is replaced only by a complete one.
func (i Image) WriteFile(path string) (w Written, err error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return Written{}, err
	}
	layer, err := os.CreateTemp(dir, ".layer-*")
	if err != nil {
		return Written{}, err
	}
	defer os.Remove(layer.Name())
	defer layer.Close()
	out, err := os.CreateTemp(dir, ".image-*")
	if err != nil {
		return Written{}, err
	}
	defer os.Remove(out.Name()) // fails after the rename, and should
	defer out.Close()
	if w, err = i.write(out, layer); err != nil {
		return Written{}, fmt.Errorf("write image %s: %w", i.Name, err)
	}
	err = errors.Join(out.Chmod(0o644), out.Close())
	if err != nil {
		return Written{}, err
	}
	info, err := os.Stat(out.Name())
	if err != nil {
		return Written{}, err
	}
	w.Size = info.Size()
	return w, os.Rename(out.Name(), path)
}

// write writes an OCI image layout as a tar archive, with the file that older engines'
// "load" reads beside it. scratch is an empty file for the layer, whose digest has to be
// known before it is put into the archive.
func (i Image) write(out io.Writer, scratch io.ReadWriteSeeker) (Written, error) {
	layer, err := i.writeLayer(scratch)
	if err != nil {
		return Written{}, err
	}
	if _, err := scratch.Seek(0, io.SeekStart); err != nil {
		return Written{}, err
	}
	config, configJSON, err := blob(typeConfig, i.config(layer.Digest))
	if err != nil {
		return Written{}, err
	}
	manifest, manifestJSON, err := blob(typeManifest, map[string]any{
		"schemaVersion": 2, "mediaType": typeManifest, "config": config, "layers": []descriptor{layer},
	})
	if err != nil {
		return Written{}, err
	}
	manifest.Platform = &platform{Architecture: i.Arch, OS: "linux"}
	// containerd takes the whole name from the first annotation; the second is the specification's.
	manifest.Annotations = map[string]string{
		"io.containerd.image.name":          i.Name,
		"org.opencontainers.image.ref.name": i.Name,
	}
	index, err := json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": typeIndex, "manifests": []descriptor{manifest},
	})
	if err != nil {
		return Written{}, err
	}
	docker, err := json.Marshal([]map[string]any{{
		"Config": config.path(), "RepoTags": []string{i.Name}, "Layers": []string{layer.path()},
	}})
	if err != nil {
		return Written{}, err
	}

	t := archive{tar.NewWriter(out), i.Created}
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
	return Written{Digest: manifest.Digest}, err
}

func (i Image) config(layer string) map[string]any {
	labels := map[string]string{
		"org.opencontainers.image.title":    "Coil",
		"org.opencontainers.image.licenses": "Apache-2.0",
	}
	if i.Revision != "" {
		labels["org.opencontainers.image.revision"] = i.Revision
	}
	if i.Version != "" {
		labels["org.opencontainers.image.version"] = i.Version
	}
	return map[string]any{
		"architecture": i.Arch,
		"os":           "linux",
		"created":      i.Created,
		// No entry point: which program runs is the manifests' choice.
		"config":  map[string]any{"User": "0:0", "WorkingDir": "/", "Env": []string{"PATH=/"}, "Labels": labels},
		"rootfs":  map[string]any{"type": "layers", "diff_ids": []string{layer}},
		"history": []map[string]any{{"created": i.Created, "created_by": "coil hack/pack"}},
	}
}

func (i Image) writeLayer(w io.Writer) (descriptor, error) {
	sum := counter{hash: sha256.New()}
	t := archive{tar.NewWriter(io.MultiWriter(w, &sum)), i.Created}
	for _, f := range i.Files {
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

func (t archive) file(f File) error {
	if f.Link != "" {
		return t.WriteHeader(&tar.Header{Typeflag: tar.TypeLink, Name: strings.TrimPrefix(f.Path, "/"), Linkname: strings.TrimPrefix(f.Link, "/"),
			Mode: 0o755, ModTime: t.time, Format: tar.FormatUSTAR})
	}
	r, err := os.Open(f.Source)
	if err != nil {
		return err
	}
	defer r.Close()
	return t.copy(strings.TrimPrefix(f.Path, "/"), 0o755, r, f.Size)
}

func (t archive) copy(name string, mode int64, r io.Reader, size int64) error {
	err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: size, ModTime: t.time, Format: tar.FormatUSTAR})
	if err != nil {
		return err
	}
	_, err = io.CopyN(t, r, size)
	return err
}
