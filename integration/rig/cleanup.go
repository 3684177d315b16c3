package rig

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"slices"
)

// CNIBinDir is the folder of plugins that Cleanup cleans; it isn't where the rig runs the
// plugin from.
func (n *Node) CNIBinDir() string { return n.path("bin") }

// Cleanup runs "coild cleanup" with coild's own flags and more, and returns what it printed,
// also beside an error, which has its log.
func (n *Node) Cleanup(ctx context.Context, more ...string) (string, error) {
	cmd := exec.CommandContext(ctx, n.rig.bin.coild, slices.Concat([]string{"cleanup"}, n.opts.CoildFlags, []string{"--cni-bin-dir=" + n.CNIBinDir()}, more)...)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	if err := n.Exec(cmd); err != nil {
		return out.String(), fmt.Errorf("coild cleanup: %w: %s", err, log.Bytes())
	}
	return out.String(), nil
}
