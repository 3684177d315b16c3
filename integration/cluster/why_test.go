package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/coilctl"
	"github.com/coil-net/coil/pkg/plan/diagnosis"
	"github.com/coil-net/coil/pkg/testkit"
)

// looker makes a user with the rights that the help of coilctl why names, with those in coild's namespace or without, and returns its name.
func (e env) looker(t *testing.T, asks bool) string {
	t.Helper()
	user := fmt.Sprintf("looker-%t", asks)
	subjects := []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: user}}
	object := metav1.ObjectMeta{Name: user}
	roles, now := e.core.RbacV1(), metav1.DeleteOptions{}
	testkit.Must(roles.ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: object, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"pods", "namespaces", "nodes"}, Verbs: []string{"get"}},
		{APIGroups: []string{""}, Resources: []string{"pods", "events"}, Verbs: []string{"list"}},
		{APIGroups: []string{v2.GroupVersion.Group}, Resources: []string{"*"}, Verbs: []string{"get", "list"}},
	}}, metav1.CreateOptions{}))(t)
	testkit.Must(roles.ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: object, Subjects: subjects, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: user},
	}, metav1.CreateOptions{}))(t)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		testkit.Check(t, roles.ClusterRoleBindings().Delete(ctx, user, now), roles.ClusterRoles().Delete(ctx, user, now))
	})
	if !asks {
		return user
	}
	const system = metav1.NamespaceSystem
	testkit.Must(roles.Roles(system).Create(t.Context(), &rbacv1.Role{ObjectMeta: object, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"pods/exec"}, Verbs: []string{"get", "create"}},
	}}, metav1.CreateOptions{}))(t)
	testkit.Must(roles.RoleBindings(system).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: object, Subjects: subjects, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: user},
	}, metav1.CreateOptions{}))(t)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		testkit.Check(t, roles.RoleBindings(system).Delete(ctx, user, now), roles.Roles(system).Delete(ctx, user, now))
	})
	return user
}

// coilctl why asks coild by kubelet and the container runtime, with the rights that its help names, and says what it isn't told without them.
func TestWhy(t *testing.T) {
	e := use(t)
	t.Parallel()
	ns := e.pool(t, 1, "10.77.0.0/31", "fd00:77::/127")
	node := e.Nodes()[1]
	e.start(t, ns, "p", 1, node)
	pod := e.running(t, ns, time.Minute)[0]
	user, blind := e.looker(t, true), e.looker(t, false)
	why := func(as string, args ...string) (diagnosis.Diagnosis, int) {
		t.Helper()
		var out, errOut bytes.Buffer
		began := time.Now()
		code := coilctl.Main(append([]string{"coilctl", "--kubeconfig=" + e.Kubeconfig(), "--as=" + as, "why", "-o", "json"}, args...), strings.NewReader(""), &out, &errOut)
		took := time.Since(began)
		t.Logf("coilctl why %s took %s", strings.Join(args, " "), took)
		var d diagnosis.Diagnosis
		if err := json.Unmarshal(out.Bytes(), &d); err != nil {
			t.Fatalf("coilctl why %s: exit code %d, %v: %s%s", strings.Join(args, " "), code, err, out.String(), errOut.String())
		}
		return d, code
	}
	state := func(d diagnosis.Diagnosis, step string) diagnosis.State {
		for _, s := range d.Steps {
			if s.Step == step {
				return s.State
			}
		}
		return ""
	}
	for _, args := range [][]string{{"pod", ns + "/p-0"}, {"pod", "p-0", "--namespace=" + ns}, {"address", pod.Status.PodIPs[1].IP}, {"node", node}} {
		d, code := why(user, args...)
		if code != 0 || state(d, diagnosis.StepRecord) != diagnosis.Right || state(d, diagnosis.StepRules) != diagnosis.Right {
			t.Errorf("coilctl why %q: exit code %d, %+v", args, code, d)
		}
	}
	if d, code := why(blind, "pod", ns+"/p-0"); code != 0 || state(d, diagnosis.StepRecord) != diagnosis.Unknown || state(d, diagnosis.StepBlock) != diagnosis.Right {
		t.Errorf("without pods/exec: exit code %d, %+v", code, d)
	}

	// A pod for which the pool has nothing left says so.
	e.start(t, ns, "q", 2, node)
	testkit.Eventually(t, time.Minute, "a pod waits for an address", func() error {
		for _, name := range []string{"q-0", "q-1"} {
			d, code := why(user, "pod", ns+"/"+name)
			if code == 1 && state(d, diagnosis.StepPool) == diagnosis.Wrong && len(d.Wrong()) == 1 {
				return nil
			}
		}
		return fmt.Errorf("neither of them says so")
	})
	var out, errOut bytes.Buffer
	if code := coilctl.Main([]string{"coilctl", "--kubeconfig=" + e.Kubeconfig(), "why", "pod", ns + "/p-0"}, strings.NewReader(""), &out, &errOut); code != 0 ||
		!strings.HasPrefix(out.String(), "Pod "+ns+"/p-0\nok     pod        the pod is bound to node "+node+"\n") {
		t.Errorf("exit code %d, %s%s", code, out.String(), errOut.String())
	}
	t.Logf("\n%s", out.String())
}
