package cluster

import (
	"context"
	"fmt"
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
	fmt.Fprintln(o.Log, "building Coil's image")
	// As "make image", but with this machine's paths in the programs: so nothing is compiled again that tests
	// have compiled. The image of "make image" stays as it is.
	archive := filepath.Join(root, "build/coil-lab-image.tar")
	cmd := exec.CommandContext(ctx, "go", "run", "./hack/image", "-trimpath=false", "-output="+archive)
	cmd.Dir = root
	cmd.Stdout, cmd.Stderr = o.Log, o.Log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build Coil's image: %w", err)
	}
	o.Images = []string{archive}
	return nil
}
