package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/selftest"
	"github.com/coil-net/coil/pkg/testkit"
)

// selftest runs coilctl selftest, and returns its exit code, its report and its lines.
func (e env) selftest(t *testing.T, args ...string) (int, selftest.Report, string) {
	t.Helper()
	var out, errOut bytes.Buffer
	began := time.Now()
	code := coilctl.Main(append([]string{"coilctl", "--kubeconfig=" + e.Kubeconfig(), "selftest", "-o", "json"}, args...), strings.NewReader(""), &out, &errOut)
	t.Logf("coilctl selftest %s took %s:\n%s", strings.Join(args, " "), time.Since(began), errOut.String())
	var r selftest.Report
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatalf("the report: %v: %s", err, out.String())
	}
	return code, r, errOut.String()
}

// leads waits until a controller leads by a lease: it has renewed that just now.
func (e env) leads(t *testing.T, lease string) {
	t.Helper()
	testkit.Eventually(t, time.Minute, "a controller leads by "+lease, func() error {
		l, err := e.core.CoordinationV1().Leases("kube-system").Get(t.Context(), lease, metav1.GetOptions{})
		if err == nil && (l.Spec.RenewTime == nil || time.Since(l.Spec.RenewTime.Time) > 5*time.Second) {
			err = fmt.Errorf("it was renewed at %s", l.Spec.RenewTime)
		}
		return err
	})
}

// drops has a node drop packets that it forwards, by a rule of nftables that isn't Coil's. The result lets them through again.
func (e env) drops(t *testing.T, node, rule string) (heal func()) {
	t.Helper()
	script := "add table inet fault\nadd chain inet fault forward { type filter hook forward priority 0; }\nadd rule inet fault forward " + rule + " drop\n"
	testkit.Must(e.Exec(t.Context(), node, "sh", "-c", "nft -f - <<'END'\n"+script+"END"))(t)
	there := true
	heal = func() {
		if there {
			there = false
			testkit.Must(e.Exec(context.WithoutCancel(t.Context()), node, "nft", "delete", "table", "inet", "fault"))(t)
		}
	}
	t.Cleanup(heal)
	return heal
}

// coilctl selftest names the nodes between which packets get lost, and keeps their pods; the next one removes these, and finds the addresses, routes, MTU and a Service of all nodes as they should
// be. It leaves nothing.
func TestSelftest(t *testing.T) {
	s := newServices(t)
	testkit.Check(t, s.WaitReady(t.Context()))
	s.leads(t, plan.IPAMLease) // other tests end nodes with the one that led: pods would wait for blocks until another one does
	nodes := s.Nodes()
	args := []string{"--pool=" + s.ns, "--service-pool=" + s.pool}
	heal := []func(){s.drops(t, nodes[1], fmt.Sprintf("tcp dport %d", selftest.Port)), s.drops(t, nodes[2], "meta length > 1400")}
	code, report, _ := s.selftest(t, append(args, "--timeout=30s", "--keep-failed")...)
	wrong := map[string]string{}
	for _, c := range report.Checks {
		if c.State == selftest.Wrong {
			wrong[c.Check+" "+c.Subject] = c.Seen + " -> " + c.Do
		}
	}
	if code != 1 {
		t.Errorf("with packets that get lost the exit code is %d", code)
	}
	arrow := func(from, to int) string { return nodes[from] + " -> " + nodes[to] }
	for what, words := range map[string]string{
		"routes " + arrow(0, 1): "TCP to 10.66.0.", "routes " + arrow(1, 2): "no answer", "mtu " + arrow(2, 0): "IPv4: a packet of 1500 bytes, which eth0 takes, gets lost on its way: no answer; IPv6: a packet of 1500 bytes",
	} {
		if text := wrong[what]; !strings.Contains(text, words) || !strings.Contains(text, "coilctl why pod "+report.Namespace+"/node-") {
			t.Errorf("%s: %q, want %q", what, text, words)
		}
	}
	for what, text := range wrong {
		if strings.HasPrefix(what, selftest.CheckServices) { // its way is by the node that has the address
			continue
		}
		if !strings.Contains(what, nodes[1]) && !strings.HasPrefix(what, "mtu ") || strings.Contains(text, "UDP to") {
			t.Errorf("%s has failed, too: %s", what, text)
		}
	}
	kept := testkit.Must(s.core.CoreV1().Pods(report.Namespace).List(t.Context(), metav1.ListOptions{}))(t)
	if len(kept.Items) != len(nodes) {
		t.Errorf("%d pods are kept", len(kept.Items))
	}

	for _, f := range heal {
		f()
	}
	first := report.Namespace
	code, report, said := s.selftest(t, args...)
	// Of three pods three pairs are neighbours, and two are not.
	if code != 0 || report.Count(selftest.Right) != 3+5+3+1 || report.Count(selftest.Wrong)+report.Count(selftest.Skipped) != 0 {
		t.Errorf("exit code %d, %+v", code, report)
	}
	if !strings.Contains(said, "Namespace "+first+" of an earlier selftest is removed\n") {
		t.Errorf("it doesn't say that %s is removed", first)
	}
	for _, ns := range []string{first, report.Namespace} {
		if l := testkit.Must(s.core.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{}))(t); len(l.Items) > 0 {
			t.Errorf("Namespace %s has %d pods", ns, len(l.Items))
		}
		testkit.Eventually(t, time.Minute, "Kubernetes has removed Namespace "+ns, func() error {
			_, err := s.core.CoreV1().Namespaces().Get(t.Context(), ns, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return nil
			}
			return fmt.Errorf("it is there: %v", err)
		})
	}
	testkit.Eventually(t, time.Minute, "the address of the Service is given back", func() error {
		blocks, err := s.blocksOf(t, s.pool)
		if err == nil && len(blocks) > 0 {
			err = fmt.Errorf("there is %s", blocks[0].Name)
		}
		return err
	})
}
