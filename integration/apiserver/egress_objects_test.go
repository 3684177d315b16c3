package apiserver

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

var (
	deployments     = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}
	services        = schema.GroupVersionResource{Version: "v1", Resource: "services"}
	budgets         = schema.GroupVersionResource{Group: "policy", Version: "v1", Resource: "poddisruptionbudgets"}
	serviceAccounts = schema.GroupVersionResource{Version: "v1", Resource: "serviceaccounts"}
	bindings        = schema.GroupVersionResource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "rolebindings"}
)

// fullEgress uses every part of the API.
const fullEgress = `
destinations: [0.0.0.0/0, "::/0"]
replicas: 2
strategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 0, maxSurge: 1}}
template:
  metadata: {annotations: {example.com/scrape: "true"}, labels: {team: network}}
  spec:
    tolerations: [{key: edge, operator: Exists}]
    affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: edge, operator: Exists}]}]}}}
    volumes: [{name: tmp, emptyDir: {}}]
    containers:
    - {name: egress, resources: {limits: {memory: 400Mi, cpu: 1000m}}, volumeMounts: [{name: tmp, mountPath: /tmp}]}
    - {name: exporter, image: example.org/exporter, ports: [{containerPort: 9000}]}
sessionAffinityConfig: {clientIP: {timeoutSeconds: 3600}}
podDisruptionBudget: {maxUnavailable: 1}
`

// essence is an object without what the API server writes by itself.
func essence(u *unstructured.Unstructured) map[string]any {
	m := u.DeepCopy().Object
	delete(m, "status")
	meta := map[string]any{"name": u.GetName(), "labels": u.GetLabels(), "annotations": u.GetAnnotations(), "owners": u.GetOwnerReferences()}
	m["metadata"] = meta
	return m
}

