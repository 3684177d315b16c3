package egress

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube/object"
	"github.com/coil-net/coil/pkg/plan/egress"
)

// ensureBinding gives the account of routers its rights in its namespace.
func (c *Controller) ensureBinding(ctx context.Context, e *v2.Egress) error {
	have := c.bindingIn(e.Namespace)
	err := writer(c.cfg.Core.RbacV1().RoleBindings(e.Namespace), ownedByEgresses).
		Ensure(ctx, have, egress.RouterBinding(e.Namespace, c.egresses.In(e.Namespace)))
	var foreign *object.ForeignError
	if errors.As(err, &foreign) && have != nil && egress.BindsRouters(have) {
		return nil // somebody else's serves, too
	}
	return err
}

func (c *Controller) bindingIn(namespace string) *rbacv1.RoleBinding {
	return cached[rbacv1.RoleBinding](c.cfg.Accounts.Rbac().V1().RoleBindings(), namespace, egress.RouterAccount)
}

// syncBinding takes from accounts of routers the rights that former versions gave them in all
// namespaces, as soon as they have them in their own. Other subjects are an admin's and stay.
func (c *Controller) syncBinding(ctx context.Context, name string) error {
	have := cached[rbacv1.ClusterRoleBinding](c.cfg.Accounts.Rbac().V1().ClusterRoleBindings(), "", name)
	if have == nil {
		return nil
	}
	subjects := egress.WithoutRouters(have.Subjects, c.needsCluster)
	if len(subjects) == len(have.Subjects) {
		return nil
	}
	body, err := json.Marshal(map[string]any{
		// A subject that somebody adds meanwhile must not be lost.
		"metadata": map[string]any{"resourceVersion": have.ResourceVersion},
		"subjects": subjects,
	})
	if err != nil {
		return err
	}
	api := c.cfg.Core.RbacV1().ClusterRoleBindings()
	if _, err := api.Patch(ctx, name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: egress.ControllerName}); err != nil {
		return fmt.Errorf("patch ClusterRoleBinding %s: %w", name, err)
	}
	klog.FromContext(ctx).Info("Took the rights in all namespaces from accounts of routers", "binding", name, "subjects", len(subjects))
	return nil
}

// needsCluster says whether the binding that gives the routers of a namespace their rights is yet to be
// made. One that somebody else made in its place, and that doesn't, is told by a condition: else a tenant
// would keep the rights in all namespaces by it.
func (c *Controller) needsCluster(namespace string) bool {
	return len(c.egresses.In(namespace)) > 0 && c.bindingIn(namespace) == nil
}
