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

// unblock takes Nodes that are gone out of the condition of a block that Nodes drop packets of its address: they can't do so themselves.
func (c *Controller) unblock(ctx context.Context, b *v2.AddressBlock) error {
	nodes := plan.ForwardingBlockedAt(b)
	gone := slices.DeleteFunc(slices.Clone(nodes), func(node string) bool { return cached[corev1.Node](c.cfg.Cluster.Core().V1().Nodes(), "", node) != nil })
	if len(gone) == 0 {
		return nil
	}
	conditions := slices.Clone(b.Status.Conditions)
	blocked := meta.FindStatusCondition(conditions, v2.BlockForwardingBlocked)
	after := *blocked
	for _, node := range gone {
		after.Message = plan.Told(after.Message, node, "")
	}
	if len(gone) == len(nodes) {
		after.LastTransitionTime = metav1.Time{} // now
		after.Status, after.Reason, after.Message = metav1.ConditionFalse, v2.ReasonOver, plan.AtNode(gone[0])+"the Node is gone"
	}
	meta.SetStatusCondition(&conditions, after)
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
		return fmt.Errorf("say in AddressBlock %s that Nodes %s are gone: %w", b.Name, plan.Enumerate(gone), err)
	}
	return nil
}