// TestEgressObjects changes and deletes each object of an Egress by hand.
func TestEgressObjects(t *testing.T) {
	c := newEgressCluster(t)
	c.start(t)
	e := c.egress(t, "nat", fullEgress)
	d := c.deployment(t, "nat", "is there", exists)
	if got := d.Spec.Template.Spec.Containers[0]; got.Image != routerImage || got.ImagePullPolicy != "Never" {
		t.Errorf("routers have the image %s (%s), want that of the own pod", got.Image, got.ImagePullPolicy)
	}
	if !metav1.IsControlledBy(d, e) {
		t.Errorf("owners %v", d.OwnerReferences)
	}
	dyn := testkit.Must(dynamic.NewForConfig(c.admin))(t)
	for _, tt := range []struct {
		resource schema.GroupVersionResource
		name     string
		edits    []string // as merge patches
	}{
		{deployments, "nat", []string{
			`{"spec": {"replicas": 7}}`, `{"spec": {"paused": true}}`, `{"metadata": {"labels": null}}`, `{"metadata": {"annotations": null}}`,
			`{"metadata": {"ownerReferences": null}}`,
			`{"spec": {"strategy": {"rollingUpdate": {"maxUnavailable": 1}}}}`,
			`{"spec": {"template": {"spec": {"tolerations": [{"operator": "Exists"}], "nodeSelector": {"x": "y"}, "serviceAccountName": "admin"}}}}`,
			`{"spec": {"template": {"metadata": {"labels": {"team": "other"}}}}}`,
			`{"spec": {"template": {"spec": {"containers": [{"name": "egress", "image": "evil", "securityContext": {"privileged": true}}]}}}}`,
		}},
		{services, "nat", []string{
			`{"spec": {"selector": {"more": "x"}}}`, `{"spec": {"selector": {"app.kubernetes.io/instance": "other"}}}`,
			`{"spec": {"sessionAffinity": "None", "sessionAffinityConfig": null}}`, `{"spec": {"publishNotReadyAddresses": true}}`,
			`{"spec": {"ports": [{"port": 1, "protocol": "UDP"}]}}`, `{"spec": {"type": "NodePort"}}`, `{"metadata": {"labels": {"app.kubernetes.io/name": "x"}}}`,
		}},
		{budgets, "nat", []string{`{"spec": {"maxUnavailable": 5}}`, `{"spec": {"selector": {"matchLabels": {"more": "x"}}}}`, `{"metadata": {"labels": null}}`}},
		{serviceAccounts, "coil-egress", []string{`{"metadata": {"labels": null}}`, `{"metadata": {"annotations": null}}`}},
		{bindings, "coil-egress", []string{
			`{"subjects": null}`, `{"subjects": [{"kind": "ServiceAccount", "namespace": "other", "name": "coil-egress"}]}`, `{"metadata": {"labels": null}}`,
		}},
	} {
		client := dyn.Resource(tt.resource).Namespace(c.ns)
		t.Run(tt.resource.Resource, func(t *testing.T) {
			var want map[string]any
			testkit.Eventually(t, 20*time.Second, "it is there", func() error {
				u, err := client.Get(t.Context(), tt.name, metav1.GetOptions{})
				if err == nil {
					want = essence(u)
				}
				return err
			})
			restored := func(what string, uid types.UID) {
				t.Helper()
				testkit.Eventually(t, 20*time.Second, what, func() error {
					u, err := client.Get(t.Context(), tt.name, metav1.GetOptions{})
					if err != nil {
						return err
					}
					got := essence(u)
					if uid != "" {
						// A Service has another address.
						for _, m := range []map[string]any{got, want} {
							if spec, ok := m["spec"].(map[string]any); ok {
								delete(spec, "clusterIP")
								delete(spec, "clusterIPs")
							}
						}
						if u.GetUID() == uid {
							return errors.New("it is the old one")
						}
					}
					if diff := cmp.Diff(want, got); diff != "" {
						return fmt.Errorf("(-want +got):\n%s", diff)
					}
					return nil
				})
			}
			for _, edit := range tt.edits {
				after, err := client.Patch(t.Context(), tt.name, types.MergePatchType, []byte(edit), metav1.PatchOptions{FieldManager: "somebody"})
				if err != nil {
					t.Fatalf("%s: %v", edit, err)
				}
				if cmp.Equal(want, essence(after)) {
					t.Fatalf("%s changes nothing", edit)
				}
				restored(edit, "")
			}
			u := testkit.Must(client.Get(t.Context(), tt.name, metav1.GetOptions{}))(t)
			testkit.Check(t, client.Delete(t.Context(), tt.name, metav1.DeleteOptions{}))
			restored("it is made again", u.GetUID())
		})
	}

	t.Run("the account, and its binding, are of all Egresses of the namespace", func(t *testing.T) {
		c.egress(t, "second", `destinations: [192.0.2.0/24]`)
		c.deployment(t, "second", "is there", exists)
		testkit.Eventually(t, 10*time.Second, "the account has two owners", func() error {
			a, err := c.core.CoreV1().ServiceAccounts(c.ns).Get(t.Context(), "coil-egress", metav1.GetOptions{})
			if err == nil && len(a.OwnerReferences) != 2 {
				err = fmt.Errorf("owners %v", a.OwnerReferences)
			}
			return err
		})
		testkit.Check(t, c.coil.CoilV2().Egresses(c.ns).Delete(t.Context(), "second", metav1.DeleteOptions{}))
		testkit.Eventually(t, 10*time.Second, "both have one owner", func() error {
			a, err := c.core.CoreV1().ServiceAccounts(c.ns).Get(t.Context(), "coil-egress", metav1.GetOptions{})
			b, bindingErr := c.core.RbacV1().RoleBindings(c.ns).Get(t.Context(), "coil-egress", metav1.GetOptions{})
			if err := errors.Join(err, bindingErr); err != nil {
				return err
			}
			for _, owners := range [][]metav1.OwnerReference{a.OwnerReferences, b.OwnerReferences} {
				if len(owners) != 1 || owners[0].Name != "nat" {
					return fmt.Errorf("owners %v", owners)
				}
			}
			return nil
		})
		requireRights(t, c, c.ns, c.ns, true)
	})
}

