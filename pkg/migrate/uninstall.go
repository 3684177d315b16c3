package migrate

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// v1Namespace has v1's objects.
const v1Namespace = metav1.NamespaceSystem

// v1Object is an object of v1.
type v1Object struct {
	kind, name string
	delete     func(context.Context, string, metav1.DeleteOptions) error
	exists     func(context.Context, string) error
}

func (o v1Object) String() string { return o.kind + " " + o.name }

// workloads are the objects whose pods write to etcd.
func (c Cluster) workloads() []v1Object {
	apps := c.Kube.AppsV1()
	return []v1Object{
		{"DaemonSet", "coil-node", apps.DaemonSets(v1Namespace).Delete, existence(apps.DaemonSets(v1Namespace).Get)},
		{"Deployment", "coil-controllers", apps.Deployments(v1Namespace).Delete, existence(apps.Deployments(v1Namespace).Get)},
	}
}

// rest are the objects that the workloads need while they end.
func (c Cluster) rest(ctx context.Context) ([]v1Object, error) {
	core, rbac := c.Kube.CoreV1(), c.Kube.RbacV1()
	var all []v1Object
	// A Coil that is installed already has a ConfigMap of the same name.
	switch _, err := c.Kube.AppsV1().DaemonSets(v1Namespace).Get(ctx, "coild", metav1.GetOptions{}); {
	case apierrors.IsNotFound(err):
		all = append(all, v1Object{"ConfigMap", "coil-config", core.ConfigMaps(v1Namespace).Delete, existence(core.ConfigMaps(v1Namespace).Get)})
	case err != nil:
		return nil, fmt.Errorf("look for DaemonSet coild: %w", err)
	}
	for _, name := range []string{"coil-node", "coil-controllers"} {
		all = append(all,
			v1Object{"ClusterRoleBinding", name, rbac.ClusterRoleBindings().Delete, existence(rbac.ClusterRoleBindings().Get)},
			v1Object{"ClusterRole", name, rbac.ClusterRoles().Delete, existence(rbac.ClusterRoles().Get)},
			v1Object{"ServiceAccount", name, core.ServiceAccounts(v1Namespace).Delete, existence(core.ServiceAccounts(v1Namespace).Get)},
		)
	}
	return all, nil
}

// existence is get without its object.
func existence[T any](get func(context.Context, string, metav1.GetOptions) (T, error)) func(context.Context, string) error {
	return func(ctx context.Context, name string) error {
		_, err := get(ctx, name, metav1.GetOptions{})
		return err
	}
}

// present returns those of the objects that exist.
func present(ctx context.Context, objects []v1Object) ([]v1Object, error) {
	var there []v1Object
	for _, o := range objects {
		switch err := o.exists(ctx, o.name); {
		case err == nil:
			there = append(there, o)
		case !apierrors.IsNotFound(err):
			return nil, fmt.Errorf("look for %s: %w", o, err)
		}
	}
	return there, nil
}

// uninstall deletes v1's objects. It returns when no pod of v1 is left, so that nobody writes to etcd any more.
func (d *Dump) uninstall(ctx context.Context) error {
	if err := d.deleteAll(ctx, d.workloads()); err != nil {
		return err
	}
	if err := d.awaitPodsGone(ctx); err != nil {
		return err
	}
	rest, err := d.rest(ctx)
	if err != nil {
		return err
	}
	if err := d.deleteAll(ctx, rest); err != nil {
		return err
	}
	d.done.uninstalled = true
	return nil
}

func (d *Dump) deleteAll(ctx context.Context, objects []v1Object) error {
	for _, o := range objects {
		err := o.delete(ctx, o.name, metav1.DeleteOptions{PropagationPolicy: new(metav1.DeletePropagationBackground)})
		switch {
		case err == nil:
			d.done.deleted++
			d.say("Deleted %s of Coil v1", o)
		case !apierrors.IsNotFound(err):
			return fmt.Errorf("delete %s: %w", o, err)
		}
	}
	return nil
}

func (d *Dump) awaitPodsGone(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, d.Timeout, fmt.Errorf("not within %v (--timeout)", d.Timeout))
	defer cancel()
	var left []string
	err := until(ctx, func(ctx context.Context) (bool, error) {
		now, err := d.v1Pods(ctx)
		if err != nil {
			return false, err
		}
		if len(now) > 0 && !slices.Equal(now, left) {
			d.say("Waiting for the end of %s", strings.Join(now, ", "))
		}
		left = now
		return len(left) == 0, nil
	})
	if err == nil {
		return nil
	}
	if len(left) == 0 {
		return caused(ctx, err)
	}
	if cause := context.Cause(ctx); cause != nil {
		err = cause // without the text of the call that was cut off
	}
	return fmt.Errorf("wait for the end of Coil v1's pods %s: %w; if their node is switched off, and stays so, "+
		"delete them with kubectl delete --force", strings.Join(left, ", "), err)
}

// ownedByV1 matches the ReplicaSets of v1's Deployment.
var ownedByV1 = regexp.MustCompile(`^coil-controllers-[a-z0-9]+$`)

// v1Pods returns the pods of v1 that exist, each as "name on node".
func (c Cluster) v1Pods(ctx context.Context) ([]string, error) {
	pods, err := c.Kube.CoreV1().Pods(v1Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list pods of namespace %s: %w", v1Namespace, err)
	}
	var names []string
	for _, p := range pods.Items {
		if ofV1(&p) {
			names = append(names, p.Name+" on "+p.Spec.NodeName)
		}
	}
	slices.Sort(names)
	return names, nil
}

func ofV1(p *corev1.Pod) bool {
	owner := metav1.GetControllerOf(p)
	if owner == nil {
		return false
	}
	return owner.Kind == "DaemonSet" && owner.Name == "coil-node" ||
		owner.Kind == "ReplicaSet" && ownedByV1.MatchString(owner.Name)
}

// refuseRunning returns an error if v1 may still write to etcd.
func (c Cluster) refuseRunning(ctx context.Context) error {
	there, err := present(ctx, c.workloads())
	if err != nil {
		return err
	}
	pods, err := c.v1Pods(ctx)
	if err != nil {
		return err
	}
	var found []string
	for _, o := range there {
		found = append(found, o.String())
	}
	for _, p := range pods {
		found = append(found, "Pod "+p)
	}
	if len(found) > 0 {
		return fmt.Errorf("the pods of Coil v1 may still write to etcd: there is %s; delete them, or leave out --skip-uninstall", strings.Join(found, ", "))
	}
	return nil
}
