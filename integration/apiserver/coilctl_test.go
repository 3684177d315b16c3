package apiserver

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/plan/addressmap"
	"github.com/coil-net/coil/pkg/plan/health"
	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/testkit"
)

// coilctl draws a pool with a block, and has findings until the Node is ready.
func TestCoilctl(t *testing.T) {
	c := ipamCluster(t)
	c.run(t, c.serviceAccount(t), options())
	kubeconfig := writeKubeconfig(t, c.admin)
	run := func(args ...string) (code int, out, errOut string) {
		t.Helper()
		var o, e bytes.Buffer
		code = coilctl.Main(append([]string{"/usr/local/bin/kubectl-coil", "--kubeconfig=" + kubeconfig}, args...), strings.NewReader(""), &o, &e)
		return code, o.String(), e.String()
	}
	wants := func(code int, out, errOut string, args ...string) {
		t.Helper()
		gotCode, gotOut, gotErr := run(args...)
		if diff := cmp.Diff([]string{out, errOut}, []string{gotOut, gotErr}); diff != "" || gotCode != code {
			t.Errorf("coilctl %s: exit code %d, want %d; -want +got:\n%s", strings.Join(args, " "), gotCode, code, diff)
		}
	}
	c.pool(t, "blue", 2, v4("10.0.0.0/28"))
	n := c.node(t, "n1")
	c.ask(t, "r1", n, "blue")
	if r := c.answer(t, "r1"); r.Status.AddressBlockName != "blue-0" {
		t.Fatalf("the node got %+v", r.Status)
	}
	b := c.block(t, "blue-0")
	b.Status.Allocated = 3
	testkit.Must(c.coil.CoilV2().AddressBlocks().UpdateStatus(t.Context(), b, metav1.UpdateOptions{}))(t)
	testkit.Eventually(t, 20*time.Second, "the pool tells what is in use", func() error {
		p, err := c.coil.CoilV2().AddressPools().Get(t.Context(), "blue", metav1.GetOptions{})
		if err == nil && p.Status.Addresses.Summary != "3/16" {
			err = fmt.Errorf("it says %+v", p.Status)
		}
		return err
	})

	const drawn = "AddressPool blue\n10.0.0.0/28: 1 of 4 blocks held, 3 of their 4 addresses in use\n10.0.0.0  ▇···\n\n" +
		"each cell is a block of 4 addresses: · nobody has, ▁ to █ held by nodes, by addresses in use; F floating, c cooling down\n"
	wants(0, "NAME   BLOCKS   ADDRESSES   FLOATING   COOLING   ANNOUNCE   ATTENTION\nblue   1/4      3/16        0          0         Route\n", "", "pools", "blue")
	wants(0, drawn, "", "pools", "blue", "--map")
	wants(1, "", "error: there is no AddressPool red, nor green\n", "pools", "red", "blue", "green")
	wants(1, "", "error: --cells can't be 0: it must be 1 or more\n", "pools", "--map", "--cells=0")
	var maps []addressmap.Map
	if code, out, errOut := run("pools", "--map", "-o", "json", "blue"); code != 0 || json.Unmarshal([]byte(out), &maps) != nil || len(maps) != 1 || maps[0].Subnets[0].Cells[0].Holders[0] != "n1" {
		t.Errorf("a map as JSON: %d, %s%s", code, out, errOut)
	}
	svg := filepath.Join(t.TempDir(), "blue.svg")
	wants(0, "", "", "pools", "blue", "--svg="+svg)
	if text := string(testkit.Must(os.ReadFile(svg))(t)); !strings.HasPrefix(text, "<svg ") || !strings.Contains(text, "3 of their 4 addresses in use; n1</title>") {
		t.Errorf("the SVG is %s", text)
	}

	// The Node has no kubelet, then no coild, then one that isn't ready.
	findings := func() (all []string) {
		t.Helper()
		code, out, errOut := run("status", "-o", "json")
		var seen struct{ Findings []health.Finding }
		if err := json.Unmarshal([]byte(out), &seen); err != nil {
			t.Fatalf("coilctl status: %v, %s%s", err, out, errOut)
		}
		if wrong := len(seen.Findings) > 0; wrong != (code == 1) || wrong != strings.Contains(errOut, "needs attention") {
			t.Errorf("coilctl status: exit code %d with %+v: %s", code, seen.Findings, errOut)
		}
		for _, f := range seen.Findings {
			all = append(all, f.Object()+": "+f.Reason)
		}
		return all
	}
	if diff := cmp.Diff([]string{"Node n1: NotReady"}, findings()); diff != "" {
		t.Error(diff)
	}
	n = testkit.Must(c.core.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{}))(t)
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	testkit.Must(c.core.CoreV1().Nodes().UpdateStatus(t.Context(), n, metav1.UpdateOptions{}))(t)
	testkit.Eventually(t, 20*time.Second, "the API server's cache has the status", func() error {
		if left := findings(); len(left) > 0 {
			return fmt.Errorf("there are %q", left)
		}
		return nil
	})
	code, out, errOut := run("status", "--wait=1s")
	if code != 0 || errOut != "" || !strings.Contains(out, "AddressBlock          1       fine\n") || !strings.Contains(out, "Egress                0       none\n") {
		t.Errorf("coilctl status: %d, %s%s", code, out, errOut)
	}
	wants(0, "NAME   READY   COILD   BLOCKS   ADDRESSES   FLOATING\nn1     True    False   1        3/4         0\n", "", "nodes", "n1")
	wants(0, "", "no floating addresses found\n", "addresses")
	wants(0, "[]\n", "", "egresses", "-o", "yaml")
	wants(0, "", "no Services of the type LoadBalancer that Coil serves found\n", "services")
	wants(1, "", "error: there is no node n2\n", "nodes", "n2")
	wants(1, "", "error: unknown command \"n1\" for \"kubectl coil status\"\n", "status", "n1")

	// The same again, followed: a table has what comes, changes and goes.
	var blocks []inventory.Block
	if code, out, errOut := run("blocks", "--pool=blue", "-o", "json"); code != 0 || json.Unmarshal([]byte(out), &blocks) != nil || len(blocks) != 1 || blocks[0].Allocated != 3 ||
		time.Since(blocks[0].Changed.Time) > time.Hour {
		t.Errorf("the blocks: %d, %s%s", code, out, errOut)
	}
	lines, interrupt := watchBy(t, kubeconfig, "blocks", "-o", "json")
	wantsLine(t, lines, `{"type":"ADDED","object":{"name":"blue-0",`, `"allocated":3,`)
	b = c.block(t, "blue-0")
	b.Status.Allocated = 1
	testkit.Must(c.coil.CoilV2().AddressBlocks().UpdateStatus(t.Context(), b, metav1.UpdateOptions{}))(t)
	wantsLine(t, lines, `{"type":"MODIFIED","object":{"name":"blue-0",`, `"allocated":1,`)
	testkit.Check(t, c.drop(t.Context(), b))
	wantsLine(t, lines, `{"type":"DELETED","object":{"name":"blue-0",`, "")
	interrupt()
}
