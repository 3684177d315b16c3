package manifests

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// testTakeOver follows "Coming from Coil 2.x" of manifests/README.md over workloads of the
// shape that Coil 2.x had: same names and selectors, other programs, flags and volumes.
// Nothing of them may stay, whoever installed them.
func testTakeOver(t *testing.T) {
	empty := startAPI(t)
	apply(t, empty, ".")
	fresh := specs(t, empty)
	old := filepath.Join(t.TempDir(), "old.yaml")
	if err := os.WriteFile(old, []byte(earlier), 0o600); err != nil {
		t.Fatal(err)
	}
	api := startAPI(t)
	for _, tt := range []struct {
		name    string
		install []string
	}{
		{"kubectl apply", []string{"apply", "-f", old}},
		{"kubectl create", []string{"create", "-f", old}},
		{"a tool that updates", []string{"create", "--field-manager=helm", "-f", old}},
		{"server-side apply", []string{"apply", "--server-side", "--field-manager=argocd-controller", "-f", old}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mustKubectl(t, api, "delete", "--ignore-not-found", "-f", old)
			mustKubectl(t, api, tt.install...)
			takeOver(t, api)
			if diff := cmp.Diff(fresh, specs(t, api)); diff != "" {
				t.Errorf("workloads (-fresh +taken over):\n%s", diff)
			}
		})
	}
}

// TestTakeOverWebhooks: what the manual says of the webhooks of 2.x is so, both that they
// block and that the given commands end that.
func TestTakeOverWebhooks(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	api := startAPI(t)
	apply(t, api, ".")
	mustKubectl(t, api, "wait", "--for=condition=Established", "--timeout=30s", "crd/addresspools.coil.cybozu.com")
	dir := t.TempDir()
	hooks, pool := filepath.Join(dir, "hooks.yaml"), filepath.Join(dir, "pool.yaml")
	if err := errors.Join(os.WriteFile(hooks, []byte(earlierWebhooks), 0o600), os.WriteFile(pool, []byte(aPool), 0o600)); err != nil {
		t.Fatal(err)
	}
	mustKubectl(t, api, "create", "-f", hooks)
	// The API server learns of webhooks, and of their end, a moment later.
	create := []string{"create", "--dry-run=server", "-f", pool}
	testkit.Eventually(t, 20*time.Second, "the webhooks block", func() error {
		if _, err := api.Kubectl(t.Context(), create...); err == nil || !strings.Contains(err.Error(), "failed calling webhook") {
			return fmt.Errorf("create: %w, want that a webhook can't be called", err)
		}
		return nil
	})
	for _, kind := range []string{"mutating", "validating"} {
		mustKubectl(t, api, "delete", kind+"webhookconfigurations",
			"coilv2-"+kind+"-ipam-webhook-configuration", "coilv2-"+kind+"-egress-webhook-configuration")
	}
	testkit.Eventually(t, 20*time.Second, "pools can be made", func() error {
		_, err := api.Kubectl(t.Context(), create...)
		return err
	})
}

