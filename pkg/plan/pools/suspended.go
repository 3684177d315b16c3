package pools

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// SuspendFor is for how long a pool gives no block after a node claimed one of it. Each coild
// that runs looks for its blocks within seconds of the return of the API server, and again
// every minute; the rest is for nodes that are started at the same time.
const SuspendFor = 10 * time.Minute

// Reasons of the condition Suspended of an AddressPool.
const (
	// ReasonNoClaim: Suspended is False.
	ReasonNoClaim = "NoClaim"
	// ReasonBlocksClaimed: Suspended is True because a node claimed a block.
	ReasonBlocksClaimed = "BlocksClaimed"
	// ReasonAdmin: Suspended is what an admin says.
	ReasonAdmin = "Admin"
)

// Claims has the last claim of a block of a pool, as far as a controller knows.
type Claims struct {
	// Node made the last claim, at Last. Last is zero if this process saw none.
	Node string
	Last time.Time
	// Led is when this process began to lead. Earlier leaders may have seen claims until then.
	Led time.Time
}

// Suspended says whether a pool gives no block, and for how long still; 0 is "until an admin decides".
// The status has the claims that an earlier leader saw. Its time isn't used: the clock may be another machine's.
func Suspended(p *v2.AddressPool, claims Claims, now time.Time) (c metav1.Condition, left time.Duration) {
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
	message := fmt.Sprintf("Node %s holds a block that isn't its own for the API server, as after a restore of etcd. Others may be lost, too: "+
		"none is carved for %s after the last claim; the annotation %s decides otherwise", claims.Node, SuspendFor, v2.AnnotationSuspend)
	was := meta.FindStatusCondition(p.Status.Conditions, v2.PoolSuspended)
	if claims.Last.IsZero() && was != nil && was.Status == metav1.ConditionTrue && was.Reason == ReasonBlocksClaimed {
		claims.Last, message = claims.Led, was.Message
		if claims.Last.IsZero() { // it is about to lead
			claims.Last = now
		}
	}
	if left = claims.Last.Add(SuspendFor).Sub(now); claims.Last.IsZero() || left <= 0 {
		return c, 0
	}
	c.Status, c.Reason, c.Message = metav1.ConditionTrue, ReasonBlocksClaimed, message
	return c, left
}
