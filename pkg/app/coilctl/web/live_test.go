package web

import (
	"encoding/json"
	"fmt"
	"testing"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/page"
	"github.com/coil-net/coil/pkg/testkit"
)

// Who reads late gets what has changed since in one piece, however often it changed. Who is too far behind gets all that there is. The memory that this takes is bounded.
func TestLate(t *testing.T) {
	l := &live{next: make(chan struct{})}
	publish := func(names ...string) {
		c := page.Cluster{Sources: []page.Source{{Resource: page.Pools, Known: true}}}
		for _, n := range names {
			p := &v2.AddressPool{}
			p.Name = n
			c.Objects.Pools = append(c.Objects.Pools, p)
		}
		l.publish(c)
	}
	since := func(version int64) (u update, now int64) {
		t.Helper()
		text, now, _, err := l.since(version)
		testkit.Check(t, err)
		if text != nil {
			testkit.Check(t, json.Unmarshal(text, &u))
		}
		return u, now
	}
	publish("a", "b")
	all, first := since(0)
	if !all.All || len(all.Rows["pools"]) != 2 {
		t.Fatalf("at first there is %+v", all)
	}
	if again, now := since(first); again.Rows != nil || now != first {
		t.Errorf("without a change there is %+v", again)
	}
	publish("a", "b")
	if l.version != first {
		t.Error("the same is a change")
	}
	for i := range 100 {
		publish("a", fmt.Sprint("c", i))
	}
	publish("a", "b", "d")
	late, now := since(first)
	if late.All || len(late.Rows["pools"]) != 2 || late.Rows["pools"]["b"] == nil || late.Rows["pools"]["d"] == nil || len(late.Gone["pools"]) != 100 {
		t.Errorf("after many changes there are %d rows, and %d are gone", len(late.Rows["pools"]), len(late.Gone["pools"]))
	}
	var many []string
	for i := range maxGone {
		many = append(many, fmt.Sprint("e", i))
	}
	publish(many...)
	publish("a")
	if len(l.gone) != maxGone {
		t.Errorf("%d rows that are gone are remembered", len(l.gone))
	}
	if behind, _ := since(now); !behind.All || len(behind.Rows["pools"]) != 1 || behind.Gone != nil {
		t.Errorf("who is far behind gets %d rows, and %d are gone", len(behind.Rows["pools"]), len(behind.Gone["pools"]))
	}
	before := l.version
	l.forget()
	if text, _, _, err := l.since(before); text != nil || err != nil {
		t.Errorf("what is forgotten is %s, %v", text, err)
	}
	publish("a")
	if again, _ := since(before); !again.All {
		t.Error("who knows what was forgotten doesn't get all")
	}
}
