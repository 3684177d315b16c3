package egress

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/audit"
	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// chain is a list of plugins: one that gives addresses, and Coil.
type chain struct {
	*lab
	first map[string]any
	path  string // of the plugins
}

// plugin runs one of the list, as a container runtime does.
func (c *chain) plugin(ctx context.Context, s *rig.Sandbox, command, program string, conf map[string]any) ([]byte, error) {
	stdin, err := json.Marshal(conf)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, program)
	cmd.Env = append(s.Env(command), "CNI_PATH="+c.path, "PATH=/usr/sbin:/usr/bin:/sbin:/bin")
	cmd.Stdin = bytes.NewReader(stdin)
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := c.node.Exec(cmd); err != nil {
		return nil, fmt.Errorf("%s %s: %w: %s", filepath.Base(program), command, err, out.Bytes())
	}
	return out.Bytes(), nil
}

func (c *chain) run(ctx context.Context, s *rig.Sandbox, command string, result []byte) ([]byte, error) {
	steps := []func(prev []byte) ([]byte, error){
		func([]byte) ([]byte, error) {
			return c.plugin(ctx, s, command, filepath.Join(c.path, c.first["type"].(string)), c.first)
		},
		func(prev []byte) ([]byte, error) {
			conf := map[string]any{"cniVersion": "1.0.0", "name": "other", "type": "coil", "socket": c.node.Socket(), "delQueueDir": c.node.DelQueueDir()}
			if prev != nil {
				conf["prevResult"] = json.RawMessage(prev)
			}
			return c.plugin(ctx, s, command, c.node.Plugin(), conf)
		},
	}
	if command == "DEL" {
		steps[0], steps[1] = steps[1], steps[0]
	}
	for _, step := range steps {
		out, err := step(result)
		if err != nil {
			return nil, err
		}
		if command == "ADD" {
			result = out
		}
	}
	return result, nil
}

// Behind the reference plugins, with no right on anything of IPAM.
func TestChained(t *testing.T) {
	for _, first := range []map[string]any{
		{"cniVersion": "1.0.0", "name": "other", "type": "ptp", "ipMasq": false,
			"ipam": map[string]any{"type": "host-local", "routes": []any{map[string]any{"dst": "0.0.0.0/0"}, map[string]any{"dst": "::/0"}},
				"ranges": []any{[]any{map[string]any{"subnet": "10.32.0.0/24"}}, []any{map[string]any{"subnet": "fd32::/64"}}}}},
		{"cniVersion": "1.0.0", "name": "other", "type": "bridge", "bridge": "other0", "isGateway": true,
			"ipam": map[string]any{"type": "host-local", "routes": []any{map[string]any{"dst": "0.0.0.0/0"}, map[string]any{"dst": "::/0"}},
				"ranges": []any{[]any{map[string]any{"subnet": "10.33.0.0/24"}}, []any{map[string]any{"subnet": "fd33::/64"}}}}},
	} {
		t.Run(first["type"].(string), func(t *testing.T) { testChained(t, first) })
	}
}

