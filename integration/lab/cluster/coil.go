package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"

	"github.com/coil-net/coil/integration/lab/build"
)

// AddCoil adds this repository's Coil to the options, where they name nothing else: the image,
// which is built now, and the manifests that install it in a lab. Nodes has to be set already.
func (o *Options) AddCoil(ctx context.Context) error {
	o.defaults()
	root, err := build.Root()
	if err != nil {
		return err
	}
	if len(o.Kustomize) == 0 {
		variant := "several-nodes"
		if o.Nodes == 1 {
			variant = "one-node"
		}
		o.Kustomize = []string{filepath.Join(root, "integration/lab/manifests", variant)}
	}
	if len(o.Images) > 0 {
		return nil
	}
	// The image of "make image" stays as it is.
	archive := filepath.Join(root, "build/coil-lab-image.tar")
	if err := BuildImage(ctx, "localhost/coil:dev", archive, o.Log); err != nil {
		return err
	}
	o.Images = []string{archive}
	return nil
}

// BuildImage builds the image of this repository's Coil into an archive, as "make image" does. The programs are kept in a
// folder, one build after the other, so that none is linked again before its source has changed.
func BuildImage(ctx context.Context, name, archive string, log io.Writer) (err error) {
	root, err := build.Root()
	if err != nil {
		return err
	}
	programs := filepath.Join(root, "build/coil-lab-image")
	unlock, err := lock(ctx, programs, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	fmt.Fprintln(log, "building Coil's image")
	cmd := exec.CommandContext(ctx, "go", "run", "./hack/image", "-programs="+programs, "-name="+name, "-output="+archive)
	cmd.Dir = root
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build Coil's image: %w", err)
	}
	return nil
}
