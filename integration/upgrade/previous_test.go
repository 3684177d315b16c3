package upgrade

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/cluster"
	"github.com/coil-net/coil/pkg/testkit"
)

// previous names the version before this one: a commit or a tag of this repository. A release changes it.
//
//go:embed previous
var previous string

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
	cache := testkit.Must(build.CacheDir())(t)
	rev := strings.TrimSpace(previous)
	old = version{name: "previous", root: filepath.Join(cache, "coil-"+rev)}
	now = version{name: "now", root: root}
	testkit.Check(t, checkout(t.Context(), root, rev, old.root))
	old.archive, now.archive = old.root+".tar", filepath.Join(t.TempDir(), "now.tar")
	testkit.Check(t, old.pack(t.Context()), cluster.BuildImage(t.Context(), now.image(), now.archive, os.Stderr))
	return old, now
}

// pack builds the image of a revision by that revision's own program, unless it is there: it never changes.
func (v version) pack(ctx context.Context) error {
	if _, err := os.Stat(v.archive); err == nil || !errors.Is(err, os.ErrNotExist) {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "run", "./hack/image", "-trimpath=false", "-name="+v.image(), "-output="+v.archive)
	cmd.Dir, cmd.Env = v.root, append(os.Environ(), "GOFLAGS=-buildvcs=false")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the image of version %q: %w\n%s", v.name, err, out)
	}
	return nil
}

// checkout puts the files of a revision into dir, unless they are there.
func checkout(ctx context.Context, root, rev, dir string) error {
	if _, err := os.Stat(dir); err == nil || !errors.Is(err, os.ErrNotExist) {
		return err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), "checkout-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	script := `git -C "$1" archive "$2" | tar -x -C "$3"`
	if out, err := exec.CommandContext(ctx, "bash", "-o", "pipefail", "-c", script, "checkout", root, rev, tmp).CombinedOutput(); err != nil {
		return fmt.Errorf("get the files of %s, which the history of this repository has: %w\n%s", rev, err, out)
	}
	if err := os.Rename(tmp, dir); err != nil && !errors.Is(err, os.ErrExist) {
		return err
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