func testChained(t *testing.T, first map[string]any) {
	ctx := t.Context()
	testkit.Need(t, testkit.Netns)
	testkit.Need(t, testkit.APIServer)
	log := testkit.Must(audit.New(t.TempDir(), "coild"))(t)
	r := rigtest.NewWith(t, rig.Options{NoController: true, APIServerArgs: log.APIServerArgs()})
	for _, name := range []string{"coild-ipam", "coil-ipam-controller"} {
		if err := r.Core.RbacV1().ClusterRoleBindings().Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	n := testkit.Must(r.AddNode(ctx, rig.NodeOptions{CoildFlags: []string{"--enable-ipam=false"}}))(t)
	b := &build.Builder{Log: t.Output()}
	programs := testkit.Must(b.Programs(ctx, first["type"].(string), "host-local"))(t)
	c := &chain{lab: &lab{t, r, n}, first: first, path: programs.Dir("host-local")}
	first["ipam"].(map[string]any)["dataDir"] = t.TempDir()

	c.egress("gw", func(e *v2.Egress) { e.Spec.Destinations = []string{"192.0.2.0/24", "2001:db8::/32"} })
	plain := c.sandbox(rig.SandboxOptions{Name: "plain"})
	result, err := c.run(ctx, plain, "ADD", nil)
	c.must(err)
	if !strings.Contains(string(result), "10.3") || !strings.Contains(string(result), `"name":"eth0"`) && !strings.Contains(string(result), `"name": "eth0"`) {
		t.Errorf("the other plugin's result isn't passed on: %s", result)
	}
	c.await("a pod without annotation", plain, "192.0.2.1 eth0", "2001:db8::1 eth0")
	lost := c.sandbox(rig.SandboxOptions{Name: "lost", Annotations: asks("nope")})
	if _, err := c.run(ctx, lost, "ADD", nil); err == nil || !strings.Contains(err.Error(), "default/nope") {
		t.Errorf("ADD with an Egress that isn't there: %v", err)
	}
	_, err = c.run(ctx, lost, "DEL", nil)
	c.must(err)

	// Annotations that a running pod gets later, through restarts of coild.
	c.annotate(plain, "gw")
	c.await("annotation added", plain, "192.0.2.1 nowhere", "2001:db8::1 nowhere", "198.51.100.1 eth0")
	c.must(c.node.Restart(ctx))
	c.egress("gw", func(e *v2.Egress) { e.Spec.Destinations = []string{"198.51.100.0/24"} })
	c.await("changed after a restart", plain, "192.0.2.1 eth0", "198.51.100.1 nowhere")
	c.node.Coild.Kill()
	c.deleteEgress("gw")
	c.must(c.node.Start(ctx))
	c.event("Pod", "plain", "EgressMissing", "default/gw")
	c.await("deleted meanwhile", plain, "198.51.100.1 nowhere")
	c.annotate(plain, "")
	c.await("annotation removed", plain, "198.51.100.1 eth0")

	if rows, err := clients(ctx, n); err != nil || rows != 1 {
		t.Errorf("%d sandboxes are recorded, %v", rows, err)
	}
	// A DEL that comes while coild is away is done later.
	c.node.Coild.Kill()
	_, err = c.run(ctx, plain, "DEL", result)
	c.must(err)
	c.must(c.node.Start(ctx))
	testkit.Eventually(t, within, "the record is empty", func() error {
		rows, err := clients(ctx, n)
		if err == nil && rows > 0 {
			err = fmt.Errorf("%d sandboxes", rows)
		}
		return err
	})

	// Nothing of IPAM was asked for, nor is anything of it in the kernel.
	rs := testkit.Must(log.Requests("coild"))(t)
	for _, r := range rs {
		if strings.Contains(r.RequestURI, "addressblocks") || strings.Contains(r.RequestURI, "blockrequests") || strings.Contains(r.RequestURI, "addresspools") || r.ResponseStatus.Code == 403 {
			t.Errorf("coild did %s %s: %d", r.Verb, r.RequestURI, r.ResponseStatus.Code)
		}
	}
	if rules, err := n.Run(ctx, "ip", "rule"); err != nil || strings.Contains(rules, "lookup 116") || strings.Contains(rules, "proto 30") {
		t.Errorf("rules of the node, %v:\n%s", err, rules)
	}
	if logs := n.Coild.Logs(200); strings.Contains(logs, "forbidden") {
		t.Errorf("a right is missing:\n%s", logs)
	}
}

// clients counts the records of sandboxes.
func clients(ctx context.Context, n *rig.Node) (int, error) {
	out, err := exec.CommandContext(ctx, "sqlite3", "-readonly", n.Database(), "SELECT count(*) FROM clients").Output()
	if err != nil {
		return 0, err
	}
	rows := 0
	_, err = fmt.Sscan(string(out), &rows)
	return rows, err
}
