package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/proc"
	"github.com/coil-net/coil/pkg/testkit"
)

// MakeStore fills a new directory with what containerd keeps of the lab's images and those of the
// archives, for Options.Store. To import them takes minutes where processors are emulated.
func MakeStore(ctx context.Context, dir string, log io.Writer, archives ...string) (err error) {
	tmp, err := os.MkdirTemp("", "coil-store-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	c := &Cluster{dir: tmp, build: &build.Builder{Log: log}}
	if err := c.writeOwnImages(ctx); err != nil {
		return err
	}
	bin, err := c.build.Programs(ctx, "containerd", "ctr")
	if err != nil {
		return err
	}
	socket := filepath.Join(tmp, "containerd.sock")
	config := fmt.Sprintf("version = 4\nroot = %q\nstate = %q\n[plugins.'io.containerd.server.v1.grpc']\n  address = %q\n",
		dir, filepath.Join(tmp, "state"), socket)
	if err := os.WriteFile(filepath.Join(tmp, "config.toml"), []byte(config), 0o600); err != nil {
		return err
	}
	// It mounts what it unpacks, which is nobody else's to see.
	containerd, err := proc.Start(proc.Command{
		Path: "unshare", Args: []string{"--mount", bin["containerd"], "--config=" + filepath.Join(tmp, "config.toml")},
		Log: filepath.Join(tmp, "containerd.log"),
	})
	if err != nil {
		return err
	}
	defer containerd.Kill()
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(importTimeout))
	defer cancel()
	err = containerd.WaitFor(ctx, func(context.Context) error {
		_, err := os.Stat(socket)
		return err
	})
	if err != nil {
		return err
	}
	for _, archive := range slices.Concat(c.ownImageFiles(), archives) {
		cmd := exec.CommandContext(ctx, bin["ctr"], "--address="+socket, "--namespace=k8s.io", "images", "import", archive)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("import %s: %w: %s", archive, err, out)
		}
	}
	return nil
}

// copyStore gives a new node the store.
func copyStore(ctx context.Context, store, target string) error {
	if err := os.MkdirAll(target, 0o711); err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, "cp", "-a", store+"/.", target).CombinedOutput(); err != nil {
		return fmt.Errorf("copy the images: %w: %s", err, out)
	}
	return nil
}
