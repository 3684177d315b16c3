package manifests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// testSwitch does what README.md says under "Coming from Coil 2.x" over an installation of the
// shape that Coil 2.x had, whoever made it. Nothing of its programs may stay, everything of its
// custom resources must.
func testSwitch(t *testing.T) {
	steps := commands(t, "Coming from Coil 2.x")
	empty := startAPI(t)
	apply(t, empty, ".")
	fresh := specs(t, empty)
	for _, tt := range []struct {
		name    string
		install []string
		// selector is added to the selectors of 2.x, as tools do that label everything.
		selector string
	}{
		{name: "that was applied", install: []string{"apply"}},
		{name: "that was created", install: []string{"create"}, selector: ", example.org/release: coil"},
		{name: "that another manager applied", install: []string{"apply", "--server-side", "--field-manager=helm"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			api := startAPI(t)
			install := func(file string) {
				t.Helper()
				run(t, api, append(tt.install, "-f", file)...)
			}
			install(writeFile(t, "crds.yaml", earlierDefinitions()))
			run(t, api, "wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
			run(t, api, "create", "namespace", "internet")
			objects := filepath.Join(manifestsDir(t), "../integration/apiserver/testdata/objects-2.x.yaml")
			// A definition that is established may be unknown for another moment.
			testkit.Eventually(t, 10*time.Second, "objects of 2.x", func() error {
				_, err := api.Kubectl(t.Context(), "apply", "--server-side", "--field-manager=users", "-f", objects)
				return err
			})
			install(writeFile(t, "programs.yaml", strings.ReplaceAll(earlier, ", selected: yes", tt.selector)+earlierRest))
			before := names(t, api)
			install(writeFile(t, "webhooks.yaml", earlierWebhooks()))
			testkit.Eventually(t, 10*time.Second, "webhooks without a server refuse writes", func() error {
				return refused(t, api)
			})

			orphanInstead(t, api)
			for _, c := range steps {
				if strings.Join(c, " ") == "apply -k ." {
					c = []string{"apply", "-k", manifestsDir(t)}
				}
				run(t, api, c...)
			}
			if diff := cmp.Diff(fresh, specs(t, api)); diff != "" {
				t.Errorf("workloads (-fresh +switched):\n%s", diff)
			}
			if diff := cmp.Diff(before, names(t, api)); diff != "" {
				t.Errorf("custom resources (-before +after):\n%s", diff)
			}
			for _, kind := range []string{"addresspools", "addressblocks", "blockrequests", "egresses"} {
				args := []string{"annotate", kind, "--all", "example.org/switched=yes"}
				if kind == "egresses" {
					args = append(args, "--all-namespaces")
				}
				run(t, api, args...)
			}
			if out, err := api.Kubectl(t.Context(), "diff", "-k", manifestsDir(t)); err != nil {
				t.Errorf("what was applied differs from what is there: %v\n%s", err, out)
			}
			// A new DaemonSet would take the pod for one of its own, by the number of its generation.
			if labels := run(t, api, "-n", namespace, "get", "pod", "coild-earlier", "-o", "jsonpath={.metadata.labels}"); strings.Contains(labels, "generation") {
				t.Errorf("the pod of the earlier coild has the labels %s", labels)
			}
			checkAccess(t, api, variants[0])
		})
	}
}

// commands are the kubectl commands of a section of README.md, in order.
func commands(t *testing.T, section string) (all [][]string) {
	t.Helper()
	readme, err := os.ReadFile(filepath.Join(manifestsDir(t), "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(readme), "\n## "+section+"\n")
	text, _, _ = strings.Cut(text, "\n## ")
	for line := range strings.Lines(strings.ReplaceAll(text, "\\\n", "")) {
		if c, ok := strings.CutPrefix(strings.TrimSpace(line), "$ kubectl "); ok {
			all = append(all, strings.Fields(c))
		}
	}
	if !found || len(all) < 3 {
		t.Fatalf("README.md has the commands %q under %q", all, section)
	}
	return all
}

func run(t *testing.T, api *controlplane.API, args ...string) string {
	t.Helper()
	out, err := api.Kubectl(t.Context(), args...)
	if err != nil {
		t.Fatalf("kubectl %s: %v", strings.Join(args, " "), err)
	}
	return string(out)
}

// names are the custom resources.
func names(t *testing.T, api *controlplane.API) string {
	t.Helper()
	return run(t, api, "get", "addresspools,addressblocks,blockrequests,egresses", "--all-namespaces", "-o", "name")
}

// refused returns nil when pools can't be written because of a webhook.
func refused(t *testing.T, api *controlplane.API) error {
	_, err := api.Kubectl(t.Context(), "annotate", "addresspools", "--all", "--overwrite", "example.org/try=1", "--dry-run=server")
	if err != nil && strings.Contains(err.Error(), "failed calling webhook") {
		return nil
	}
	return diffError("the write was answered " + errText(err))
}

func errText(err error) string {
	if err == nil {
		return "without an error"
	}
	return err.Error()
}

// orphanInstead does the part of the garbage collector, which isn't there: it lets go of
// workloads that were deleted without their pods.
func orphanInstead(t *testing.T, api *controlplane.API) {
	client := dynamic.NewForConfigOrDie(api.RESTConfig())
	release := func(resource schema.GroupVersionResource) {
		list, err := client.Resource(resource).Namespace(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return // the next round sees it
		}
		for _, o := range list.Items {
			if o.GetDeletionTimestamp() != nil {
				// If it fails, the next round does it.
				_, _ = client.Resource(resource).Namespace(namespace).Patch(t.Context(), o.GetName(), types.MergePatchType,
					[]byte(`{"metadata": {"finalizers": null}}`), metav1.PatchOptions{})
			}
		}
	}
	ended, end := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-end:
				return
			case <-tick.C:
				release(schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "daemonsets"})
				release(schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"})
				release(schema.GroupVersionResource{Group: "policy", Version: "v1", Resource: "poddisruptionbudgets"})
			}
		}
	}()
	t.Cleanup(func() { close(end); <-ended })
}

