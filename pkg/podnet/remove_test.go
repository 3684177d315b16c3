package podnet_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// crowd attaches pods 1 to n and returns what removes them, and their namespaces.
func crowd(t *testing.T, n node, count int) ([]podnet.Target, []*netnstest.NS) {
	t.Helper()
	var targets []podnet.Target
	var spaces []*netnstest.NS
	for i := range count {
		p, ns := newPod(t, i+1, true, true)
		a := n.mustAttachOnly(t, p)
		targets, spaces = append(targets, podnet.Target{ID: p.ID, HostIfIndex: a.HostIfIndex}), append(spaces, ns)
	}
	return targets, spaces
}

// mustList is what List finds, by index of the pod.
func mustList(t *testing.T, n node) []string {
	t.Helper()
	found, err := n.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ids := []string{}
	for _, f := range found {
		ids = append(ids, strings.TrimLeft(f.ContainerID, "0"))
	}
	return ids
}

// watch is a context whose requests are seen, before they are sent, by see.
func watch(ctx context.Context, see func(request string) error) context.Context {
	return rtnl.WithTrace(ctx, func(r rtnl.Request) error { return see(r.String()) })
}

func TestRemoveAllAtOnce(t *testing.T) {
	n := newNode(t)
	before := state(t, n.host)
	targets, _ := crowd(t, n, 5)
	stays, _ := newPod(t, 9, true, true)
	n.mustAttachOnly(t, stays)
	unknown := podnet.Target{ID: attachment.ID{ContainerID: "unknown", IfName: "eth0"}}
	elsewhere := targets[2]
	elsewhere.HostIfIndex = 1 // somebody else's; it is found by its name

	var dels []string
	ctx := watch(t.Context(), func(r string) error {
		if strings.HasPrefix(r, "link del") {
			dels = append(dels, r)
		}
		return nil
	})
	for i, err := range n.RemoveAll(ctx, targets[0], targets[1], unknown, elsewhere, targets[3], targets[4]) {
		if err != nil {
			t.Errorf("target %d: %v", i, err)
		}
	}
	if len(dels) != 1 || !strings.HasPrefix(dels[0], "link del group 0x7") {
		t.Errorf("sent %q, want one removal of a group", dels)
	}
	if got := mustList(t, n); !cmp.Equal(got, []string{"9"}) {
		t.Errorf("pods %v are left", got)
	}
	if err := n.Remove(t.Context(), stays.ID, 0); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(before, state(t, n.host)); diff != "" {
		t.Errorf("on the host (-before +after):\n%s", diff)
	}
}

// A foreign link that is in the group when the group is chosen isn't removed.
func TestRemoveAllSparesForeignLinks(t *testing.T) {
	n := newNode(t)
	targets, _ := crowd(t, n, 3)
	ctx := watch(t.Context(), func(r string) error {
		if group, ok := strings.CutPrefix(r, "link show group "); ok {
			n.host.IP(t, "link", "set", "uplink", "group", group)
		}
		return nil
	})
	for i, err := range n.RemoveAll(ctx, targets...) {
		if err != nil {
			t.Errorf("target %d: %v", i, err)
		}
	}
	n.host.IP(t, "link", "show", "uplink")
	if got := mustList(t, n); len(got) != 0 {
		t.Errorf("pods %v are left", got)
	}
}

func TestRemoveAllWithoutNamespaces(t *testing.T) {
	n := newNode(t)
	targets, spaces := crowd(t, n, 4)
	// Between the look at the links and their removal.
	var once sync.Once
	ctx := watch(t.Context(), func(r string) error {
		if strings.HasPrefix(r, "link set") {
			once.Do(func() {
				for _, ns := range spaces[:2] {
					ns.IP(t, "link", "del", "eth0")
				}
			})
		}
		return nil
	})
	for i, err := range n.RemoveAll(ctx, targets...) {
		if err != nil {
			t.Errorf("target %d: %v", i, err)
		}
	}
	if got := mustList(t, n); len(got) != 0 {
		t.Errorf("pods %v are left", got)
	}
	for i, err := range n.RemoveAll(t.Context(), targets...) {
		if err != nil {
			t.Errorf("target %d again: %v", i, err)
		}
	}
}

// A removal that ends at any of its requests is finished by the next one.
func TestRemoveAllKilledInTheMiddle(t *testing.T) {
	errKilled := errors.New("killed")
	for at := 0; ; at++ {
		n := newNode(t)
		targets, _ := crowd(t, n, 3)
		// One whose ADD was killed before it had an alias.
		n.host.IP(t, "link", "set", "dev", fmt.Sprint("if", targets[1].HostIfIndex), "alias", "")
		sent := 0
		ctx := watch(t.Context(), func(string) error {
			if sent++; sent > at {
				return errKilled
			}
			return nil
		})
		done := true
		for i, err := range n.RemoveAll(ctx, targets...) {
			if err != nil && !errors.Is(err, errKilled) {
				t.Errorf("killed at request %d: target %d: %v", at, i, err)
			}
			done = done && err == nil
		}
		for i, err := range n.RemoveAll(t.Context(), targets...) {
			if err != nil {
				t.Errorf("after a kill at request %d: target %d: %v", at, i, err)
			}
		}
		if out := n.host.IP(t, "-o", "link", "show", "type", "veth"); strings.Count(out, "\n")+1 != 2 { // the uplink
			t.Errorf("after a kill at request %d there is still\n%s", at, out)
		}
		if done {
			if at < 8 {
				t.Errorf("it took only %d requests", at)
			}
			return
		}
	}
}
