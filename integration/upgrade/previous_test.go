package upgrade

import (
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/cache"
	"github.com/coil-net/coil/integration/lab/cluster"
	"github.com/coil-net/coil/pkg/testkit"
)

// previous is the commit of the version before this one, and sources are its files, in a tar archive compressed with gzip.
// previous.sh makes both: a release changes them.
var (
	//go:embed previous
	previous string
	//go:embed previous.tar.gz
	sources []byte
)

// previousName is the tag of its image.
const previousName = "previous"

// version is a version of Coil that can be installed.
type version struct {
	name    string
	root    string // of its sources
	archive string // of its image, whose tag is the name
}

func (v version) image() string { return "localhost/coil:" + v.name }

// versions builds the images of the previous version and of this one.
func versions(t *testing.T) (old, now version) {
	t.Helper()
	root := testkit.Must(build.Root())(t)
	ctx, rev := t.Context(), strings.TrimSpace(previous)
	old = version{name: previousName}
	now = version{name: "now", root: root, archive: filepath.Join(t.TempDir(), "now.tar")}
	old.root = testkit.Must(cache.Once(ctx, "coil-"+rev, os.Stderr, func(dir string) error { return unpack(ctx, dir) }))(t)
	old.archive = testkit.Must(cache.Once(ctx, "coil-"+rev+".tar", os.Stderr, func(archive string) error { return old.pack(ctx, archive) }))(t)
	testkit.Check(t, cluster.BuildImage(ctx, now.image(), now.archive, os.Stderr))
	return old, now
}

// pack builds the image of a revision by that revision's own program.
func (v version) pack(ctx context.Context, archive string) error {
	cmd := exec.CommandContext(ctx, "go", "run", "./hack/image", "-name="+v.image(), "-output="+archive)
	cmd.Dir, cmd.Env = v.root, append(os.Environ(), "GOFLAGS=-buildvcs=false")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the image of version %q: %w\n%s", v.name, err, out)
	}
	return nil
}

// unpack puts the files of the previous version into dir.
func unpack(ctx context.Context, dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "tar", "-xzf", "-", "-C", dir)
	cmd.Stdin = bytes.NewReader(sources)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("unpack the previous version: %w\n%s", err, out)
	}
	return nil
}

// manifests returns a directory for kubectl apply -k: the version's manifests as the lab has them, with its image, and
// without the objects of some kind.
func (v version) manifests(t *testing.T, without string) string {
	t.Helper()
	dir := t.TempDir()
	base := testkit.Must(filepath.Rel(dir, filepath.Join(v.root, "integration/lab/manifests/several-nodes")))(t)
	text := fmt.Sprintf(`apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
- %s
images:
- name: localhost/coil
  newTag: %s
`, base, v.name)
	if without != "" {
		text += fmt.Sprintf(`patches:
- target: {kind: %s}
  patch: |-
    apiVersion: apps/v1
    kind: %s
    metadata: {name: any}
    $patch: delete
`, without, without)
	}
	testkit.Check(t, os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o644))
	return dir
}
