package rig

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/coil-net/coil/pkg/plan/inspection"
)

// Debug asks the node's coild by "coild debug", as people do.
func (n *Node) Debug(ctx context.Context, words ...string) (*inspection.Answer, error) {
	out, _, err := n.debug(ctx, words...)
	if err != nil {
		return nil, err
	}
	return inspection.Parse(out)
}

// Record asks the node's coild for all rows of its record.
func (n *Node) Record(ctx context.Context) (*inspection.Database, error) {
	out, _, err := n.debug(ctx, "record")
	if err != nil {
		return nil, err
	}
	return inspection.ParseDatabase(out)
}

// CopyRecord asks the node's coild for a copy of its record.
func (n *Node) CopyRecord(ctx context.Context) (file []byte, sum inspection.Sum, err error) {
	file, lines, err := n.debug(ctx, "db")
	if err == nil {
		sum, err = inspection.FindSum(string(lines))
	}
	return file, sum, err
}

// debug runs "coild debug", and returns what it writes on the standard output and the standard error.
func (n *Node) debug(ctx context.Context, words ...string) (out, errOut []byte, err error) {
	var lines bytes.Buffer
	cmd := exec.CommandContext(ctx, n.Coild.Path, append(append([]string{"debug"}, words...), "--socket="+n.Socket())...)
	cmd.Stderr = &lines
	if out, err = cmd.Output(); err != nil {
		return nil, nil, fmt.Errorf("coild debug: %w: %s", err, lines.Bytes())
	}
	return out, lines.Bytes(), nil
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

// Debug asks the router by "coil-egress debug", as people do.
func (r *Router) Debug(ctx context.Context, words ...string) (*inspection.RouterAnswer, error) {
	cmd := exec.CommandContext(ctx, r.Program.Path, append(append([]string{"debug"}, words...), "--debug-socket="+r.DebugSocket())...)
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return nil, fmt.Errorf("coil-egress debug: %w: %s", err, exit.Stderr)
	}
	if err != nil {
		return nil, err
	}
	return inspection.ParseRouter(out)
}

// DebugSocket is the unix socket at which the router is asked.
func (r *Router) DebugSocket() string {
	return r.egress.rig.path(r.Namespace + "-" + r.Name + "-debug.sock")
}
