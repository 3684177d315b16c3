// Package chain tests that other plugins work behind Coil in one network configuration
// list, as a container runtime calls them.
//
// It owns what such plugins expect of Coil's result and of its links. It must not know
// how Coil makes them.
package chain

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// runner starts plugins in a node's network namespace.
type runner struct {
	version.PluginDecoder
	node *rig.Node
}

// ExecPlugin implements invoke.Exec.
func (r *runner) ExecPlugin(ctx context.Context, path string, stdin []byte, env []string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, path)
	cmd.Env, cmd.Stdin = append(env, "PATH="+os.Getenv("PATH")), bytes.NewReader(stdin)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	err := r.node.Exec(cmd)
	if err == nil {
		return out.Bytes(), nil
	}
	if e := (&types.Error{}); json.Unmarshal(out.Bytes(), e) == nil && e.Msg != "" {
		return nil, fmt.Errorf("%s: %w", filepath.Base(path), e)
	}
	return nil, fmt.Errorf("%s: %w: %s%s", filepath.Base(path), err, out.Bytes(), stderr.Bytes())
}

// FindInPath implements invoke.Exec.
func (*runner) FindInPath(plugin string, paths []string) (string, error) {
	return invoke.FindInPath(plugin, paths)
}

// runtime is the part of a container runtime that calls plugins.
type runtime struct {
	*libcni.CNIConfig
	node *rig.Node
	list *libcni.NetworkConfigList
}

// newRuntime chains plugins behind Coil.
func newRuntime(t *testing.T, n *rig.Node, chained ...map[string]any) *runtime {
	t.Helper()
	var names []string
	for _, c := range chained {
		names = append(names, c["type"].(string))
	}
	b := &build.Builder{Log: os.Stderr}
	paths := []string{filepath.Dir(n.Plugin())}
	for _, path := range testkit.Must(b.Programs(t.Context(), names...))(t) {
		paths = append(paths, filepath.Dir(path))
	}
	var first map[string]any
	testkit.Check(t, json.Unmarshal(testkit.Must(n.Conf(nil))(t), &first))
	list := map[string]any{"cniVersion": first["cniVersion"], "name": first["name"], "plugins": append([]map[string]any{first}, chained...)}
	conf := testkit.Must(libcni.NetworkConfFromBytes(testkit.Must(json.Marshal(list))(t)))(t)
	return &runtime{libcni.NewCNIConfigWithCacheDir(paths, t.TempDir(), &runner{node: n}), n, conf}
}

// pod makes a sandbox, and what the runtime tells plugins about it.
func (r *runtime) pod(t *testing.T, capabilities map[string]any) (*rig.Sandbox, *libcni.RuntimeConf) {
	t.Helper()
	s := testkit.Must(r.node.NewSandbox(t.Context(), rig.SandboxOptions{}))(t)
	return s, &libcni.RuntimeConf{
		ContainerID: s.ContainerID, NetNS: s.Path, IfName: s.IfName, CapabilityArgs: capabilities,
		Args: [][2]string{
			{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", s.Namespace}, {"K8S_POD_NAME", s.Name},
			{"K8S_POD_INFRA_CONTAINER_ID", s.ContainerID}, {"K8S_POD_UID", s.UID},
		},
	}
}

// add attaches a pod and returns its IPv4 address.
func (r *runtime) add(t *testing.T, rt *libcni.RuntimeConf) netip.Addr {
	t.Helper()
	raw := testkit.Must(r.AddNetworkList(t.Context(), r.list, rt))(t)
	result := testkit.Must(types100.NewResultFromResult(raw))(t)
	for _, ip := range result.IPs {
		if a, ok := netip.AddrFromSlice(ip.Address.IP); ok && a.Unmap().Is4() {
			return a.Unmap()
		}
	}
	t.Fatalf("no IPv4 address in %s", raw)
	return netip.Addr{}
}

// carrier matches the flags and the state that depend on a link's carrier. The kernel sets them some time after ADD.
var carrier = regexp.MustCompile(`NO-CARRIER,|,LOWER_UP| state [A-Z]+`)

// links are those of a node.
func links(t *testing.T, n *rig.Node) string {
	t.Helper()
	return carrier.ReplaceAllString(testkit.Must(n.Run(t.Context(), "ip", "-o", "link"))(t), "")
}

// state is what plugins leave on a node.
func state(t *testing.T, n *rig.Node) string {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "# ip -o link\n%s\n", links(t, n))
	for _, cmd := range [][]string{
		{"ip", "rule"}, {"ip", "route", "show", "table", "all", "proto", "30"}, {"tc", "qdisc"}, {"nft", "list", "ruleset"},
	} {
		fmt.Fprintf(&b, "# %s\n%s\n", strings.Join(cmd, " "), testkit.Must(n.Run(t.Context(), cmd[0], cmd[1:]...))(t))
	}
	return b.String()
}

