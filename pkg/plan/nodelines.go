package plan

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Of a floating address each node may see something else. So the conditions Conflicting and ForwardingBlocked of its AddressBlock have a line of each
// node that has seen what they tell, which begins with "node n1: ". A node changes its own line alone.

// AtNode is how lines of messages of the conditions of an AddressBlock begin: with the node that has seen what they tell.
func AtNode(node string) string { return "node " + node + ": " }

// ForwardingBlockedAt returns the nodes that drop packets of a floating address that they should forward, as far as is known.
func ForwardingBlockedAt(b *v2.AddressBlock) []string { return tellers(b, v2.BlockForwardingBlocked) }

// told are the conditions of an AddressBlock whose messages have a line of each node that has seen what they tell.
var told = []string{v2.BlockConflicting, v2.BlockForwardingBlocked}

// Tellers returns the nodes that have a line in a condition of an AddressBlock, sorted.
func Tellers(b *v2.AddressBlock) (nodes []string) {
	for _, kind := range told {
		nodes = append(nodes, tellers(b, kind)...)
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// tellers returns the nodes that have a line in a condition that is True.
func tellers(b *v2.AddressBlock, kind string) (nodes []string) {
	c := meta.FindStatusCondition(b.Status.Conditions, kind)
	if c == nil || c.Status != metav1.ConditionTrue {
		return nil
	}
	for line := range strings.Lines(c.Message) {
		node, _, _ := strings.Cut(strings.TrimPrefix(line, "node "), ": ")
		nodes = append(nodes, node)
	}
	return nodes
}

// WithoutTeller returns the conditions of an AddressBlock without the lines of a node. A condition without any other line is False, because of why.
func WithoutTeller(b *v2.AddressBlock, node, why string) []metav1.Condition {
	after := slices.Clone(b.Status.Conditions)
	for _, kind := range told {
		if !slices.Contains(tellers(b, kind), node) {
			continue
		}
		c := *meta.FindStatusCondition(after, kind)
		if c.Message = Told(c.Message, node, ""); c.Message == "" {
			c.LastTransitionTime = metav1.Time{} // now
			c.Status, c.Reason, c.Message = metav1.ConditionFalse, v2.ReasonOver, AtNode(node)+why
		}
		meta.SetStatusCondition(&after, c)
	}
	return after
}

// Told returns a message of a condition of an AddressBlock, which has a line of each node that has seen something, with another line of a node, or
// with none if that is empty.
func Told(message, node, text string) string {
	var lines []string
	for line := range strings.Lines(message) {
		if !strings.HasPrefix(line, AtNode(node)) {
			lines = append(lines, strings.TrimSuffix(line, "\n"))
		}
	}
	if text != "" {
		lines = append(lines, AtNode(node)+text)
	}
	return strings.Join(lines, "\n")
}

// ToldBy returns what a node says in a message of a condition; empty if it says nothing.
func ToldBy(message, node string) string {
	for line := range strings.Lines(message) {
		if text, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), AtNode(node)); ok {
			return text
		}
	}
	return ""
}
