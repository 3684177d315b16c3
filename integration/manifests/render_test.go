// Package manifests tests what kubectl makes of manifests/: the names that the contract fixes,
// what each variant has and may, and that an API server takes it as it is.
//
// It must not know what the programs do.
package manifests

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/pkg/plan/preflight"
	"github.com/coil-net/coil/pkg/testkit"
)

const namespace = "kube-system"

// variant is a directory that users apply, and what must come of it.
type variant struct {
	dir       string // below manifests/
	workloads []string
	crds      []string
	// coildFlags are those that the variant adds.
	coildFlags []string
	// ipam and egress say which features coild has rights for. floating says that there are floating addresses without ipam.
	ipam, egress, floating bool
}

// addresses says whether there are AddressPools.
func (v variant) addresses() bool { return v.ipam || v.floating }

// services says whether Services get addresses.
func (v variant) services() bool {
	return slices.Contains(v.workloads, "Deployment/coil-lb-controller")
}

var (
	ipamCRDs   = []string{"addressblocks.coil.cybozu.com", "addressclaims.coil.cybozu.com", "addresspools.coil.cybozu.com", "blockrequests.coil.cybozu.com", "loadbalancergateways.coil.cybozu.com"}
	egressCRDs = []string{"egressclusterpolicies.coil.cybozu.com", "egresses.coil.cybozu.com", "egresspolicies.coil.cybozu.com"}
)

var variants = []variant{
	{
		dir:       ".",
		workloads: []string{"DaemonSet/coild", "Deployment/coil-egress-controller", "Deployment/coil-ipam-controller"},
		crds:      slices.Concat(ipamCRDs, egressCRDs),
		ipam:      true, egress: true,
	},
	{
		dir:       "variants/with-router",
		workloads: []string{"DaemonSet/coil-router", "DaemonSet/coild", "Deployment/coil-egress-controller", "Deployment/coil-ipam-controller"},
		crds:      slices.Concat(ipamCRDs, egressCRDs),
		ipam:      true, egress: true,
	},
	{
		dir:       "variants/with-services",
		workloads: []string{"DaemonSet/coild", "Deployment/coil-egress-controller", "Deployment/coil-ipam-controller", "Deployment/coil-lb-controller"},
		crds:      slices.Concat(ipamCRDs, egressCRDs),
		ipam:      true, egress: true,
	},
	{
		dir: "variants/with-gateways",
		workloads: []string{
			"DaemonSet/coil-lb-agent", "DaemonSet/coild", "Deployment/coil-egress-controller", "Deployment/coil-ipam-controller", "Deployment/coil-lb-controller",
		},
		crds: slices.Concat(ipamCRDs, egressCRDs),
		ipam: true, egress: true,
	},
	{
		dir:        "variants/ipam-only",
		workloads:  []string{"DaemonSet/coild", "Deployment/coil-ipam-controller"},
		crds:       ipamCRDs,
		coildFlags: []string{"--enable-egress=false"},
		ipam:       true,
	},
	{
		dir:        "variants/ipam-only-with-router",
		workloads:  []string{"DaemonSet/coil-router", "DaemonSet/coild", "Deployment/coil-ipam-controller"},
		crds:       ipamCRDs,
		coildFlags: []string{"--enable-egress=false"},
		ipam:       true,
	},
	{
		dir:        "variants/egress-only",
		workloads:  []string{"DaemonSet/coild", "Deployment/coil-egress-controller"},
		crds:       egressCRDs,
		coildFlags: []string{"--enable-ipam=false", "--cni-conf-name="},
		egress:     true,
	},
	{
		dir:        "variants/egress-only-with-addresses",
		workloads:  []string{"DaemonSet/coild", "Deployment/coil-egress-controller", "Deployment/coil-ipam-controller"},
		crds:       slices.Concat(ipamCRDs, egressCRDs),
		coildFlags: []string{"--enable-ipam=false", "--cni-conf-name=", "--enable-floating"},
		egress:     true, floating: true,
	},
}

// TestEveryVariantIsTested keeps the list above complete, and that of coil-migrator.
func TestEveryVariantIsTested(t *testing.T) {
	dirs, err := filepath.Glob(filepath.Join(manifestsDir(t), "variants", "*"))
	if err != nil {
		t.Fatal(err)
	}
	got := []string{"."}
	for _, d := range dirs {
		got = append(got, "variants/"+filepath.Base(d))
	}
	var want []string
	for _, v := range variants {
		want = append(want, v.dir)
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("variants (-tested +existing):\n%s", diff)
	}
	known := []string{"."}
	for _, v := range preflight.Variants[1:] {
		known = append(known, "variants/"+string(v))
	}
	slices.Sort(known)
	if diff := cmp.Diff(known, got); diff != "" {
		t.Errorf("variants (-known to coil-migrator +existing):\n%s", diff)
	}
}

