package pools

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

func TestSuspended(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	status := func(s metav1.ConditionStatus, reason string, d time.Duration) []metav1.Condition {
		return []metav1.Condition{{Type: v2.PoolSuspended, Status: s, Reason: reason, LastTransitionTime: metav1.NewTime(ago(d)), Message: "m"}}
	}
	tests := []struct {
		name       string
		annotation string
		status     []metav1.Condition
		claims     Claims
		want       metav1.ConditionStatus
		left       time.Duration
	}{
		{name: "no claim", want: metav1.ConditionFalse},
		{name: "a claim", claims: Claims{Node: "a", Last: ago(time.Minute), Led: ago(time.Hour)}, want: metav1.ConditionTrue, left: 9 * time.Minute},
		{name: "an old claim", claims: Claims{Last: ago(SuspendFor), Led: ago(time.Hour)}, want: metav1.ConditionFalse},
		{name: "a claim that an earlier leader saw", status: status(metav1.ConditionTrue, ReasonBlocksClaimed, time.Hour), claims: Claims{Led: ago(4 * time.Minute)}, want: metav1.ConditionTrue, left: 6 * time.Minute},
		{name: "before this process leads", status: status(metav1.ConditionTrue, ReasonBlocksClaimed, time.Hour), want: metav1.ConditionTrue, left: SuspendFor},
		{name: "by a clock that is ahead", status: status(metav1.ConditionTrue, ReasonBlocksClaimed, -time.Hour), claims: Claims{Led: ago(SuspendFor)}, want: metav1.ConditionFalse},
		{name: "another claim after it", status: status(metav1.ConditionTrue, ReasonBlocksClaimed, time.Hour), claims: Claims{Last: ago(time.Minute), Led: ago(2 * time.Minute)}, want: metav1.ConditionTrue, left: 9 * time.Minute},
		{name: "it has ended", status: status(metav1.ConditionFalse, ReasonNoClaim, time.Minute), want: metav1.ConditionFalse},
		{name: "an admin suspends", annotation: "true", want: metav1.ConditionTrue},
		{name: "an admin suspended until now", status: status(metav1.ConditionTrue, ReasonAdmin, time.Minute), want: metav1.ConditionFalse},
		{name: "an admin ends it", annotation: "false", claims: Claims{Last: ago(time.Minute)}, want: metav1.ConditionFalse},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := &v2.AddressPool{Status: v2.AddressPoolStatus{Conditions: tt.status}}
			if tt.annotation != "" {
				p.Annotations = map[string]string{v2.AnnotationSuspend: tt.annotation}
			}
			c, left := Suspended(p, tt.claims, now)
			if c.Status != tt.want || left != tt.left || c.Reason == "" || c.Message == "" {
				t.Errorf("got %+v, %s; want %s, %s", c, left, tt.want, tt.left)
			}
		})
	}
}
