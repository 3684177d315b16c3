package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"sigs.k8s.io/yaml"

	"github.com/coil-net/coil/integration/lab/build"
)

// manifestImage is the image in manifests/, without its tag.
const manifestImage = "localhost/coil"

// kustomization is what a user would write to have another image (kustomize.config.k8s.io/v1beta1).
type kustomization struct {
	APIVersion string      `json:"apiVersion"`
	Kind       string      `json:"kind"`
	Resources  []string    `json:"resources"`
	Images     []imageName `json:"images"`
}

// imageName replaces the image Name.
type imageName struct {
	Name    string `json:"name"`
	NewName string `json:"newName"`
	NewTag  string `json:"newTag"`
}

// manifests writes one file for each variant, for the CRDs alone and for the cleanup, with the release's image.
func (r release) manifests(ctx context.Context) error {
	variants, err := filepath.Glob("manifests/variants/*")
	if err != nil {
		return err
	}
	dirs := map[string]string{"coil": "manifests", "coil-crds": "manifests/crd", "coil-cleanup": "manifests/cleanup"}
	for _, dir := range variants {
		dirs["coil-"+filepath.Base(dir)] = dir
	}
	lab := build.Builder{Log: os.Stderr}
	programs, err := lab.Programs(ctx, "kubectl")
	if err != nil {
		return err
	}
	for name, dir := range dirs {
		out, err := r.render(ctx, programs["kubectl"], dir)
		if err != nil {
			return fmt.Errorf("%s: %w", dir, err)
		}
		if err := os.WriteFile(filepath.Join(r.out, name+".yaml"), out, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// render returns the objects of a folder with the release's image.
func (r release) render(ctx context.Context, kubectl, dir string) ([]byte, error) {
	tmp, err := os.MkdirTemp(r.bin, "kustomize-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	base, err := filepath.Rel(tmp, dir) // kustomize takes no absolute path
	if err != nil {
		return nil, err
	}
	text, err := yaml.Marshal(kustomization{
		APIVersion: "kustomize.config.k8s.io/v1beta1", Kind: "Kustomization", Resources: []string{base},
		Images: []imageName{{Name: manifestImage, NewName: r.image, NewTag: r.version}},
	})
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(tmp, "kustomization.yaml"), text, 0o644); err != nil {
		return nil, err
	}
	out, err := exec.CommandContext(ctx, kubectl, "kustomize", tmp).Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		err = fmt.Errorf("kubectl kustomize: %w\n%s", err, exit.Stderr)
	}
	return out, err
}
