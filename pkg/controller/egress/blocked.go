package egress

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
)

// unblock ends the condition of a block that a Node drops packets of its address, when that Node is gone: it can't end the condition itself, and
// no other node can tell what it has found out.
func (c *Controller) unblock(ctx context.Context, b *v2.AddressBlock) error {
	node := plan.ForwardingBlockedAt(b)
	if node == "" || cached[corev1.Node](c.cfg.Cluster.Core().V1().Nodes(), "", node) != nil {
		return nil
	}
	conditions := slices.Clone(b.Status.Conditions)
	meta.SetStatusCondition(&conditions, metav1.Condition{
		Type: v2.BlockForwardingBlocked, Status: metav1.ConditionFalse, Reason: v2.ReasonOver, Message: plan.AtNode(node) + "the Node is gone",
	})
	body, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": b.UID, "resourceVersion": b.ResourceVersion},
		"status":   map[string]any{"conditions": conditions},
	})
	if err != nil {
		return err
	}
	_, err = c.cfg.Coil.CoilV2().AddressBlocks().Patch(ctx, b.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: egress.ControllerName}, "status")
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil // its event comes
	case err != nil:
		return fmt.Errorf("say in AddressBlock %s that Node %s is gone: %w", b.Name, node, err)
	}
	return nil
}
