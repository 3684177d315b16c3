package coild

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/standby"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	// behindFor is for how long a node lacks connections before the condition says so, and behindAgain is the time until the next look.
	behindFor   = 5 * time.Second
	behindAgain = 30 * time.Second
)

// tellStandby says in an AddressBlock whether the connections of its address are copied. Only the node that has the address does so, or the one that had it
// last while none has it.
func (h *holder) tellStandby(ctx context.Context, block string) error {
	b := h.blocks.Find(block)
	if b == nil || b.Floating == nil {
		return nil
	}
	state, copied := h.standby.State(b.Name)
	after, again := standbyConditions(h.NodeName, b, state, copied, time.Now())
	if !equality.Semantic.DeepEqual(b.Status.Conditions, after) {
		if err := floating.PatchConditions(ctx, h.clients.Coil.AddressBlocks(), b, after); err != nil {
			return err
		}
	}
	if again > 0 {
		return reconcile.Later(again)
	}
	return nil
}

// standbyConditions returns the conditions that a block is to have, and when to look again; 0 means when the state changes. copied says whether
// connections are copied from the node, and state how far.
func standbyConditions(node string, b *v2.AddressBlock, state standby.State, copied bool, now time.Time) (after []metav1.Condition, again time.Duration) {
	after = slices.Clone(b.Status.Conditions)
	f := b.Floating
	switch {
	case f.Holding.Holder == "":
		had := meta.FindStatusCondition(after, v2.BlockStandbyInStep)
		if had == nil || had.Reason == v2.ReasonNoHolder || !strings.HasPrefix(had.Message, saidBy(node)) {
			return after, 0
		}
		meta.SetStatusCondition(&after, metav1.Condition{
			Type: v2.BlockStandbyInStep, Status: metav1.ConditionUnknown, Reason: v2.ReasonNoHolder, LastTransitionTime: metav1.NewTime(now),
			Message: saidBy(node) + "no node has the address",
		})
		return after, 0
	case f.Holding.Holder != node:
		return after, 0
	case !f.Standby:
		meta.RemoveStatusCondition(&after, v2.BlockStandbyInStep)
		return after, 0
	case !copied && slices.ContainsFunc(f.Successors, func(n v2.FloatingNode) bool { return n.Node != node }):
		return after, 0 // it moves, or isn't here any more
	}
	c := metav1.Condition{Type: v2.BlockStandbyInStep, Status: metav1.ConditionFalse, LastTransitionTime: metav1.NewTime(now)}
	// The text after the colon may differ each time, and is no reason to write.
	var message string
	switch behind := now.Sub(state.Since); {
	case !copied:
		c.Reason, message = v2.ReasonNoFollower, saidBy(node)+"no other node may have the address: the Egress needs ready routers on two nodes"
	case state.Since.IsZero():
		c.Status, c.Reason, message = metav1.ConditionTrue, v2.ReasonInStep, saidBy(node)+"its connections are copied to node "+state.Node
	case behind < behindFor:
		return after, behindFor - behind
	default:
		c.Reason, message, again = v2.ReasonBehind, fmt.Sprintf("%snode %s lacks connections", saidBy(node), state.Node), behindAgain
	}
	if have := meta.FindStatusCondition(after, c.Type); have != nil && have.Status == c.Status && have.Reason == c.Reason && strings.HasPrefix(have.Message+": ", message+": ") {
		return after, again
	}
	if c.Message = message; state.Why != "" {
		c.Message += ": " + state.Why
	}
	meta.SetStatusCondition(&after, c)
	return after, again
}

// saidBy begins the message of a condition that a node has written.
func saidBy(node string) string { return "node " + node + ": " }