func TestRender(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	for _, v := range variants {
		t.Run(v.dir, func(t *testing.T) {
			s := render(t, v.dir)
			t.Run("has the workloads and CRDs", func(t *testing.T) { checkInventory(t, s, v) })
			t.Run("needs no webhook, certificate or secret", func(t *testing.T) { checkKinds(t, s) })
			t.Run("names and selects as the contract says", func(t *testing.T) { checkWorkloads(t, s) })
			t.Run("gives no more rights than needed", func(t *testing.T) { checkRights(t, s, v) })
			t.Run("adds to the roles of people", func(t *testing.T) { checkPeople(t, s, v) })
			t.Run("binds rights to accounts that exist", func(t *testing.T) { checkBindings(t, s) })
			t.Run("runs one image", func(t *testing.T) { checkImages(t, s) })
			t.Run("uses the features of the variant", func(t *testing.T) { checkCoild(t, s, v); checkEgressController(t, s, v) })
		})
	}
}

// TestProgramsKnowTheirFlags asks each program whether it takes the arguments that a variant
// gives it.
func TestProgramsKnowTheirFlags(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	b := build.Builder{Log: t.Output()}
	for _, v := range variants {
		for _, w := range render(t, v.dir).workloads() {
			t.Run(v.dir+" "+w.name, func(t *testing.T) {
				bin, err := b.Own(t.Context(), "cmd/"+w.name)
				if err != nil {
					t.Fatal(err)
				}
				args := append(slices.Clone(w.template.Spec.Containers[0].Args), "--version")
				if out, err := exec.CommandContext(t.Context(), bin, args...).CombinedOutput(); err != nil {
					t.Errorf("%s %q: %v\n%s", w.name, args, err, out)
				}
			})
		}
	}
}

// set is what one variant renders to.
type set struct {
	all         []*unstructured.Unstructured
	daemonSets  []appsv1.DaemonSet
	deployments []appsv1.Deployment
	budgets     []policyv1.PodDisruptionBudget
	configMaps  []corev1.ConfigMap
	accounts    []corev1.ServiceAccount
	roles       []rbacv1.Role
	clusterRole []rbacv1.ClusterRole
	bindings    []rbacv1.RoleBinding
	clusterBind []rbacv1.ClusterRoleBinding
}

// workload is what Deployments and DaemonSets have in common.
type workload struct {
	kind, name, namespace string
	selector              map[string]string
	template              corev1.PodTemplateSpec
}

func (s set) workloads() []workload {
	var out []workload
	for _, d := range s.daemonSets {
		out = append(out, workload{"DaemonSet", d.Name, d.Namespace, d.Spec.Selector.MatchLabels, d.Spec.Template})
	}
	for _, d := range s.deployments {
		out = append(out, workload{"Deployment", d.Name, d.Namespace, d.Spec.Selector.MatchLabels, d.Spec.Template})
	}
	return out
}

// rendered has what kubectl has made of each directory; it starts slowly.
var rendered = map[string][]byte{}

func render(t *testing.T, dir string) set {
	t.Helper()
	out, ok := rendered[dir]
	if !ok {
		var err error
		if out, err = kubectl(t.Context(), "kustomize", filepath.Join(manifestsDir(t), dir)); err != nil {
			t.Fatal(err)
		}
		rendered[dir] = out
	}
	var s set
	for dec := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(out), 4096); ; {
		u := &unstructured.Unstructured{}
		if err := dec.Decode(u); errors.Is(err, io.EOF) {
			return s
		} else if err != nil {
			t.Fatal(err)
		}
		s.all = append(s.all, u)
		switch u.GetKind() {
		case "DaemonSet":
			s.daemonSets = append(s.daemonSets, convert[appsv1.DaemonSet](t, u))
		case "Deployment":
			s.deployments = append(s.deployments, convert[appsv1.Deployment](t, u))
		case "PodDisruptionBudget":
			s.budgets = append(s.budgets, convert[policyv1.PodDisruptionBudget](t, u))
		case "ConfigMap":
			s.configMaps = append(s.configMaps, convert[corev1.ConfigMap](t, u))
		case "ServiceAccount":
			s.accounts = append(s.accounts, convert[corev1.ServiceAccount](t, u))
		case "Role":
			s.roles = append(s.roles, convert[rbacv1.Role](t, u))
		case "ClusterRole":
			s.clusterRole = append(s.clusterRole, convert[rbacv1.ClusterRole](t, u))
		case "RoleBinding":
			s.bindings = append(s.bindings, convert[rbacv1.RoleBinding](t, u))
		case "ClusterRoleBinding":
			s.clusterBind = append(s.clusterBind, convert[rbacv1.ClusterRoleBinding](t, u))
		}
	}
}

