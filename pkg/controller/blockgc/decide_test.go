package blockgc

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

func TestDecide(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	const period = 10 * time.Minute
	ago := func(d time.Duration) string { return now.Add(-d).Format(time.RFC3339) }
	node := func(uid types.UID, age time.Duration) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{UID: uid, CreationTimestamp: metav1.NewTime(now.Add(-age))}}
	}
	type block struct {
		uid, note string
		disowned  string
		reserved  bool
		deleted   time.Duration // ago; 0 is "not"
	}
	tests := []struct {
		name  string
		block block
		node  *corev1.Node
		want  action
		wait  time.Duration
	}{
		{"the node is there", block{uid: "a"}, node("a", 0), leave, 0},
		{"the node is there, the block is being deleted", block{uid: "a", deleted: time.Hour}, node("a", time.Hour), leave, 0},
		{"the node is there, the block is of 2.x", block{}, node("a", time.Hour), leave, 0},
		{"the node is there, an earlier one was gone", block{uid: "b", note: ago(time.Hour) + " a", deleted: time.Hour}, node("b", time.Hour), leave, 0},
		{"reserved, no node", block{uid: "a", reserved: true}, nil, leave, 0},
		{"reserved and deleted, no node", block{uid: "a", deleted: time.Hour, reserved: true}, nil, quarantine, period},
		{"reserved and deleted, no node, quarantine over", block{uid: "a", note: ago(time.Hour) + " a", deleted: time.Hour, reserved: true}, nil, release, 0},
		{"reserved and deleted, the node is there", block{uid: "a", deleted: time.Hour, reserved: true}, node("a", time.Hour), leave, 0},
		{"no node", block{uid: "a"}, nil, quarantine, period},
		{"no node, 2.x", block{}, nil, quarantine, period},
		{"no node, noted but not deleted", block{uid: "a", note: ago(time.Hour) + " a"}, nil, quarantine, period},
		{"no node, deleted before it was gone", block{uid: "a", deleted: time.Hour}, nil, quarantine, period},
		{"no node, noted for the one before", block{uid: "b", note: ago(time.Hour) + " a", deleted: time.Hour}, nil, quarantine, period},
		{"no node, note can't be read", block{uid: "a", note: "yesterday a", deleted: time.Hour}, nil, quarantine, period},
		{"in quarantine", block{uid: "a", note: ago(4*time.Minute) + " a", deleted: 4 * time.Minute}, nil, leave, 6 * time.Minute},
		{"noted after it was deleted", block{uid: "a", note: ago(time.Minute) + " a", deleted: time.Hour}, nil, leave, 9 * time.Minute},
		{"deleted after it was noted", block{uid: "a", note: ago(time.Hour) + " a", deleted: 3 * time.Minute}, nil, leave, 7 * time.Minute},
		{"quarantine over", block{uid: "a", note: ago(10*time.Minute) + " a", deleted: 10 * time.Minute}, nil, release, 0},
		{"quarantine over, 2.x", block{note: ago(time.Hour) + " ", deleted: time.Hour}, nil, release, 0},
		{"made again just now", block{uid: "a"}, node("b", time.Minute), leave, 0},
		{"made again, its coild said nothing", block{uid: "a"}, node("b", time.Hour), leave, 0},
		{"made again in quarantine, its coild said nothing", block{uid: "a", note: ago(time.Hour) + " a", deleted: time.Hour}, node("b", time.Hour), leave, 0},
		{"made again, disowned", block{uid: "a", disowned: "b"}, node("b", time.Minute), quarantine, period},
		{"made again, disowned in quarantine", block{uid: "a", disowned: "b", note: ago(time.Minute) + " a", deleted: time.Minute}, node("b", time.Minute), leave, 9 * time.Minute},
		{"made again, disowned, quarantine over", block{uid: "a", disowned: "b", note: ago(time.Hour) + " a", deleted: time.Hour}, node("b", time.Minute), release, 0},
		{"made again twice, the one before disowned it", block{uid: "a", disowned: "b", note: ago(time.Hour) + " a", deleted: time.Hour}, node("c", time.Hour), leave, 0},
		{"of 2.x, older than the node, disowned", block{disowned: "b"}, node("b", time.Minute), quarantine, period},
		{"disowned, then claimed", block{uid: "b", disowned: "b"}, node("b", time.Hour), leave, 0},
		{"disowned, no node", block{uid: "a", disowned: "b"}, nil, quarantine, period},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{}, Labels: map[string]string{}}}
			if tt.block.uid != "" {
				b.Annotations[v2.AnnotationNodeUID] = tt.block.uid
			}
			if tt.block.note != "" {
				b.Annotations[v2.AnnotationNodeGone] = tt.block.note
			}
			if tt.block.disowned != "" {
				b.Annotations[v2.AnnotationDisowned] = tt.block.disowned
			}
			if tt.block.reserved {
				b.Labels[v2.LabelReserved] = v2.ReservedValue
			}
			if tt.block.deleted > 0 {
				b.DeletionTimestamp = new(metav1.NewTime(now.Add(-tt.block.deleted)))
			}
			if got, wait := decide(b, tt.node, now.Add(-period), now, period); got != tt.want || wait != tt.wait {
				t.Errorf("decided %d, wait %s; want %d, %s", got, wait, tt.want, tt.wait)
			}
		})
	}
}

func TestNoQuarantine(t *testing.T) {
	now := time.Now()
	b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{}}}
	if got, wait := decide(b, nil, now, now, 0); got != quarantine || wait != 0 {
		t.Errorf("decided %d, wait %s for a block whose node is gone", got, wait)
	}
	b.Annotations[v2.AnnotationNodeGone] = goneNote(b, now)
	b.DeletionTimestamp = new(metav1.NewTime(now))
	if got, wait := decide(b, nil, now, now, 0); got != release || wait != 0 {
		t.Errorf("decided %d, wait %s right after", got, wait)
	}
}

func TestNoteIsRead(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	for _, uid := range []string{"", "a"} {
		b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{}}}
		if uid != "" {
			b.Annotations[v2.AnnotationNodeUID] = uid
		}
		b.Annotations[v2.AnnotationNodeGone] = goneNote(b, now)
		if got, ok := goneSince(b); !ok || !got.Equal(now) {
			t.Errorf("with UID %q the note is read as %s, %t", uid, got, ok)
		}
	}
}
