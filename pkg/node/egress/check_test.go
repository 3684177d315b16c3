package egress

import (
	"errors"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/testkit"
)

// CHECK is about what was made, as far as this process knows.
func TestManagerCheck(t *testing.T) {
	w := newWorld()
	w.egress("a", "10.96.0.1", "192.0.2.0/24")
	w.pod("a", "a")
	w.pod("plain", "")
	m := w.manager(true)
	id := sandboxOf("a").ID
	for _, pod := range []string{"a", "plain"} {
		if err := errors.Join(w.add(t, m, pod), m.Check(t.Context(), sandboxOf(pod).ID)); err != nil {
			t.Fatal(err)
		}
	}
	w.wrong = errors.New("tunnel x is missing")
	if err := m.Check(t.Context(), id); err == nil || err.Error() != "egress: tunnel x is missing" {
		t.Errorf("something is missing: %v", err)
	}
	if err := errors.Join(m.Check(t.Context(), sandboxOf("plain").ID), m.Check(t.Context(), attachment.ID{ContainerID: "other"})); err != nil {
		t.Errorf("pods without Egress: %v", err)
	}

	// Another process doesn't know what there should be until it has looked.
	w.wrong = nil
	for what, guard := range map[string]dataplane.ClientGuard{"another": {}, "its": w.guards["/a"]} {
		w.guards["/a"] = guard
		if err := m.Check(t.Context(), id); (err != nil) != (what == "another") {
			t.Errorf("the node has %s guard: %v", what, err)
		}
	}
	again := w.manager(true)
	if err := again.Restore(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if err := again.Check(t.Context(), id); !errors.Is(err, node.ErrUnavailable) {
		t.Errorf("after a restart: %v", err)
	}
	w.broken["/a"] = errors.New("no such device")
	if err := again.sync(t.Context(), "a"); err == nil {
		t.Error("no error")
	}
	if err := again.Check(t.Context(), id); err == nil || !strings.Contains(err.Error(), "no such device") {
		t.Errorf("what couldn't be made: %v", err)
	}
	delete(w.broken, "/a")
	testkit.Check(t, again.sync(t.Context(), "a"))
	if err := errors.Join(again.Check(t.Context(), id), again.Forget(t.Context(), id), again.Check(t.Context(), id)); err != nil {
		t.Errorf("set up, then deleted: %v", err)
	}
}
