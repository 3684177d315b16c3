package apiserver

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	"github.com/coil-net/coil/pkg/testkit"
)

// earlierObjects are what the controller of Coil 2.x makes for an Egress, by create and update.
const earlierObjects = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: nat, labels: {app.kubernetes.io/name: coil, app.kubernetes.io/instance: nat, app.kubernetes.io/component: egress}}
spec:
  replicas: 2
  selector: {matchLabels: {app.kubernetes.io/name: coil, app.kubernetes.io/instance: nat, app.kubernetes.io/component: egress}}
  template:
    metadata: {labels: {app.kubernetes.io/name: coil, app.kubernetes.io/instance: nat, app.kubernetes.io/component: egress}}
    spec:
      serviceAccountName: coil-egress
      tolerations: [{key: edge, operator: Exists}]
      volumes: [{name: run, emptyDir: {medium: Memory}}]
      containers:
      - name: egress
        image: example.org/coil:2.15
        command: [coil-egress]
        args: [--zap-stacktrace-level=panic]
        env:
        - {name: COIL_POD_ADDRESSES, valueFrom: {fieldRef: {fieldPath: status.podIPs}}}
        - {name: EARLIER, value: x}
        securityContext: {privileged: true, readOnlyRootFilesystem: true, capabilities: {add: [NET_ADMIN]}}
        ports: [{name: metrics, containerPort: 8080, protocol: TCP}, {name: health, containerPort: 8081, protocol: TCP}]
        livenessProbe: {httpGet: {path: /healthz, port: health}}
        readinessProbe: {httpGet: {path: /readyz, port: health}}
        resources: {requests: {cpu: 100m, memory: 200Mi}}
        volumeMounts: [{mountPath: /run, name: run}]
---
apiVersion: v1
kind: Service
metadata: {name: nat, labels: {app.kubernetes.io/name: coil, app.kubernetes.io/instance: nat, app.kubernetes.io/component: egress}}
spec:
  type: ClusterIP
  ipFamilyPolicy: SingleStack
  selector: {app.kubernetes.io/name: coil, app.kubernetes.io/instance: nat, app.kubernetes.io/component: egress}
  ports: [{port: 5555, targetPort: 5555, protocol: UDP}]
  sessionAffinity: ClientIP
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: nat, labels: {app.kubernetes.io/name: coil, app.kubernetes.io/instance: nat, app.kubernetes.io/component: egress}}
spec:
  minAvailable: 1
  selector: {matchLabels: {app.kubernetes.io/name: coil, app.kubernetes.io/instance: nat, app.kubernetes.io/component: egress}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: coil-egress}
`

// TestEgressSwitch starts the program over what the one of Coil 2.x has left.
func TestEgressSwitch(t *testing.T) {
	c := newEgressCluster(t)
	e := c.egress(t, "nat", `
destinations: [0.0.0.0/0]
replicas: 2
podDisruptionBudget: {maxUnavailable: 1}
template: {spec: {tolerations: [{key: edge, operator: Exists}]}}
`)
	dyn := testkit.Must(dynamic.NewForConfig(c.admin))(t)
	for doc := range strings.SplitSeq(earlierObjects, "---\n") {
		u := &unstructured.Unstructured{}
		testkit.Check(t, yaml.Unmarshal([]byte(doc), &u.Object))
		resource := map[string]dynamic.NamespaceableResourceInterface{
			"Deployment": dyn.Resource(deployments), "Service": dyn.Resource(services),
			"PodDisruptionBudget": dyn.Resource(budgets), "ServiceAccount": dyn.Resource(serviceAccounts),
		}[u.GetKind()].Namespace(c.ns)
		if u.GetKind() != "ServiceAccount" {
			u.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(e, egresses.GroupVersion().WithKind("Egress"))})
		}
		testkit.Must(resource.Create(t.Context(), u, metav1.CreateOptions{FieldManager: "coil-egress-controller"}))(t)
	}
	before := c.deployment(t, "nat", "is there", exists)
	service := testkit.Must(c.core.CoreV1().Services(c.ns).Get(t.Context(), "nat", metav1.GetOptions{}))(t)
	account := testkit.Must(c.core.CoreV1().ServiceAccounts(c.ns).Get(t.Context(), "coil-egress", metav1.GetOptions{}))(t)
	c.start(t)
	after := c.deployment(t, "nat", "is as it would be without 2.x", func(d *appsv1.Deployment) error {
		s := d.Spec.Template.Spec
		if s.Containers[0].Image != routerImage || len(s.Volumes) > 0 || len(s.Containers[0].VolumeMounts) > 0 || len(s.Containers[0].Env) != 5 {
			return fmt.Errorf("spec %+v", s)
		}
		return nil
	})
	sc := after.Spec.Template.Spec.Containers[0].SecurityContext
	if *sc.Privileged || len(sc.Capabilities.Drop) != 1 || len(after.Spec.Template.Spec.Tolerations) != 1 {
		t.Errorf("security context %+v, tolerations %v", sc, after.Spec.Template.Spec.Tolerations)
	}
	if after.UID != before.UID || len(after.Spec.Selector.MatchLabels) != 3 {
		t.Error("the Deployment was replaced: so are its pods at once")
	}
	for _, m := range after.ManagedFields {
		if m.Manager == "coil-egress-controller" && m.Operation != metav1.ManagedFieldsOperationApply {
			t.Errorf("%s still owns fields by %s", m.Manager, m.Operation)
		}
	}
	// It is as one that was made here.
	c.egress(t, "fresh", `
destinations: [0.0.0.0/0]
replicas: 2
template: {spec: {tolerations: [{key: edge, operator: Exists}]}}
`)
	fresh := c.deployment(t, "fresh", "is there", exists)
	renamed := strings.NewReplacer("fresh", "nat")
	want := testkit.Must(yaml.Marshal(fresh.Spec))(t)
	testkit.Check(t, same(renamed.Replace(string(want)), string(testkit.Must(yaml.Marshal(after.Spec))(t))))

	testkit.Eventually(t, 20*time.Second, "the budget is of the other kind", func() error {
		b, err := c.core.PolicyV1().PodDisruptionBudgets(c.ns).Get(t.Context(), "nat", metav1.GetOptions{})
		if err == nil && (b.Spec.MinAvailable != nil || b.Spec.MaxUnavailable == nil) {
			err = fmt.Errorf("%+v", b.Spec)
		}
		return err
	})
	testkit.Eventually(t, 20*time.Second, "the Service has a second family", func() error {
		s, err := c.core.CoreV1().Services(c.ns).Get(t.Context(), "nat", metav1.GetOptions{})
		if err == nil && (len(s.Spec.ClusterIPs) != 2 || *s.Spec.IPFamilyPolicy != corev1.IPFamilyPolicyPreferDualStack) {
			err = fmt.Errorf("%+v", s.Spec)
		}
		if err == nil && s.Spec.ClusterIP != service.Spec.ClusterIP {
			err = errors.New("its address has changed")
		}
		return err
	})
	testkit.Check(t, same(account, testkit.Must(c.core.CoreV1().ServiceAccounts(c.ns).Get(t.Context(), "coil-egress", metav1.GetOptions{}))(t)))
}
