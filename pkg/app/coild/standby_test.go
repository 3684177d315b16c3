package coild

import (
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/node/floating/standby"
)

// The condition of a block says how far its connections are copied, as soon as that is certain, and is written when it says something else.
func TestStandbyConditions(t *testing.T) {
	now := time.Now()
	behind := func(d time.Duration, why string) standby.State {
		return standby.State{Node: "b", Since: now.Add(-d), Why: why}
	}
	two, one := []v2.FloatingNode{{Node: "b"}, {Node: "a"}}, []v2.FloatingNode{{Node: "a"}}
	b := &v2.AddressBlock{Floating: &v2.Floating{Standby: true, Holding: v2.FloatingHolding{Holder: "a"}}}
	other := metav1.Condition{Type: v2.BlockConflicting, Status: metav1.ConditionFalse, Reason: v2.ReasonOver}
	b.Status.Conditions = []metav1.Condition{other}
	for _, c := range []struct {
		name       string
		holder     string
		on         bool
		successors []v2.FloatingNode
		state      standby.State
		copied     bool
		want       string
		again      time.Duration
	}{
		{"it begins", "a", true, two, behind(time.Second, "no copy"), true, "", 4 * time.Second},
		{"it is slow", "a", true, two, behind(6*time.Second, "no copy"), true, "False Behind node a: node b lacks connections: no copy", 30 * time.Second},
		{"it is slow for another reason", "a", true, two, behind(7*time.Second, "port 4711"), true, "False Behind node a: node b lacks connections: no copy", 30 * time.Second},
		{"all is there", "a", true, two, standby.State{Node: "b"}, true, "True InStep node a: its connections are copied to node b", 0},
		{"a short break", "a", true, two, behind(time.Second, "a break"), true, "True InStep node a: its connections are copied to node b", 4 * time.Second},
		{"another follower", "a", true, two, standby.State{Node: "c"}, true, "True InStep node a: its connections are copied to node c", 0},
		{"one with a longer name", "a", true, two, standby.State{Node: "c-10"}, true, "True InStep node a: its connections are copied to node c-10", 0},
		{"one with a shorter name", "a", true, two, standby.State{Node: "c-1"}, true, "True InStep node a: its connections are copied to node c-1", 0},
		{"and the other again", "a", true, two, standby.State{Node: "c"}, true, "True InStep node a: its connections are copied to node c", 0},
		{"it moves", "a", true, two, standby.State{}, false, "True InStep node a: its connections are copied to node c", 0},
		{"another node's", "b", true, two, standby.State{}, false, "True InStep node a: its connections are copied to node c", 0},
		{"no other node", "a", true, one, standby.State{}, false, "False NoFollower node a: no other node may have the address: the Egress needs ready routers on two nodes", 0},
		{"no node", "", true, one, standby.State{}, false, "Unknown NoHolder node a: no node has the address", 0},
		{"no node still", "", true, two, standby.State{}, false, "Unknown NoHolder node a: no node has the address", 0},
		{"it has the address again", "a", true, two, standby.State{Node: "b"}, true, "True InStep node a: its connections are copied to node b", 0},
		{"no standby", "a", false, two, standby.State{}, false, "", 0},
	} {
		b.Floating.Holding.Holder, b.Floating.Standby, b.Floating.Successors = c.holder, c.on, c.successors
		after, again := standbyConditions("a", b, c.state, c.copied, now)
		var got string
		if s := meta.FindStatusCondition(after, v2.BlockStandbyInStep); s != nil {
			got = strings.Join([]string{string(s.Status), s.Reason, s.Message}, " ")
		}
		if got != c.want || again != c.again {
			t.Errorf("%s: %q, again after %s, want %q, %s", c.name, got, again, c.want, c.again)
		}
		if after[0] != other {
			t.Errorf("%s: the other condition is %+v", c.name, after[0])
		}
		b.Status.Conditions = after
	}
}

// While no node has an address, only the one that had it last says so: others would write the same, or a node's name in place of another's.
func TestNoHolderIsSaidOnce(t *testing.T) {
	now := time.Now()
	for _, said := range []string{"node b: its connections are copied to node a", "node a-1: its connections are copied to node b", ""} {
		b := &v2.AddressBlock{Floating: &v2.Floating{Standby: true}}
		if said != "" {
			b.Status.Conditions = []metav1.Condition{{Type: v2.BlockStandbyInStep, Status: metav1.ConditionTrue, Reason: v2.ReasonInStep, Message: said}}
		}
		if after, again := standbyConditions("a", b, standby.State{}, false, now); !slices.Equal(after, b.Status.Conditions) || again != 0 {
			t.Errorf("%q: %+v, again after %s", said, after, again)
		}
	}
}