func convert[T any](t *testing.T, u *unstructured.Unstructured) T {
	t.Helper()
	var v T
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(u.Object, &v, true); err != nil {
		t.Fatalf("%s %s: %v", u.GetKind(), u.GetName(), err)
	}
	return v
}

func checkInventory(t *testing.T, s set, v variant) {
	var workloads, crds, policies []string
	for _, w := range s.workloads() {
		workloads = append(workloads, w.kind+"/"+w.name)
	}
	for _, u := range s.all {
		if u.GetKind() == "CustomResourceDefinition" {
			crds = append(crds, u.GetName())
		}
		if strings.HasPrefix(u.GetKind(), "ValidatingAdmissionPolicy") {
			policies = append(policies, u.GetKind()+"/"+u.GetName())
		}
	}
	if has := slices.ContainsFunc(s.all, func(u *unstructured.Unstructured) bool { return u.GetKind() == "Secret" }); has != v.addresses() {
		t.Errorf("there is a Secret of keys: %t, want %t", has, v.addresses())
	}
	slices.Sort(policies)
	var wantPolicies []string
	for _, kind := range []string{"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"} {
		if v.addresses() {
			wantPolicies = append(wantPolicies, kind+"/coil-addresspools", kind+"/coil-addresspools-services")
		}
		if v.services() {
			wantPolicies = append(wantPolicies, kind+"/coil-lb-agent-loadbalancergateways")
		}
		if v.addresses() {
			wantPolicies = append(wantPolicies, kind+"/coild-ipam-addressblocks")
		}
		if v.ipam {
			wantPolicies = append(wantPolicies, kind+"/coild-ipam-blockrequests")
		}
	}
	if diff := cmp.Diff(wantPolicies, policies); diff != "" {
		t.Errorf("admission policies (-want +got):\n%s", diff)
	}
	slices.Sort(workloads)
	slices.Sort(crds)
	if diff := cmp.Diff(v.workloads, workloads); diff != "" {
		t.Errorf("workloads (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(slices.Sorted(slices.Values(v.crds)), crds); diff != "" {
		t.Errorf("CRDs (-want +got):\n%s", diff)
	}
}

func checkKinds(t *testing.T, s set) {
	for _, u := range s.all {
		switch gvk := u.GroupVersionKind(); {
		case strings.HasSuffix(gvk.Kind, "WebhookConfiguration"), gvk.Kind == "APIService", gvk.Kind == "Secret" && !withoutKeys(u),
			strings.HasPrefix(gvk.Group, "cert-manager"):
			t.Errorf("%s %s", gvk.Kind, u.GetName())
		}
		// coild reads where the API servers are.
		inDefault := u.GetNamespace() == "default" && strings.HasPrefix(u.GetKind(), "Role") && u.GetName() == "coild"
		if ns := u.GetNamespace(); ns != "" && ns != namespace && !inDefault {
			t.Errorf("%s %s is in namespace %s", u.GetKind(), u.GetName(), ns)
		}
		if u.GetKind() == "CustomResourceDefinition" {
			if strategy, _, err := unstructured.NestedString(u.Object, "spec", "conversion", "strategy"); err != nil || strategy == "Webhook" {
				t.Errorf("%s converts by %s (%v)", u.GetName(), strategy, err)
			}
		}
	}
}

// withoutKeys says whether an object is the Secret of which coil-ipam-controller makes the data.
func withoutKeys(u *unstructured.Unstructured) bool {
	return u.GetName() == "coil-floating" && u.Object["type"] == "Opaque" && u.Object["data"] == nil && u.Object["stringData"] == nil
}

// checkRights looks at every rule, whoever is bound to it.
func checkRights(t *testing.T, s set, v variant) {
	rules := map[string][]rbacv1.PolicyRule{}
	for _, r := range s.clusterRole {
		rules["ClusterRole "+r.Name] = r.Rules
		if r.AggregationRule != nil {
			t.Errorf("ClusterRole %s aggregates what isn't in sight", r.Name)
		}
	}
	for _, r := range s.roles {
		rules["Role "+r.Name] = r.Rules
	}
	for name, list := range rules {
		for _, r := range list {
			words := slices.Concat(r.APIGroups, r.Resources, r.Verbs)
			for _, bad := range []string{"*", "secrets", "escalate", "bind", "impersonate", "deletecollection"} {
				if slices.Contains(words, bad) && !(bad == "secrets" && ofKeys(name, r)) {
					t.Errorf("%s has %q: %v", name, bad, r)
				}
			}
			for _, resource := range r.Resources {
				resource, _, _ = strings.Cut(resource, "/")
				if !v.addresses() && slices.Contains([]string{"addresspools", "addressblocks", "addressclaims", "blockrequests", "loadbalancergateways"}, resource) ||
					!v.egress && slices.Contains([]string{"egresses", "egresspolicies", "egressclusterpolicies", "pods", "services"}, resource) && !namesPods(name, r) {
					t.Errorf("%s has a right on %s, which %s has no use for", name, resource, v.dir)
				}
			}
		}
	}
}

// ofKeys says whether a rule is about the Secret of the keys of messages about floating addresses, and nothing else.
func ofKeys(name string, r rbacv1.PolicyRule) bool {
	return slices.Contains([]string{"Role coil-ipam-controller", "Role coild-floating"}, name) && slices.Equal(r.Resources, []string{"secrets"}) &&
		slices.Equal(r.ResourceNames, []string{"coil-floating"})
}

// machines are the groups of users that are bound to the rights of a program, since it may run outside of the cluster.
var machines = map[string][]string{"coil-lb-agent": {"coil.cybozu.com:lb-gateways"}, "coil-lb-controller": {"coil.cybozu.com:lb-controllers"}}

func checkBindings(t *testing.T, s set) {
	has := func(kind, name string) bool {
		return slices.ContainsFunc(s.all, func(u *unstructured.Unstructured) bool { return u.GetKind() == kind && u.GetName() == name })
	}
	check := func(name string, ref rbacv1.RoleRef, subjects []rbacv1.Subject) {
		if !has(ref.Kind, ref.Name) {
			t.Errorf("binding %s: there is no %s %s", name, ref.Kind, ref.Name)
		}
		for _, sub := range subjects {
			if sub.Kind == rbacv1.GroupKind && sub.APIGroup == rbacv1.GroupName && slices.Contains(machines[name], sub.Name) {
				continue
			}
			if sub.Kind != "ServiceAccount" || sub.Namespace != namespace || !has(sub.Kind, sub.Name) {
				t.Errorf("binding %s: there is no %s %s/%s", name, sub.Kind, sub.Namespace, sub.Name)
			}
		}
	}
	for _, b := range s.bindings {
		check(b.Name, b.RoleRef, b.Subjects)
	}
	for _, b := range s.clusterBind {
		check(b.Name, b.RoleRef, b.Subjects)
	}
	for _, w := range s.workloads() {
		if !has("ClusterRole", w.name) || !has("ClusterRoleBinding", w.name) {
			t.Errorf("%s lacks the ClusterRole and the ClusterRoleBinding of its name", w.name)
		}
	}
}

func checkImages(t *testing.T, s set) {
	for _, w := range s.workloads() {
		for _, c := range slices.Concat(w.template.Spec.InitContainers, w.template.Spec.Containers) {
			if c.Image != "localhost/coil:dev" || c.ImagePullPolicy != corev1.PullIfNotPresent {
				t.Errorf("%s, container %s: image %s, pull policy %s", w.name, c.Name, c.Image, c.ImagePullPolicy)
			}
		}
	}
}

func manifestsDir(t *testing.T) string {
	t.Helper()
	root, err := build.Root()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(root, "manifests")
}

// kubectl runs the kubectl of the lab's newest release without any cluster.
func kubectl(ctx context.Context, args ...string) ([]byte, error) {
	b := build.Builder{Log: os.Stderr}
	bin, err := b.Programs(ctx, "kubectl")
	if err != nil {
		return nil, err
	}
	out, err := exec.CommandContext(ctx, bin["kubectl"], args...).Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		err = fmt.Errorf("kubectl %q: %w\n%s", args, err, exit.Stderr)
	}
	return out, err
}

// namesPods says whether a rule is the one by which coil-ipam-controller looks for the pod that has an address.
func namesPods(role string, r rbacv1.PolicyRule) bool {
	return role == "ClusterRole coil-ipam-controller" && slices.Equal(r.Resources, []string{"pods"}) && slices.Equal(r.Verbs, []string{"list"})
}
