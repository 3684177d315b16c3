package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coil-net/coil/integration/lab/image"
	"github.com/coil-net/coil/pkg/testkit"
)

const importTimeout = 60 * time.Second

// pause is the package of the sandbox's program.
const pause = "integration/lab/image/pause"

// ownImages returns what writes the archives that every cluster gets.
func (c *Cluster) ownImages(ctx context.Context) (map[string]func(io.Writer) error, error) {
	program, err := c.build.Own(ctx, pause)
	if err != nil {
		return nil, err
	}
	return map[string]func(io.Writer) error{
		"pause": func(w io.Writer) error { return image.WritePause(w, program) },
		"tools": func(w io.Writer) error { return image.WriteTools(ctx, w) },
	}, nil
}

func (c *Cluster) ownImage(name string) string { return filepath.Join(c.dir, name+".tar") }

// writeOwnImages writes the archives that every cluster gets.
func (c *Cluster) writeOwnImages(ctx context.Context) error {
	archives, err := c.ownImages(ctx)
	if err != nil {
		return err
	}
	for name, write := range archives {
		if err := writeTo(c.ownImage(name), write); err != nil {
			return err
		}
	}
	return nil
}

// ownImageFiles returns the archives in the cluster's directory, the sandbox first: no pod starts
// without it.
func (c *Cluster) ownImageFiles() []string {
	return []string{c.ownImage("pause"), c.ownImage("tools")}
}

// ImportImage gives the images of a Docker or OCI archive to the nodes that are named, or to all
// that are on. Pods that use them need imagePullPolicy Never or IfNotPresent.
func (c *Cluster) ImportImage(ctx context.Context, archive string, nodes ...string) error {
	if len(nodes) == 0 {
		for _, n := range c.Nodes() {
			if _, err := c.init(n); err == nil {
				nodes = append(nodes, n)
			}
		}
	}
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(importTimeout))
	defer cancel()
	group, groupCtx := errgroup.WithContext(ctx)
	for _, n := range nodes {
		group.Go(func() error { return c.importInto(groupCtx, n, archive) })
	}
	return group.Wait()
}

func (c *Cluster) importInto(ctx context.Context, node, archive string) error {
	i, err := c.init(node)
	if err != nil {
		return err
	}
	socket := fmt.Sprintf("/proc/%d/root%s", i.PID, containerdSocket)
	err = testkit.Poll(ctx, pollPause, func() error {
		_, err := os.Stat(socket)
		return err
	})
	if err != nil {
		return fmt.Errorf("wait for containerd of %s: %w", node, err)
	}
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	cmd, err := c.enter(ctx, i, "ctr", "images", "import", "-")
	if err != nil {
		return err
	}
	var messages bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = f, &messages, &messages
	if err := cmd.Run(); err != nil {
		return errors.Join(fmt.Errorf("import %s into %s: %w: %s", archive, node, err, messages.Bytes()), ctx.Err())
	}
	return nil
}

// writeTo writes a file that is complete when it has its name.
func writeTo(path string, write func(io.Writer) error) error {
	f, err := os.Create(path + ".new")
	if err != nil {
		return err
	}
	if err := errors.Join(write(f), f.Close()); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
