package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
)

// plugin does one command of the CNI specification, 0.3.1.
func plugin(ctx context.Context, command string) error {
	container, ifName, netns := os.Getenv("CNI_CONTAINERID"), os.Getenv("CNI_IFNAME"), os.Getenv("CNI_NETNS")
	switch command {
	case "ADD":
		args := map[string]string{}
		for pair := range strings.SplitSeq(os.Getenv("CNI_ARGS"), ";") {
			k, v, _ := strings.Cut(pair, "=")
			args[k] = v
		}
		g, err := ask(ctx, http.MethodPost, "/ip", attachment{Container: container, Namespace: args["K8S_POD_NAMESPACE"], Pod: args["K8S_POD_NAME"]})
		if err != nil {
			return err
		}
		if err := wire(ctx, host(container), ifName, netns, g); err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(map[string]any{
			"cniVersion": "0.3.1",
			"interfaces": []map[string]string{{"name": ifName, "sandbox": netns}},
			"ips":        []map[string]any{{"version": "4", "address": g.Address + "/32", "interface": 0}},
		})
	case "DEL":
		// The link is gone when the namespace is.
		_ = exec.CommandContext(ctx, "ip", "link", "delete", host(container)).Run()
		_, err := ask(ctx, http.MethodDelete, "/ip/"+container, nil)
		return err
	case "VERSION":
		return json.NewEncoder(os.Stdout).Encode(map[string]any{"cniVersion": "0.3.1", "supportedVersions": []string{"0.3.0", "0.3.1"}})
	}
	return fmt.Errorf("no command %q", command)
}

// host is the name of the host's end of a pod's veth pair.
func host(container string) string { return "veth" + container[:8] }

// wire makes a veth pair, the host's route to the pod, and the exported route of the block.
func wire(ctx context.Context, host, ifName, netns string, g given) error {
	inside := func(line string) string { return "nsenter --net=" + netns + " " + line }
	for _, line := range []string{
		"ip link add " + host + " type veth peer name " + host + "p",
		"ip link set " + host + "p netns " + netns,
		inside("ip link set " + host + "p name " + ifName),
		inside("ip link set lo up"),
		inside("ip link set " + ifName + " up"),
		inside("ip addr add " + g.Address + "/32 dev " + ifName),
		inside("ip route add 169.254.1.1 dev " + ifName + " scope link"),
		inside("ip route add default via 169.254.1.1 dev " + ifName),
		"ip link set " + host + " up",
		"ip addr add 169.254.1.1/32 dev " + host + " scope link",
		"ip route add " + g.Address + "/32 dev " + host + " scope link",
		"ip route replace " + g.Block + " dev lo table 119 proto 30",
	} {
		words := strings.Fields(line)
		if out, err := exec.CommandContext(ctx, words[0], words[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", line, err, out)
		}
	}
	return nil
}

// ask makes a request of the agent.
func ask(ctx context.Context, method, path string, body any) (given, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return given{}, err
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, bytes.NewReader(text))
	if err != nil {
		return given{}, err
	}
	client := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	resp, err := client.Do(req)
	if err != nil {
		return given{}, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return given{}, err
	}
	if resp.StatusCode != http.StatusOK {
		return given{}, fmt.Errorf("the agent says: %s", answer)
	}
	var g given
	if method == http.MethodPost {
		err = json.Unmarshal(answer, &g)
	}
	return g, err
}
