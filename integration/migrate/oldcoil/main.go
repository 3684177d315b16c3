// Command oldcoil stands for Coil v1 in tests: "oldcoil agent" keeps a node's addresses in etcd as v1 did, and what a
// container runtime starts wires pods as v1 did.
//
// It owns v1's ways of writing to etcd and to the kernel, as far as a migration meets them. It must not know of any
// migration.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// socket is where the agent listens for the plugin.
const socket = "/run/oldcoil.sock"

// attachment is what the plugin tells the agent about a pod.
type attachment struct {
	Container string `json:"container"`
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
}

// given is the agent's answer.
type given struct {
	Address string `json:"address"`
	Block   string `json:"block"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "oldcoil:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	if command := os.Getenv("CNI_COMMAND"); command != "" {
		if err := plugin(ctx, command); err != nil {
			// CNI specification, section 5, "Error": the runtime reads it from standard output.
			_ = json.NewEncoder(os.Stdout).Encode(map[string]any{"cniVersion": "0.3.1", "code": 100, "msg": err.Error()})
			return err
		}
		return nil
	}
	return serve(ctx, os.Getenv("NODE_NAME"), os.Getenv("ETCD"), os.Getenv("PREFIX"))
}
