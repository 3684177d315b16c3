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
// nil if there is none of the name. seen is when this process first saw the block in quarantine: what
// was noted on it is by the clock of another machine, perhaps. wait is when to look again, 0 for
// "on a change".
func decide(b *v2.AddressBlock, node *corev1.Node, seen, now time.Time, period time.Duration) (a action, wait time.Duration) {
	uid := b.Annotations[v2.AnnotationNodeUID]
	if b.Labels[v2.LabelReserved] == v2.ReservedValue {
		return leave, 0
	}
	if node != nil {
		if uid == string(node.UID) || b.Annotations[v2.AnnotationDisowned] != string(node.UID) {
			return leave, 0
		}
	}
	if !inQuarantine(b) {
		return quarantine, period
	}
	since, _ := goneSince(b)
	if b.DeletionTimestamp.After(since) {
		since = b.DeletionTimestamp.Time
	}
	if w := max(since.Add(period).Sub(now), period-now.Sub(seen)); w > 0 {
		return leave, w
	}
	return release, 0
}

// inQuarantine says whether a block waits for its quarantine to end.
func inQuarantine(b *v2.AddressBlock) bool {
	_, ok := goneSince(b)
	return ok && b.DeletionTimestamp != nil
}

// goneSince returns when the node that has the block now was found gone. What was
// noted about an earlier node doesn't count.
func goneSince(b *v2.AddressBlock) (time.Time, bool) {
	at, uid, _ := strings.Cut(b.Annotations[v2.AnnotationNodeGone], " ")
	t, err := time.Parse(time.RFC3339, at)
	return t, err == nil && uid == b.Annotations[v2.AnnotationNodeUID]
}

// goneNote is the value of AnnotationNodeGone from which goneSince reads now.
func goneNote(b *v2.AddressBlock, now time.Time) string {
	return now.UTC().Format(time.RFC3339) + " " + b.Annotations[v2.AnnotationNodeUID]
}
