package netlab

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"
)

// Start starts a command in the namespace.
func (n *NS) Start(cmd *exec.Cmd) error {
	// A process is born where the thread is that starts it. nsenter(1) would be one more to start.
	return n.Do(cmd.Start)
}

// Exec runs a command in the namespace.
func (n *NS) Exec(cmd *exec.Cmd) error {
	if err := n.Start(cmd); err != nil {
		return err
	}
	return cmd.Wait()
}

// Run runs a program in the namespace and returns what it prints. The error has what it says.
func (n *NS) Run(ctx context.Context, name string, args ...string) (string, error) {
	return n.output(ctx, "", name, args...)
}

func (n *NS) output(ctx context.Context, stdin, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	if stdin != "" {
		cmd.Stdin = strings.NewReader(stdin)
	}
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := n.Exec(cmd); err != nil {
		return "", fmt.Errorf("%s %s: %w: %s%s", name, strings.Join(args, " "), err, stderr.Bytes(), out.Bytes())
	}
	return out.String(), nil
}
