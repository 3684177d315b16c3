package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/generated/clientset/versioned"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// requireRights waits until routers of a namespace may, or may not, read what routers read in another
// one; an empty one is all.
func requireRights(t testing.TB, c *egressCluster, of, in string, want bool) {
	t.Helper()
	cfg := testkit.Must(c.api.UserConfig("system:serviceaccount:"+of+":coil-egress", "system:serviceaccounts", "system:serviceaccounts:"+of))(t)
	core, coil := testkit.Must(kubernetes.NewForConfig(cfg))(t), testkit.Must(versioned.NewForConfig(cfg))(t)
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("routers of %s read %q: %v", of, in, want), func() error {
		_, sliceErr := core.DiscoveryV1().EndpointSlices(in).List(t.Context(), metav1.ListOptions{LabelSelector: v2.LabelEgress + "=nat"})
		_, egressErr := coil.CoilV2().Egresses(in).List(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=nat"})
		for _, err := range []error{sliceErr, egressErr} {
			if err != nil && !apierrors.IsForbidden(err) || (err == nil) != want {
				return errors.Join(sliceErr, egressErr, fmt.Errorf("may: %v, %v", sliceErr == nil, egressErr == nil))
			}
		}
		return nil
	})
}

// TestEgressRights holds that routers read what is in their own namespace, and that routers from before
// an upgrade, which have their rights by a ClusterRoleBinding, never lack them.
func TestEgressRights(t *testing.T) {
	c := newEgressCluster(t)
	theirs, empty := fresh("theirs"), fresh("empty")
	c.namespace(t, theirs, nil)
	c.namespace(t, empty, nil)
	api := c.core.RbacV1().ClusterRoleBindings()
	account := func(namespace string) rbacv1.Subject {
		return rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: "coil-egress"}
	}
	auditor := rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "auditor"}
	subjects := func(all ...rbacv1.Subject) {
		t.Helper()
		body := testkit.Must(json.Marshal(map[string]any{"subjects": all}))(t)
		// As a former version did.
		testkit.Must(api.Patch(context.WithoutCancel(t.Context()), "coil-egress", types.MergePatchType, body, metav1.PatchOptions{FieldManager: "coil-egress-controller"}))(t)
	}
	requireSubjects := func(want ...rbacv1.Subject) {
		t.Helper()
		testkit.Eventually(t, 20*time.Second, fmt.Sprintf("subjects of the ClusterRoleBinding %v", want), func() error {
			b, err := api.Get(t.Context(), "coil-egress", metav1.GetOptions{})
			if err != nil {
				return err
			}
			return same(fmt.Sprint(want), fmt.Sprint(b.Subjects))
		})
	}
	subjects(auditor, account(c.ns), account(theirs), account(empty))
	t.Cleanup(func() { subjects() })
	requireRights(t, c, c.ns, "", true)
	c.egress(t, "nat", `destinations: [0.0.0.0/0]`)
	// Somebody has a binding of the name, which doesn't keep the rights in all namespaces.
	testkit.Must(c.core.RbacV1().RoleBindings(theirs).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "coil-egress"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "view"},
	}, metav1.CreateOptions{}))(t)
	testkit.Must(c.coil.CoilV2().Egresses(theirs).Create(t.Context(), &v2.Egress{
		ObjectMeta: metav1.ObjectMeta{Name: "nat"}, Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}},
	}, metav1.CreateOptions{}))(t)
	c.start(t)

	requireSubjects(auditor)
	requireRights(t, c, c.ns, c.ns, true)
	requireRights(t, c, c.ns, theirs, false)
	requireRights(t, c, c.ns, "", false)
	requireRights(t, c, empty, empty, false)
	requireRights(t, c, theirs, theirs, false)
	requireRights(t, c, theirs, "", false)
	other := &egressCluster{cluster: c.cluster, ns: theirs}
	requireMessage(t, other.condition(t, "nat", v2.EgressAvailable, metav1.ConditionFalse, "Conflict"), "RoleBinding coil-egress")

	testkit.Check(t, c.core.RbacV1().RoleBindings(theirs).Delete(t.Context(), "coil-egress", metav1.DeleteOptions{}))
	requireSubjects(auditor)
	requireRights(t, c, theirs, theirs, true)
	requireRights(t, c, theirs, c.ns, false)
	other.condition(t, "nat", v2.EgressAvailable, metav1.ConditionFalse, "NoRouterWanted")

	// One that serves is used, whoever made it.
	serving := fresh("serving")
	c.namespace(t, serving, nil)
	testkit.Must(c.core.RbacV1().RoleBindings(serving).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "coil-egress"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "coil-egress"},
		Subjects: []rbacv1.Subject{account(serving)},
	}, metav1.CreateOptions{}))(t)
	testkit.Must(c.coil.CoilV2().Egresses(serving).Create(t.Context(), &v2.Egress{
		ObjectMeta: metav1.ObjectMeta{Name: "nat"}, Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}},
	}, metav1.CreateOptions{}))(t)
	(&egressCluster{cluster: c.cluster, ns: serving}).condition(t, "nat", v2.EgressAvailable, metav1.ConditionFalse, "NoRouterWanted")
}
