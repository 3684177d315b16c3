package manifests

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// apply runs "kubectl apply -k" on a variant and returns what it says of each object.
func apply(t *testing.T, api *controlplane.API, dir string, flags ...string) map[string]string {
	t.Helper()
	args := append([]string{"apply", "-k", filepath.Join(manifestsDir(t), dir)}, flags...)
	out, err := api.Kubectl(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	said := map[string]string{}
	for line := range strings.Lines(string(out)) {
		object, what, _ := strings.Cut(strings.TrimSpace(line), " ")
		said[object] = what
	}
	return said
}

func startAPI(t *testing.T) *controlplane.API {
	t.Helper()
	api, err := controlplane.StartAPI(t.Context(), controlplane.Options{Log: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := api.Stop(); err != nil {
			t.Error(err)
		}
	})
	return api
}

// TestInstall installs each variant, and over an earlier version, into an API server that has
// nothing else, as a user does: in one go, by client-side apply.
func TestInstall(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	t.Parallel()
	for _, v := range variants {
		t.Run(v.dir, func(t *testing.T) {
			t.Parallel()
			testInstall(t, startAPI(t), v)
		})
	}
	t.Run("over an earlier version", testSwitch)
}

func testInstall(t *testing.T, api *controlplane.API, v variant) {
	objects := len(render(t, v.dir).all)
	for object, what := range apply(t, api, v.dir, "--dry-run=server") {
		if what != "created (server dry run)" {
			t.Errorf("dry run: %s %s", object, what)
		}
	}
	first := apply(t, api, v.dir)
	if len(first) != objects {
		t.Errorf("%d objects are applied, %d are rendered", len(first), objects)
	}
	for object, what := range first {
		if what != "created" {
			t.Errorf("%s %s", object, what)
		}
	}
	if _, err := api.Kubectl(t.Context(), append([]string{"wait", "--for=condition=Established", "--timeout=30s", "crd"}, v.crds...)...); err != nil {
		t.Error(err)
	}
	// Applied again it changes nothing. (What apply says isn't proof: it says "configured" of
	// a PodDisruptionBudget every time.)
	if out, err := api.Kubectl(t.Context(), "diff", "-k", filepath.Join(manifestsDir(t), v.dir)); err != nil {
		t.Errorf("what was applied differs from what is there: %v\n%s", err, out)
	}
	checkAccess(t, api, v)
}

// right is one thing that a program may or may not do.
type right struct {
	user, verb, group, resource, subresource string
	want                                     bool
}

// checkAccess asks the API server's authorizer.
func checkAccess(t *testing.T, api *controlplane.API, v variant) {
	const coil = "coil.cybozu.com"
	router, services := slices.Contains(v.workloads, "DaemonSet/coil-router"), slices.Contains(v.workloads, "Deployment/coil-lb-controller")
	rights := []right{
		{"coild", "watch", "", "nodes", "", true},
		{"coild", "create", "", "events", "", true},
		{"coild", "update", "", "nodes", "", false},
		{"coild", "get", "", "secrets", "", false},
		{"coild", "watch", "", "namespaces", "", v.ipam || v.egress},
		{"coild", "watch", coil, "addressblocks", "", v.addresses()},
		{"coild", "patch", coil, "addressblocks", "", v.addresses()},
		{"coild", "delete", coil, "addressblocks", "", v.ipam},
		{"coild", "patch", coil, "addressblocks", "status", v.addresses()},
		{"coild", "create", coil, "addressblocks", "", false},
		{"coild", "create", coil, "blockrequests", "", v.ipam},
		{"coild", "get", coil, "addresspools", "", v.ipam},
		{"coild", "update", coil, "addresspools", "", false},
		{"coild", "watch", "", "pods", "", v.egress},
		{"coild", "update", "", "pods", "", false},
		{"coild", "watch", coil, "egresses", "", v.egress},
		{"coild", "update", coil, "egresses", "", false},
		{"coild", "list", coil, "egresspolicies", "", v.egress},
		{"coild", "watch", coil, "egressclusterpolicies", "", v.egress},
		{"coild", "update", coil, "egresspolicies", "status", false},
		{"coild", "watch", "", "services", "", v.egress},
		{"coild", "update", "", "services", "", false},
		{"coil-ipam-controller", "create", coil, "addressblocks", "", v.addresses()},
		{"coil-ipam-controller", "update", coil, "addressclaims", "status", v.addresses()},
		{"coil-ipam-controller", "create", coil, "addressclaims", "", false},
		{"coil-ipam-controller", "watch", coil, "addresspools", "", v.addresses()},
		{"coil-ipam-controller", "get", "", "secrets", "", false},
		{"coil-ipam-controller", "create", "", "secrets", "", false}, // by which it could make tokens
		{"coil-lb-controller", "patch", "", "services", "", services},
		{"coil-lb-controller", "update", "", "services", "status", services},
		{"coil-lb-controller", "delete", "", "services", "", false},
		{"coil-lb-controller", "patch", coil, "addressblocks", "", services},
		{"coil-lb-controller", "delete", coil, "addressblocks", "", false},
		{"coil-lb-controller", "create", coil, "addressclaims", "", false}, // but in its namespace
		{"coil-lb-controller", "get", "", "secrets", "", false},
		{"coil-lb-controller", "watch", coil, "loadbalancergateways", "", services},
		{"coil-lb-controller", "list", "", "pods", "", services},
		{"coil-lb-controller", "watch", "", "pods", "", false}, // which would hold all of them in memory
		{"coil-lb-agent", "update", coil, "loadbalancergateways", "status", services},
		{"coil-lb-agent", "update", coil, "loadbalancergateways", "", false},
		{"coil-lb-agent", "patch", coil, "addressblocks", "", false},
		{"coil-lb-agent", "get", "", "secrets", "", false},
		{"coil-egress-controller", "patch", coil, "addressblocks", "status", false},
		{"coil-ipam-controller", "patch", coil, "addressblocks", "status", v.addresses()},
		{"coil-egress-controller", "create", "apps", "deployments", "", v.egress},
		{"coil-egress-controller", "update", coil, "egresses", "status", v.egress},
		{"coil-egress-controller", "update", coil, "egresses", "", false},
		{"coil-egress-controller", "watch", "", "namespaces", "", v.egress},
		{"coil-egress-controller", "watch", coil, "egresspolicies", "", v.egress},
		{"coil-egress-controller", "update", coil, "egresspolicies", "status", v.egress},
		{"coil-egress-controller", "update", coil, "egresspolicies", "", false},
		{"coil-egress-controller", "watch", coil, "egressclusterpolicies", "", v.egress},
		{"coil-egress-controller", "update", coil, "egressclusterpolicies", "status", v.egress},
		{"coil-egress-controller", "update", coil, "egressclusterpolicies", "", false},
		{"coil-egress-controller", "watch", coil, "addresspools", "", v.egress && v.addresses()},
		{"coil-egress-controller", "create", coil, "addressclaims", "", v.egress && v.addresses()},
		{"coil-egress-controller", "create", "rbac.authorization.k8s.io", "clusterrolebindings", "", false}, // but by name
		{"coil-egress-controller", "create", "rbac.authorization.k8s.io", "rolebindings", "", false},        // but by name
		{"coil-egress-controller", "get", "", "secrets", "", false},
		{"coil-router", "watch", coil, "addressblocks", "", router},
		{"coil-router", "watch", "", "nodes", "", router},
		{"coil-router", "update", coil, "addressblocks", "", false},
	}
	client := kubernetes.NewForConfigOrDie(api.RESTConfig())
	ask := func(r right) (bool, error) {
		review, err := client.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{
			Spec: authorizationv1.SubjectAccessReviewSpec{
				User: "system:serviceaccount:" + namespace + ":" + r.user,
				ResourceAttributes: &authorizationv1.ResourceAttributes{
					Verb: r.verb, Group: r.group, Resource: r.resource, Subresource: r.subresource,
				},
			},
		}, metav1.CreateOptions{})
		return err == nil && review.Status.Allowed, err
	}
	// The authorizer learns of new rules a moment after they were made.
	testkit.Eventually(t, 10*time.Second, "rights", func() error {
		var got, want []right
		for _, r := range rights {
			allowed, err := ask(r)
			if err != nil {
				return err
			}
			want = append(want, r)
			r.want = allowed
			got = append(got, r)
		}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(right{})); diff != "" {
			return diffError(diff)
		}
		return nil
	})
}

type diffError string

func (d diffError) Error() string { return "(-want +got):\n" + string(d) }

// podSpecs are the workloads as the API server has them.
type podSpecs struct {
	DaemonSets  map[string]appsv1.DaemonSetSpec
	Deployments map[string]appsv1.DeploymentSpec
}

func specs(t *testing.T, api *controlplane.API) podSpecs {
	t.Helper()
	client := kubernetes.NewForConfigOrDie(api.RESTConfig()).AppsV1()
	s := podSpecs{map[string]appsv1.DaemonSetSpec{}, map[string]appsv1.DeploymentSpec{}}
	daemonSets, err := client.DaemonSets(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range daemonSets.Items {
		s.DaemonSets[d.Name] = d.Spec
	}
	deployments, err := client.Deployments(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range deployments.Items {
		s.Deployments[d.Name] = d.Spec
	}
	return s
}
