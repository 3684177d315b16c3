package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// tool returns coilctl, which is built if need be.
func tool(ctx context.Context) (string, error) {
	return (&build.Builder{Log: os.Stdout}).Own(ctx, "cmd/coilctl")
}

// ask looks at the cluster by coilctl, and at one pod.
func (d demo) ask(ctx context.Context) error {
	step("What coilctl says: whether something is wrong, who has which addresses, and each step of one pod's network")
	path, err := tool(ctx)
	if err != nil {
		return err
	}
	pods, err := d.pods(ctx)
	if err != nil {
		return err
	}
	for _, args := range [][]string{
		{"status", "--wait=1m"}, {"nodes"}, {"pools", "--map"}, {"why", "pod", pods[0].namespace + "/" + pods[0].name},
	} {
		fmt.Println("$ coilctl", strings.Join(args, " "))
		cmd := exec.CommandContext(ctx, path, append(args, "--kubeconfig="+d.Kubeconfig())...)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stdout
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("coilctl %s: %w", strings.Join(args, " "), err)
		}
	}
	return d.serve(ctx, path)
}

// serve starts coilctl's page, and looks whether it is there.
func (d demo) serve(ctx context.Context, path string) (err error) {
	fmt.Println("$ coilctl serve --listen=127.0.0.1:0")
	cmd := exec.CommandContext(ctx, path, "serve", "--listen=127.0.0.1:0", "--kubeconfig="+d.Kubeconfig())
	cmd.Stderr = os.Stdout
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	defer func() {
		// Its exit status is 0 then.
		err = errors.Join(err, cmd.Process.Signal(os.Interrupt), cmd.Wait())
	}()
	url, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return fmt.Errorf("coilctl serve tells no address: %w", err)
	}
	fmt.Print(url)
	_, err = netlab.Get(ctx, http.DefaultClient, strings.TrimSpace(url))
	return err
}

// kept tells how to go on with a cluster that is left.
func kept(ctx context.Context) {
	path, err := tool(ctx)
	if err != nil {
		path = "coilctl"
	}
	fmt.Printf("\nThe cluster is left: export KUBECONFIG=%s\nIts page: %s serve, and open http://127.0.0.1:8580/\n", kubeconfig(), path)
}