// earlierDefinitions are definitions of the names and scopes that those of 2.x have.
func earlierDefinitions() string {
	var all strings.Builder
	for _, d := range []struct{ kind, plural, scope string }{
		{"AddressPool", "addresspools", "Cluster"}, {"AddressBlock", "addressblocks", "Cluster"},
		{"BlockRequest", "blockrequests", "Cluster"}, {"Egress", "egresses", "Namespaced"},
	} {
		all.WriteString(strings.NewReplacer("KIND", d.kind, "PLURAL", d.plural, "SINGULAR", strings.ToLower(d.kind), "SCOPE", d.scope).Replace(`---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: PLURAL.coil.cybozu.com}
spec:
  group: coil.cybozu.com
  scope: SCOPE
  names: {kind: KIND, listKind: KINDList, plural: PLURAL, singular: SINGULAR}
  versions:
  - name: v2
    served: true
    storage: true
    subresources: {status: {}}
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`))
	}
	return all.String()
}

// earlierWebhooks are the webhook configurations of 2.x.
func earlierWebhooks() string {
	var all strings.Builder
	for _, w := range []struct{ kind, what, program, plural string }{
		{"Mutating", "mutating", "ipam", "addresspools"}, {"Validating", "validating", "ipam", "addresspools"},
		{"Mutating", "mutating", "egress", "egresses"}, {"Validating", "validating", "egress", "egresses"},
	} {
		all.WriteString(strings.NewReplacer("KIND", w.kind, "WHAT", w.what, "PROGRAM", w.program, "PLURAL", w.plural).Replace(`---
apiVersion: admissionregistration.k8s.io/v1
kind: KINDWebhookConfiguration
metadata: {name: coilv2-WHAT-PROGRAM-webhook-configuration}
webhooks:
- name: PLURAL.WHAT.coil.cybozu.com
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  clientConfig: {service: {name: coilv2-PROGRAM-webhook-service, namespace: kube-system, path: /WHAT}}
  rules:
  - {apiGroups: [coil.cybozu.com], apiVersions: [v2], operations: [CREATE, UPDATE, DELETE], resources: [PLURAL]}
`))
	}
	return all.String()
}

// earlierRest has rights to more than the programs need now, a budget of the other kind, and a pod
// of the DaemonSet, which nobody else makes here.
const earlierRest = `
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: coild, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: coild}
rules:
- {apiGroups: ["*"], resources: ["*"], verbs: ["*"]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: coild}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: coild}
subjects:
- {kind: ServiceAccount, name: coild, namespace: kube-system}
---
apiVersion: v1
kind: Pod
metadata:
  name: coild-earlier
  namespace: kube-system
  labels: {app.kubernetes.io/name: coil, app.kubernetes.io/component: coild, pod-template-generation: "1"}
spec:
  serviceAccountName: coild
  containers: [{name: coild, image: "example.org/coil:2.15"}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: coil-ipam-controller, namespace: kube-system}
spec:
  minAvailable: 1
  selector: {matchLabels: {app.kubernetes.io/name: coil, app.kubernetes.io/component: coil-ipam-controller}}
`

// earlier has what of an installation of 2.x matters to an apply over it.
// Of labels and selectors, ", selected: yes" is replaced.
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
  selector: {matchLabels: {app.kubernetes.io/name: coil, app.kubernetes.io/component: coild, selected: yes}}
  template:
    metadata: {labels: {app.kubernetes.io/name: coil, app.kubernetes.io/component: coild, selected: yes}}
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
  selector: {matchLabels: {app.kubernetes.io/name: coil, app.kubernetes.io/component: coil-ipam-controller, selected: yes}}
  template:
    metadata: {labels: {app.kubernetes.io/name: coil, app.kubernetes.io/component: coil-ipam-controller, selected: yes}}
    spec:
      serviceAccountName: coil-ipam-controller
      hostNetwork: true
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
          - topologyKey: kubernetes.io/hostname
            labelSelector: {matchLabels: {app.kubernetes.io/name: coil, app.kubernetes.io/component: coil-ipam-controller, selected: yes}}
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
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: coil-egress-controller, namespace: kube-system}
spec:
  replicas: 2
  selector: {matchLabels: {app.kubernetes.io/name: coil, app.kubernetes.io/component: coil-egress-controller, selected: yes}}
  template:
    metadata: {labels: {app.kubernetes.io/name: coil, app.kubernetes.io/component: coil-egress-controller, selected: yes}}
    spec:
      serviceAccountName: coil-egress-controller
      hostNetwork: true
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
          - topologyKey: kubernetes.io/hostname
            labelSelector: {matchLabels: {app.kubernetes.io/name: coil, app.kubernetes.io/component: coil-egress-controller, selected: yes}}
      securityContext: {runAsNonRoot: true, runAsUser: 10000}
      containers:
      - name: coil-egress-controller
        image: example.org/coil:2.15
        command: ["coil-egress-controller"]
        args: ["--zap-stacktrace-level=panic", "--cert-dir=/certs", "--enable-cert-rotation=true"]
        ports:
        - {name: metrics, containerPort: 9396, protocol: TCP}
        - {name: health, containerPort: 9397, protocol: TCP}
        - {name: webhook, containerPort: 9443, protocol: TCP}
        volumeMounts:
        - {mountPath: /certs, name: cert}
      volumes:
      - {name: cert, secret: {defaultMode: 420, secretName: coilv2-egress-webhook-server-cert}}
`
