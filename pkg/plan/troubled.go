package plan

import (
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// AtNode is how lines of messages of the conditions of an AddressBlock begin: with the node that has seen what they tell.
func AtNode(node string) string { return "node " + node + ": " }

// ForwardingBlockedAt returns the nodes that drop packets of a floating address that they should forward, as far as is known.
func ForwardingBlockedAt(b *v2.AddressBlock) (nodes []string) {
	c := meta.FindStatusCondition(b.Status.Conditions, v2.BlockForwardingBlocked)
	if c == nil || c.Status != metav1.ConditionTrue {
		return nil
	}
	for line := range strings.Lines(c.Message) {
		node, _, _ := strings.Cut(strings.TrimPrefix(line, "node "), ": ")
		nodes = append(nodes, node)
	}
	return nodes
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