// TestEgressChanges holds that what an Egress doesn't want any more goes, too.
func TestEgressChanges(t *testing.T) {
	c := newEgressCluster(t)
	c.start(t)
	c.egress(t, "nat", fullEgress)
	c.deployment(t, "nat", "is there", exists)
	for _, tt := range []struct {
		name, patch string
		check       func(*appsv1.Deployment) error
	}{
		{"replicas", `spec: {replicas: 0}`, func(d *appsv1.Deployment) error { return same(int32(0), *d.Spec.Replicas) }},
		{"without tolerations and limits", `spec: {template: {spec: {tolerations: null, containers: [{name: egress}]}}}`, func(d *appsv1.Deployment) error {
			s := d.Spec.Template.Spec
			return errors.Join(same(0, len(s.Tolerations)), same(1, len(s.Containers)), same(0, len(s.Containers[0].Resources.Limits)), same(0, len(s.Containers[0].VolumeMounts)))
		}},
		{"recreate", `spec: {strategy: {type: Recreate, rollingUpdate: null}}`, func(d *appsv1.Deployment) error {
			return same(appsv1.DeploymentStrategy{Type: "Recreate"}, d.Spec.Strategy)
		}},
		{"the default strategy", `spec: {strategy: null}`, func(d *appsv1.Deployment) error {
			if d.Spec.Strategy.RollingUpdate == nil {
				return errors.New("no rolling update")
			}
			return same("25%", d.Spec.Strategy.RollingUpdate.MaxSurge.String())
		}},
		{"without a template", `spec: {template: null}`, func(d *appsv1.Deployment) error {
			return errors.Join(same(0, len(d.Spec.Template.Annotations)), same(3, len(d.Spec.Template.Labels)), same(0, len(d.Spec.Template.Spec.Volumes)))
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c.change(t, "nat", tt.patch)
			c.deployment(t, "nat", tt.name, tt.check)
		})
	}
	t.Run("no rollout for what routers follow live", func(t *testing.T) {
		before := c.deployment(t, "nat", "is there", exists)
		c.change(t, "nat", `spec: {fouSourcePortAuto: true, originatingOnly: true, destinations: [10.0.0.0/8], sessionAffinity: None, sessionAffinityConfig: null}`)
		testkit.Eventually(t, 10*time.Second, "the Service follows", func() error {
			s, err := c.core.CoreV1().Services(c.ns).Get(t.Context(), "nat", metav1.GetOptions{})
			if err == nil && (s.Spec.SessionAffinity != "None" || s.Spec.SessionAffinityConfig != nil) {
				err = fmt.Errorf("affinity %s %v", s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig)
			}
			return err
		})
		c.condition(t, "nat", v2.EgressAvailable, metav1.ConditionFalse, "NoRouterWanted")
		if after := c.deployment(t, "nat", "is there", exists); after.Generation != before.Generation {
			t.Errorf("generation %d, was %d", after.Generation, before.Generation)
		}
	})
	t.Run("the budget", func(t *testing.T) {
		budget := func(what string, check func(string) error) {
			t.Helper()
			testkit.Eventually(t, 10*time.Second, what, func() error {
				b, err := c.core.PolicyV1().PodDisruptionBudgets(c.ns).Get(t.Context(), "nat", metav1.GetOptions{})
				if what == "none" {
					return notFound(err, "the budget")
				}
				if err != nil {
					return err
				}
				text, err := json.Marshal(map[string]any{"min": b.Spec.MinAvailable, "max": b.Spec.MaxUnavailable})
				return errors.Join(err, check(string(text)))
			})
		}
		is := func(want string) func(string) error { return func(got string) error { return same(want, got) } }
		budget("of the beginning", is(`{"max":1,"min":null}`))
		c.change(t, "nat", `spec: {podDisruptionBudget: {maxUnavailable: null, minAvailable: "50%"}}`)
		budget("the other kind", is(`{"max":null,"min":"50%"}`))
		c.change(t, "nat", `spec: {podDisruptionBudget: null}`)
		budget("none", nil)
		c.change(t, "nat", `spec: {podDisruptionBudget: {minAvailable: 1}}`)
		budget("again", is(`{"max":null,"min":1}`))
	})
}

func same[T any](want, got T) error {
	if diff := cmp.Diff(want, got); diff != "" {
		return fmt.Errorf("(-want +got):\n%s", diff)
	}
	return nil
}
