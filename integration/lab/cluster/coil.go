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
	make := exec.CommandContext(ctx, "make", "-C", root, "image")
	make.Stdout, make.Stderr = o.Log, o.Log
	if err := make.Run(); err != nil {
		return fmt.Errorf("make image: %w", err)
	}
	o.Images = []string{filepath.Join(root, "build/coil-image.tar")}
	return nil
}
