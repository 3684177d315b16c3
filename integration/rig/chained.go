package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"

	"github.com/coil-net/coil/integration/lab/build"
)

// chainVersion is the newest version of CNI that the plugins of the CNI project know.
const chainVersion = "1.0.0"

// chained is the plugin before Coil in the list of a node; see NodeOptions.Behind.
type chained struct {
	conf map[string]any
	path string // the folder of the plugins
}

// newChained returns the plugin that gives pods of a node their addresses: those of a range of the node.
func (n *Node) newChained(ctx context.Context) (*chained, error) {
	kind := n.opts.Behind
	programs, err := (&build.Builder{Log: n.rig.opts.Log}).Programs(ctx, kind, "host-local")
	if err != nil {
		return nil, err
	}
	conf := map[string]any{
		"cniVersion": chainVersion, "name": networkName, "type": kind,
		"ipam": map[string]any{
			"type": "host-local", "dataDir": n.path("host-local"), "routes": []any{map[string]any{"dst": "0.0.0.0/0"}, map[string]any{"dst": "::/0"}},
			"ranges": []any{
				[]any{map[string]any{"subnet": fmt.Sprintf("10.32.%d.0/24", n.number)}}, []any{map[string]any{"subnet": fmt.Sprintf("fd32:0:0:%x::/64", n.number)}},
			},
		},
	}
	if kind == "bridge" {
		conf["bridge"], conf["isGateway"] = "other0", true
	}
	return &chained{conf, programs.Dir("host-local")}, nil
}

// run does a command by the plugin before Coil, in the node's network namespace, and returns its result.
func (c *chained) run(ctx context.Context, s *Sandbox, command string) ([]byte, error) {
	stdin, err := json.Marshal(c.conf)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(c.path, c.conf["type"].(string)))
	cmd.Env = append(s.Env(command), "CNI_PATH="+c.path, "PATH=/usr/sbin:/usr/bin:/sbin:/bin")
	var out bytes.Buffer
	cmd.Stdin, cmd.Stdout = bytes.NewReader(stdin), &out
	if err := s.Node.Exec(cmd); err != nil {
		return nil, fmt.Errorf("%s: %w: %s", c.conf["type"], err, out.Bytes())
	}
	return out.Bytes(), nil
}

// addChained does ADD by both plugins.
func (s *Sandbox) addChained(ctx context.Context) ([]byte, error) {
	result, err := s.Node.before.run(ctx, s, "ADD")
	if err != nil {
		return nil, err
	}
	return s.Node.exec(ctx, s.Env("ADD"), map[string]any{"cniVersion": chainVersion, "prevResult": json.RawMessage(result)})
}

// delChained does DEL by both plugins, the other way round.
func (s *Sandbox) delChained(ctx context.Context) error {
	if _, err := s.Node.exec(ctx, s.Env("DEL"), map[string]any{"cniVersion": chainVersion}); err != nil {
		return err
	}
	_, err := s.Node.before.run(ctx, s, "DEL")
	return err
}