func newNode(t *testing.T) (*rig.Rig, *rig.Node) {
	t.Helper()
	r := rigtest.New(t)
	testkit.Check(t, r.AddPool(t.Context(), "default", 4, rig.Dual("10.1.0.0/24", "fd00:1::/120")))
	return r, testkit.Must(r.AddNode(t.Context(), rig.NodeOptions{}))(t)
}

// A pod with a host port is reached through it from outside, from its node, from another
// pod of the node and from itself; nothing of it is left after DEL.
func TestHostPort(t *testing.T) {
	cluster, n := newNode(t)
	r := newRuntime(t, n, map[string]any{
		"type": "portmap", "capabilities": map[string]any{"portMappings": true}, "snat": true, "backend": "nftables",
	})
	ctx := t.Context()
	client, clientConf := r.pod(t, nil)
	r.add(t, clientConf)
	port := map[string]any{"portMappings": []map[string]any{{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}}
	// The first pod makes the plugin's table, which stays.
	without := links(t, n)
	first, firstConf := r.pod(t, port)
	r.add(t, firstConf)
	testkit.Check(t, r.DelNetworkList(ctx, r.list, firstConf), first.Close())
	testkit.Eventually(t, 10*time.Second, "the first pod's link is gone", func() error {
		if diff := cmp.Diff(without, links(t, n)); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
	before := state(t, n)
	server, rt := r.pod(t, port)
	addr := r.add(t, rt)
	l := testkit.Must(server.Listen(ctx, "tcp4", netip.AddrPortFrom(addr, 80).String()))(t)
	defer l.Close()
	go netlab.Serve(l, func(conn net.Conn) { _, _ = io.WriteString(conn, "hello") })

	for _, c := range []struct {
		from string
		dial netlab.Dialer
		to   string
	}{
		{"outside", cluster.DialOutside, net.JoinHostPort(n.Addr4.String(), "8080")},
		{"the node", n.Dial, net.JoinHostPort(n.Addr4.String(), "8080")},
		{"the node, by its loopback address", n.Dial, "127.0.0.1:8080"},
		{"another pod", client.Dial, net.JoinHostPort(n.Addr4.String(), "8080")},
		{"the pod itself", server.Dial, net.JoinHostPort(n.Addr4.String(), "8080")},
	} {
		t.Run("from "+c.from, func(t *testing.T) {
			testkit.Eventually(t, 10*time.Second, "an answer", func() error {
				ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(3*time.Second))
				defer cancel()
				conn, err := c.dial(ctx, "tcp4", c.to)
				if err != nil {
					return err
				}
				defer conn.Close()
				got, err := io.ReadAll(conn)
				if err == nil && string(got) != "hello" {
					err = fmt.Errorf("got %q", got)
				}
				return err
			})
		})
	}
	testkit.Check(t, r.CheckNetworkList(ctx, r.list, rt), r.DelNetworkList(ctx, r.list, rt), server.Close())
	sameAs(t, n, before)
}

// sameAs waits until a node is as before: Coil removes links in the background.
func sameAs(t *testing.T, n *rig.Node, before string) {
	t.Helper()
	testkit.Eventually(t, 10*time.Second, "the node is as before", func() error {
		if diff := cmp.Diff(before, state(t, n)); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
}

// Limits of bandwidth are on the pod's link, parameters of tuning are in the pod, CHECK
// accepts both, and DEL leaves nothing.
func TestBandwidthAndTuning(t *testing.T) {
	_, n := newNode(t)
	r := newRuntime(t, n,
		map[string]any{"type": "bandwidth", "capabilities": map[string]any{"bandwidth": true}},
		map[string]any{"type": "tuning", "sysctl": map[string]any{"net.core.somaxconn": "500"}, "mtu": 1400, "mac": "0a:00:00:00:00:01"},
	)
	ctx := t.Context()
	_, other := r.pod(t, nil) // which has a block of addresses made
	r.add(t, other)
	before := state(t, n)
	s, rt := r.pod(t, map[string]any{"bandwidth": map[string]any{
		"ingressRate": 10_000_000, "ingressBurst": 1_000_000, "egressRate": 20_000_000, "egressBurst": 1_000_000,
	}})
	addr := r.add(t, rt)
	after := state(t, n)
	for _, want := range []string{"rate 10Mbit", "rate 20Mbit"} {
		if !strings.Contains(after, want) {
			t.Errorf("%q is missing:\n%s", want, after)
		}
	}
	if got := testkit.Must(s.Run(ctx, "cat", "/proc/sys/net/core/somaxconn"))(t); strings.TrimSpace(got) != "500" {
		t.Errorf("somaxconn is %q, want 500", got)
	}
	if got := testkit.Must(s.Run(ctx, "ip", "link", "show", s.IfName))(t); !strings.Contains(got, "mtu 1400") || !strings.Contains(got, "0a:00:00:00:00:01") {
		t.Errorf("MTU is not 1400, or the MAC address not 0a:00:00:00:00:01: %s", got)
	}
	if _, err := n.Run(ctx, "busybox", "ping", "-c", "3", "-w", "10", addr.String()); err != nil {
		t.Error(err)
	}
	testkit.Check(t, r.CheckNetworkList(ctx, r.list, rt))
	testkit.Check(t, r.DelNetworkList(ctx, r.list, rt), s.Close())
	sameAs(t, n, before)
}

// GC by the runtime reaches Coil and every plugin behind it: a pod that the runtime doesn't
// know any more loses its address.
func TestGarbageCollection(t *testing.T) {
	_, n := newNode(t)
	r := newRuntime(t, n, map[string]any{
		"type": "portmap", "capabilities": map[string]any{"portMappings": true}, "snat": true, "backend": "nftables",
	})
	ctx := t.Context()
	kept, keptConf := r.pod(t, nil)
	r.add(t, keptConf)
	lost, lostConf := r.pod(t, nil)
	addr := r.add(t, lostConf)
	testkit.Check(t, lost.Close()) // with its network namespace, and without a DEL
	testkit.Check(t, r.GCNetworkList(ctx, r.list, &libcni.GCArgs{
		ValidAttachments: []types.GCAttachment{{ContainerID: kept.ContainerID, IfName: kept.IfName}},
	}))
	testkit.Eventually(t, 10*time.Second, "the lost pod's route is gone", func() error {
		routes, err := n.Run(ctx, "ip", "route", "show", "table", "116")
		if err == nil && strings.Contains(routes, addr.String()+" ") {
			err = errors.New(routes)
		}
		return err
	})
	testkit.Check(t, r.CheckNetworkList(ctx, r.list, keptConf), r.DelNetworkList(ctx, r.list, keptConf), kept.Close())
}
