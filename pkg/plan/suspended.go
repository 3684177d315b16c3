package plan

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

const (
	// SuspendFor is for how long a pool gives no block after a node claimed one of it. Each coild
	// that runs looks for its blocks within seconds of the return of the API server, and again
	// every minute; the rest is for nodes that are started at the same time.
	SuspendFor = 10 * time.Minute

	// ReasonNoClaim: Suspended is False.
	ReasonNoClaim = "NoClaim"
	// ReasonBlocksClaimed: Suspended is True because a node claimed a block.
	ReasonBlocksClaimed = "BlocksClaimed"
	// ReasonAdmin: Suspended is what an admin says.
	ReasonAdmin = "Admin"
)

// Suspended says whether a pool gives no block, and for how long still; 0 is "until an admin decides".
// claimed is when this process last saw a claim, zero for never: the status has what others saw.
func Suspended(p *v2.AddressPool, claimed, now time.Time) (c metav1.Condition, left time.Duration) {
	c = metav1.Condition{Type: v2.PoolSuspended, Status: metav1.ConditionFalse, Reason: ReasonNoClaim, Message: "Blocks are carved"}
	switch p.Annotations[v2.AnnotationSuspend] {
	case "true":
		c.Status, c.Reason = metav1.ConditionTrue, ReasonAdmin
		c.Message = fmt.Sprintf("No block is carved as long as the annotation %s is true", v2.AnnotationSuspend)
		return c, 0
	case "false":
		c.Reason = ReasonAdmin
		return c, 0
	}
	if was := meta.FindStatusCondition(p.Status.Conditions, v2.PoolSuspended); was != nil &&
		was.Status == metav1.ConditionTrue && was.Reason == ReasonBlocksClaimed && was.LastTransitionTime.After(claimed) {
		claimed = was.LastTransitionTime.Time
	}
	if left = claimed.Add(SuspendFor).Sub(now); claimed.IsZero() || left <= 0 {
		return c, 0
	}
	c.Status, c.Reason = metav1.ConditionTrue, ReasonBlocksClaimed
	c.Message = fmt.Sprintf("A node held a block that didn't exist, so others may be lost, too: none is carved for %s after the last claim; the annotation %s decides otherwise",
		SuspendFor, v2.AnnotationSuspend)
	return c, left
}
