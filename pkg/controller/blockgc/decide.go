package blockgc

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// action is what to do with a block.
type action int

const (
	// leave: nothing, now or for the time that is told with it.
	leave action = iota
	// quarantine: note the time and mark the block deleted.
	quarantine
	// release: remove the finalizer, so that the name is free.
	release
)

// decide says what to do with a block whose node is as the API server has it now;
// nil if there is none of the name. seen is since when this process has seen the block in quarantine, and no Node that
// may use it: the note on the block may be by the clock of another machine, and of an earlier deletion. wait is when to
// look again, 0 for "on a change".
func decide(b *v2.AddressBlock, node *corev1.Node, seen, now time.Time, period time.Duration) (a action, wait time.Duration) {
	reserved := b.Labels[v2.LabelReserved] == v2.ReservedValue && b.DeletionTimestamp == nil
	if reserved || node != nil && !disowned(b, node) {
		return leave, 0
	}
	if !inQuarantine(b) {
		return quarantine, period
	}
	since, _ := goneSince(b)
	if b.DeletionTimestamp.After(since) {
		since = b.DeletionTimestamp.Time
	}
	if since.After(now) {
		since = seen // by a clock that was ahead, for any time
	}
	if w := max(since.Add(period).Sub(now), period-now.Sub(seen)); w > 0 {
		return leave, w
	}
	return release, 0
}

// disowned says whether the coild of a Node said that its machine doesn't use a block; one that it
// claimed later is its own.
func disowned(b *v2.AddressBlock, n *corev1.Node) bool {
	return b.Annotations[v2.AnnotationDisowned] == string(n.UID) && b.Annotations[v2.AnnotationNodeUID] != string(n.UID)
}

// ofEarlier says whether a block was made for an earlier Node of the name. One of Coil 2.x names no
// Node, but none has a block that is older than itself.
func ofEarlier(b *v2.AddressBlock, n *corev1.Node) bool {
	if uid := b.Annotations[v2.AnnotationNodeUID]; uid != "" {
		return uid != string(n.UID)
	}
	return b.CreationTimestamp.Before(&n.CreationTimestamp)
}

// inQuarantine says whether a block waits for its quarantine to end.
func inQuarantine(b *v2.AddressBlock) bool {
	_, ok := goneSince(b)
	return ok && b.DeletionTimestamp != nil
}

// goneSince returns when the node that has the block now was found gone. A note
// about an earlier node doesn't count.
func goneSince(b *v2.AddressBlock) (time.Time, bool) {
	at, uid, _ := strings.Cut(b.Annotations[v2.AnnotationNodeGone], " ")
	t, err := time.Parse(time.RFC3339, at)
	return t, err == nil && uid == b.Annotations[v2.AnnotationNodeUID]
}

// goneNote is the value of AnnotationNodeGone from which goneSince reads now.
func goneNote(b *v2.AddressBlock, now time.Time) string {
	return now.UTC().Format(time.RFC3339) + " " + b.Annotations[v2.AnnotationNodeUID]
}
