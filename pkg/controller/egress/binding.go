package egress

import (
	"context"
	"encoding/json"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/plan"
)

// syncBinding gives the accounts of routers their rights, and takes them from those in
// namespaces without an Egress. Other subjects are an admin's and stay.
func (c *Controller) syncBinding(ctx context.Context, name string) error {
	egresses, err := c.cfg.Egresses.Lister().List(labels.Everything())
	if err != nil {
		return err
	}
	have, err := cached(c.cfg.Accounts.Rbac().V1().ClusterRoleBindings().Lister().Get(name))
	if err != nil {
		return err
	}
	api := c.cfg.Core.RbacV1().ClusterRoleBindings()
	want := plan.RouterBinding(egresses, nil)
	if have != nil {
		want = plan.RouterBinding(egresses, (*have).Subjects)
		if (*have).RoleRef != want.RoleRef {
			return fmt.Errorf("ClusterRoleBinding %s is of %s %s, which can't be changed: delete it", name, (*have).RoleRef.Kind, (*have).RoleRef.Name)
		}
		if plan.SameSubjects((*have).Subjects, want.Subjects) {
			return nil
		}
		// Who adds a subject meanwhile must not lose it.
		want.ResourceVersion = (*have).ResourceVersion
	}
	body, err := json.Marshal(want)
	if err != nil {
		return err
	}
	if _, err := api.Patch(ctx, name, types.ApplyPatchType, body, metav1.PatchOptions{FieldManager: plan.EgressController, Force: new(true)}); err != nil {
		return fmt.Errorf("apply ClusterRoleBinding %s: %w", name, err)
	}
	klog.FromContext(ctx).V(2).Info("Bound accounts of routers", "binding", name, "subjects", len(want.Subjects))
	return nil
}
