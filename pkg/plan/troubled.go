package plan

import (
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// AtNode is how messages of the conditions of an AddressBlock begin: with the node that has seen what they tell.
func AtNode(node string) string { return "node " + node + ": " }

// ForwardingBlockedAt returns the node that drops packets of a floating address that it should forward; empty if no node does, as far as is known.
func ForwardingBlockedAt(b *v2.AddressBlock) string {
	c := meta.FindStatusCondition(b.Status.Conditions, v2.BlockForwardingBlocked)
	if c == nil || c.Status != metav1.ConditionTrue {
		return ""
	}
	node, _, _ := strings.Cut(strings.TrimPrefix(c.Message, "node "), ": ")
	return node
}
