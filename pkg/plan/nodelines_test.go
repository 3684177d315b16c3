package plan

import (
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// A condition has a line of each node, which only that node changes.
func TestTold(t *testing.T) {
	m := Told(Told(Told("", "a", "rules: drop"), "b", "drop"), "a", "rules: drop more")
	if want := "node b: drop\nnode a: rules: drop more"; m != want {
		t.Errorf("told is %q, want %q", m, want)
	}
	if a, b, c := ToldBy(m, "a"), ToldBy(m, "b"), ToldBy(m, "c"); a != "rules: drop more" || b != "drop" || c != "" {
		t.Errorf("told are %q, %q, %q", a, b, c)
	}
	block := &v2.AddressBlock{}
	block.Status.Conditions = []metav1.Condition{{Type: v2.BlockForwardingBlocked, Status: metav1.ConditionTrue, Message: m}}
	if got := ForwardingBlockedAt(block); !slices.Equal(got, []string{"b", "a"}) {
		t.Errorf("blocked at %q", got)
	}
	block.Status.Conditions[0].Status = metav1.ConditionFalse
	if got := ForwardingBlockedAt(block); got != nil {
		t.Errorf("when it is over: blocked at %q", got)
	}
	if m = Told(Told(m, "b", ""), "a", ""); m != "" {
		t.Errorf("at the end %q is told", m)
	}
}

// A node that is gone tells nothing any more.
func TestWithoutTeller(t *testing.T) {
	block := &v2.AddressBlock{}
	block.Status.Conditions = []metav1.Condition{
		{Type: v2.BlockConflicting, Status: metav1.ConditionTrue, Message: "node b: a rival"},
		{Type: v2.BlockForwardingBlocked, Status: metav1.ConditionTrue, Message: "node a: dropped\nnode b: dropped"},
		{Type: v2.BlockStandbyInStep, Status: metav1.ConditionFalse, Message: "node b: late"},
	}
	if got := Tellers(block); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("tellers are %q, want a and b", got)
	}
	for i, c := range WithoutTeller(block, "b", "the Node is gone") {
		want := []metav1.Condition{
			{Status: metav1.ConditionFalse, Reason: v2.ReasonOver, Message: "node b: the Node is gone"},
			{Status: metav1.ConditionTrue, Message: "node a: dropped"},
			{Status: metav1.ConditionFalse, Message: "node b: late"},
		}[i]
		if c.Status != want.Status || c.Reason != want.Reason || c.Message != want.Message {
			t.Errorf("condition %s is %+v, want %+v", c.Type, c, want)
		}
	}
	if m := block.Status.Conditions[0].Message; m != "node b: a rival" {
		t.Errorf("the block itself says %q now", m)
	}
}
