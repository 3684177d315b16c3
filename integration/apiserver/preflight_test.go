package apiserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/pkg/migrate/survey"
	"github.com/coil-net/coil/pkg/plan/preflight"
	"github.com/coil-net/coil/pkg/testkit"
)

// coil2 is what of Coil 2.x preflight looks at, besides objects of its kinds.
const coil2 = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: coilv2-validating-ipam-webhook-configuration}
webhooks:
- name: vaddresspool.kb.io
  admissionReviewVersions: [v1]
  sideEffects: None
  clientConfig: {service: {name: coilv2-ipam-webhook-service, namespace: kube-system}}
  rules: [{apiGroups: [coil.cybozu.com], apiVersions: [v2], operations: [CREATE], resources: [addresspools]}]
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: coild, namespace: kube-system}
spec:
  selector: {matchLabels: {app.kubernetes.io/component: coild}}
  template:
    metadata: {labels: {app.kubernetes.io/component: coild}}
    spec: {containers: [{name: coild, image: "example.org/coil:2.15", command: [coild]}]}
---
apiVersion: v1
kind: Node
metadata: {name: worker}
`

// TestPreflight reads clusters without and with Coil from a real API server.
func TestPreflight(t *testing.T) {
	t.Parallel() // it has API servers of its own
	eachVersion(t, func(t *testing.T, version string) {
		api := own(t, controlplane.Options{KubernetesVersion: version})
		cfg := api.RESTConfig()
		core := testkit.Must(kubernetes.NewForConfig(cfg))(t)
		clients := survey.Clients{
			Kube: core, Coil: testkit.Must(versioned.NewForConfig(cfg))(t), Dynamic: testkit.Must(dynamic.NewForConfig(cfg))(t),
		}
		judge := func(t *testing.T) preflight.Report {
			t.Helper()
			c := testkit.Must(survey.Read(t.Context(), clients))(t)
			c.This, c.ConfName = "v3.0.0", "10-coil.conflist"
			return preflight.Judge(c)
		}
		blockers := func(r preflight.Report) (all []string) {
			for _, f := range r.Findings {
				if f.Severity == preflight.Blocker {
					all = append(all, f.Subject)
				}
			}
			return all
		}
		if r := judge(t); r.Installed != "no Coil" || blockers(r) != nil {
			t.Errorf("an empty cluster:\n%s", r)
		}
		testkit.Check(t, installCRDs(t.Context(), cfg, withoutRules))
		file := t.TempDir() + "/coil2.yaml"
		testkit.Check(t, os.WriteFile(file, []byte(coil2), 0o600))
		testkit.Must(api.Kubectl(t.Context(), "apply", "--filename=testdata/objects-2.x.yaml"))(t)
		testkit.Must(clients.Dynamic.Resource(addressPools).Create(t.Context(),
			poolKind.named(t, "large-blocks", `spec: {blockSizeBits: 20, subnets: [{ipv6: "fd00::/96"}]}`), metav1.CreateOptions{}))(t)
		testkit.Must(api.Kubectl(t.Context(), "apply", "--filename="+file))(t)
		r := judge(t)
		want := []string{"AddressPool large-blocks", "ValidatingWebhookConfiguration coilv2-validating-ipam-webhook-configuration"}
		if got := blockers(r); !slices.Equal(got, want) || r.Installed != "Coil 2.x example.org/coil:2.15" {
			t.Errorf("blockers are %q, want %q; the report:\n%s", got, want, r)
		}
		t.Logf("the report:\n%s", r)

		t.Run("no pod outlives its node's look", func(t *testing.T) { testProbePods(t, core) })
	})
}

// testProbePods lets a node be looked at that has no kubelet.
func testProbePods(t *testing.T, core *kubernetes.Clientset) {
	pods := core.CoreV1().Pods("kube-system")
	nodes := []*corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "worker"}}}
	none := func(t *testing.T) {
		t.Helper()
		if left := testkit.Must(pods.List(t.Context(), metav1.ListOptions{}))(t).Items; len(left) > 0 {
			t.Errorf("%d pods are left, such as %s", len(left), left[0].Name)
		}
	}
	p := survey.Probes{Pods: pods, Image: "localhost/coil:dev", Timeout: time.Second}
	if got := p.Run(t.Context(), nodes)["worker"]; got.Err == nil || !strings.Contains(got.Err.Error(), "not within 1s") {
		t.Errorf("result %+v, error %v", got.Result, got.Err)
	}
	none(t)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan preflight.Probe)
	go func() {
		p.Timeout = time.Hour
		done <- p.Run(ctx, nodes)["worker"]
	}()
	testkit.Eventually(t, 20*time.Second, "a pod", func() error {
		list, err := pods.List(t.Context(), metav1.ListOptions{})
		if err == nil && len(list.Items) != 1 {
			err = fmt.Errorf("%d pods", len(list.Items))
		}
		return err
	})
	cancel()
	if got := <-done; !errors.Is(got.Err, context.Canceled) {
		t.Errorf("error %v, want that it was cancelled", got.Err)
	}
	none(t)
}