func mustKubectl(t *testing.T, api *controlplane.API, args ...string) string {
	t.Helper()
	out, err := api.Kubectl(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// takeOver does what the manual says.
func takeOver(t *testing.T, api *controlplane.API) {
	t.Helper()
	live := mustKubectl(t, api, "-n", "kube-system", "get", "daemonset/coild", "deployment/coil-ipam-controller", "-o", "yaml")
	file := filepath.Join(t.TempDir(), "coil-2.yaml")
	if err := os.WriteFile(file, []byte(live), 0o600); err != nil {
		t.Fatal(err)
	}
	mustKubectl(t, api, "apply", "set-last-applied", "--create-annotation=true", "-f", file)
	apply(t, api, ".")
}

// earlier has what of an installation of 2.x matters to an apply over it.
const earlier = `
apiVersion: v1
kind: ConfigMap
metadata: {name: coil-config, namespace: kube-system}
data: {cni_netconf: '{"cniVersion": "0.4.0", "name": "k8s-pod-network", "plugins": [{"type": "coil", "socket": "/run/coild.sock"}]}'}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: coild, namespace: kube-system}
spec:
  selector: {matchLabels: {app.kubernetes.io/name: coil, app.kubernetes.io/component: coild}}
  template:
    metadata: {labels: {app.kubernetes.io/name: coil, app.kubernetes.io/component: coild}}
    spec:
      serviceAccountName: coild
      hostNetwork: true
      hostPID: true
      tolerations:
      - {effect: NoSchedule, operator: Exists}
      - {effect: NoExecute, operator: Exists}
      initContainers:
      - name: coil-installer
        image: example.org/coil:2.15
        command: ["coil-installer"]
        env:
        - {name: CNI_NETCONF, valueFrom: {configMapKeyRef: {name: coil-config, key: cni_netconf}}}
        securityContext: {privileged: true}
        volumeMounts:
        - {mountPath: /host/opt/cni/bin, name: cni-bin-dir}
        - {mountPath: /host/etc/cni/net.d, name: cni-net-dir}
      containers:
      - name: coild
        image: example.org/coil:2.15
        command: ["coild"]
        args: ["--zap-stacktrace-level=panic", "--backend=nftables"]
        env:
        - {name: COIL_NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
        securityContext: {privileged: true}
        ports:
        - {name: metrics, containerPort: 9384, protocol: TCP}
        - {name: health, containerPort: 9385, protocol: TCP}
        livenessProbe: {httpGet: {path: /healthz, port: health, host: localhost}}
        resources: {requests: {cpu: 100m, memory: 200Mi}, limits: {memory: 400Mi}}
        volumeMounts:
        - {mountPath: /run, name: run, mountPropagation: HostToContainer}
        - {mountPath: /lib/modules, name: modules, readOnly: true}
        - {mountPath: /run/xtables.lock, name: xtables}
      volumes:
      - {name: cni-bin-dir, hostPath: {path: /opt/cni/bin}}
      - {name: cni-net-dir, hostPath: {path: /etc/cni/net.d}}
      - {name: run, hostPath: {path: /run}}
      - {name: modules, hostPath: {path: /lib/modules}}
      - {name: xtables, hostPath: {path: /run/xtables.lock, type: FileOrCreate}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: coil-ipam-controller, namespace: kube-system}
spec:
  replicas: 2
  selector: {matchLabels: {app.kubernetes.io/name: coil, app.kubernetes.io/component: coil-ipam-controller}}
  template:
    metadata: {labels: {app.kubernetes.io/name: coil, app.kubernetes.io/component: coil-ipam-controller}}
    spec:
      serviceAccountName: coil-ipam-controller
      hostNetwork: true
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
          - topologyKey: kubernetes.io/hostname
            labelSelector: {matchLabels: {app.kubernetes.io/name: coil, app.kubernetes.io/component: coil-ipam-controller}}
      securityContext: {runAsNonRoot: true, runAsUser: 10000}
      containers:
      - name: coil-ipam-controller
        image: example.org/coil:2.15
        command: ["coil-ipam-controller"]
        args: ["--zap-stacktrace-level=panic", "--cert-dir=/certs", "--enable-cert-rotation=true"]
        ports:
        - {name: metrics, containerPort: 9386, protocol: TCP}
        - {name: health, containerPort: 9387, protocol: TCP}
        - {name: webhook, containerPort: 9443, protocol: TCP}
        volumeMounts:
        - {mountPath: /certs, name: cert}
      volumes:
      - {name: cert, secret: {defaultMode: 420, secretName: coilv2-ipam-webhook-server-cert}}
`

// earlierWebhooks are as those of 2.x, whose server is gone.
const earlierWebhooks = `apiVersion: admissionregistration.k8s.io/v1
kind: MutatingWebhookConfiguration
metadata: {name: coilv2-mutating-ipam-webhook-configuration}
webhooks:
- name: maddresspools.kb.io
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  clientConfig: {service: {name: coilv2-ipam-webhook-service, namespace: kube-system, path: /mutating}}
  rules:
  - {apiGroups: [coil.cybozu.com], apiVersions: [v2], operations: [CREATE, UPDATE], resources: [addresspools]}
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingWebhookConfiguration
metadata: {name: coilv2-mutating-egress-webhook-configuration}
webhooks:
- name: megresses.kb.io
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  clientConfig: {service: {name: coilv2-egress-webhook-service, namespace: kube-system, path: /mutating}}
  rules:
  - {apiGroups: [coil.cybozu.com], apiVersions: [v2], operations: [CREATE, UPDATE], resources: [egresses]}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: coilv2-validating-ipam-webhook-configuration}
webhooks:
- name: vaddresspools.kb.io
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  clientConfig: {service: {name: coilv2-ipam-webhook-service, namespace: kube-system, path: /validating}}
  rules:
  - {apiGroups: [coil.cybozu.com], apiVersions: [v2], operations: [CREATE, UPDATE], resources: [addresspools]}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: coilv2-validating-egress-webhook-configuration}
webhooks:
- name: vegresses.kb.io
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  clientConfig: {service: {name: coilv2-egress-webhook-service, namespace: kube-system, path: /validating}}
  rules:
  - {apiGroups: [coil.cybozu.com], apiVersions: [v2], operations: [CREATE, UPDATE], resources: [egresses]}
`

const aPool = `
apiVersion: coil.cybozu.com/v2
kind: AddressPool
metadata: {name: default}
spec: {subnets: [{ipv4: 10.1.0.0/16}]}
`
