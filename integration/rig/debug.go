package rig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/coil-net/coil/pkg/plan/inspection"
)

// Debug asks the node's coild by "coild debug", as people do.
func (n *Node) Debug(ctx context.Context, words ...string) (*inspection.Answer, error) {
	cmd := exec.CommandContext(ctx, n.Coild.Path, append(append([]string{"debug"}, words...), "--socket="+n.Socket())...)
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return nil, fmt.Errorf("coild debug: %w: %s", err, exit.Stderr)
	}
	if err != nil {
		return nil, err
	}
	return inspection.Parse(out)
}

// HeldFile is the file that holds the repairs of the node's coild while it exists, if that is built with the tag faultpoints.
func (n *Node) HeldFile() string { return n.path("held") }

// HoldRepairs lets nothing be repaired, or everything again.
func (n *Node) HoldRepairs(held bool) error {
	if held {
		return os.WriteFile(n.HeldFile(), nil, 0o600)
	}
	return os.Remove(n.HeldFile())
}
