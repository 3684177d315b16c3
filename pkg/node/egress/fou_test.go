package egress

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A pod that needs tunnels isn't started where the kernel has none.
func TestAddWithoutFoU(t *testing.T) {
	w := newWorld()
	w.egress("a", "10.96.0.1", "192.0.2.0/24")
	w.pod("a", "a")
	w.pod("plain", "")
	m := w.manager(false)
	m.cfg.Available = func() error { return errors.New("the kernel has no FoU") }
	if err := w.add(t, m, "a"); err == nil || !strings.Contains(err.Error(), "net/a: the kernel has no FoU") {
		t.Errorf("a pod that needs it: %v", err)
	}
	if err := w.add(t, m, "plain"); err != nil {
		t.Errorf("one that doesn't: %v", err)
	}
}

// A pod that comes to use an Egress while it runs is told that the kernel has no FoU, once.
func TestChangeWithoutFoU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.egress("a", "10.96.0.1", "192.0.2.0/24")
		w.pod("p", "")
		m := w.manager(false)
		m.cfg.Available = func() error { return errors.New("the kernel has no FoU") }
		if err := w.add(t, m, "p"); err != nil {
			t.Fatal(err)
		}
		defer running(t, m)()
		for _, destination := range []string{"192.0.2.0/24", "192.0.2.0/25"} {
			w.change(m, func() {
				w.pod("p", "a")
				w.egress("a", "10.96.0.1", destination)
			})
			time.Sleep(time.Second)
			synctest.Wait()
		}
		if want := []string{"p: EgressUnavailable: destinations of the pod's Egresses are unreachable: the kernel has no FoU"}; !slices.Equal(w.events, want) {
			t.Errorf("Events %q, want %q", w.events, want)
		}
	})
}
