package egress

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/client"
)

// many are names of Egresses, first, first+1, ...
func many(first, n int) string {
	var names []string
	for i := range n {
		names = append(names, fmt.Sprintf("e%05d", first+i))
	}
	return strings.Join(names, ",")
}

// However many Egresses an annotation names, there is one Event of each kind, the record is bounded, and
// what was closed stays closed.
func TestManyEgressesAreNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.egress("a", "10.96.0.1", "192.0.2.0/24")
		m := w.manager(false)
		w.clients(t, m, "p")
		defer running(t, m)()
		for edit := range 3 {
			w.change(m, func() { w.pod("p", many(edit*5000, 5000)) })
			w.after(t, time.Second, "many that don't exist", none)
			if n := len(w.records[sandboxOf("p").ID].Egresses); n > plan.MostEgresses+1 {
				t.Errorf("%d Egresses are recorded", n)
			}
		}
		w.change(m, func() { w.pod("p", strings.Repeat("x", 200000)+",a") })
		w.after(t, time.Second, "one that can't exist", "192.0.2.0/24 10.96.0.1")
		want := []string{}
		for edit := range 3 {
			want = append(want,
				"p: EgressTooMany: the annotations name more than 64 Egresses: only the first ones are used, by namespace and in the order of the annotation",
				fmt.Sprintf("p: EgressMissing: Egress net/e%05d doesn't exist; Egress net/e%05d doesn't exist; Egress net/e%05d doesn't exist; and 61 more", edit*5000, edit*5000+1, edit*5000+2))
		}
		// Told already, and told anew when others are missing.
		want = append(want[:2], want[3], want[5], "p: EgressMissing: Egress net/"+strings.Repeat("x", 60)+"... can't exist: that is no name of an object")
		if d := cmp.Diff(want, w.events); d != "" {
			t.Errorf("events (-want +got):\n%s", d)
		}
		if w.live > 3*mostAsked {
			t.Errorf("%d requests of a running pod beside the caches", w.live)
		}
		w.pod("new", many(0, 5000))
		before := w.live
		if err := w.add(t, m, "new"); err == nil || !strings.Contains(err.Error(), "more than 64 Egresses") {
			t.Errorf("ADD: %v", err)
		}
		if n := w.live - before; n > 2*mostAsked { // kubelet tries again and again
			t.Errorf("%d requests of one ADD", n)
		}
	})
}

// An Egress of a running pod that gets more destinations than a pod may have is closed; a new pod isn't added.
func TestManyDestinations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		names := []string{"a"}
		w.egress("a", "10.96.0.1", "192.0.2.0/24")
		for i := range client.MostDestinations / 256 {
			name := fmt.Sprint("b", i)
			names = append(names, name)
			w.egress(name, "10.96.0.2")
		}
		m := w.manager(false)
		w.clients(t, m, "p")
		defer running(t, m)()
		w.change(m, func() { w.pod("p", strings.Join(names, ",")) })
		w.after(t, time.Second, "few destinations", "192.0.2.0/24 10.96.0.1")
		last := names[len(names)-1]
		w.change(m, func() {
			for i, name := range names[1:] {
				var all []string
				for j := range 256 {
					all = append(all, fmt.Sprintf("203.0.%d.%d/32", i, j))
				}
				w.egress(name, "10.96.0.2", all...)
			}
		})
		time.Sleep(time.Second)
		synctest.Wait()
		if has, want := w.has("p"), fmt.Sprintf("203.0.%d.0/24 nowhere", len(names)-2); !strings.HasSuffix(has, want) {
			t.Errorf("p has %s, want %s in the end", has, want)
		}
		want := "p: EgressTooMany: the Egresses have more than 2048 different destinations, or 1024 addresses of routers, together: unreachable are destinations of net/" + last + "; name fewer Egresses, or some with fewer destinations"
		if len(w.events) != 1 || w.events[0] != want {
			t.Errorf("events %q, want %q", w.events, want)
		}
		w.pod("new", strings.Join(names, ","))
		if err := w.add(t, m, "new"); err == nil || !strings.Contains(err.Error(), "more than 2048 different destinations") {
			t.Errorf("ADD: %v", err)
		}
	})
}

func TestFew(t *testing.T) {
	long := strings.Repeat("x", 600)
	for _, c := range []struct {
		all  []string
		want string
	}{
		{[]string{"a"}, "a"},
		{[]string{"a", "b", "c"}, "a, b, c"},
		{[]string{"a", "b", "c", "d", "e"}, "a, b, c, and 2 more"},
		{[]string{long, long}, (long + ", " + long)[:mostSaid]},
	} {
		if got := few(c.all, ", "); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

// A pod of the node's network has no ADD; its annotation has no effect, of which it is told once.
func TestHostNetworkIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.egress("a", "10.96.0.1", "192.0.2.0/24")
		for pod, annotation := range map[string]string{"host": "a, b", "plainhost": "", "slow": "a", "client": "a"} {
			w.pod(pod, annotation)
		}
		w.host = map[string]bool{"ns/host": true, "ns/plainhost": true}
		m := w.manager(false)
		if err := m.Restore(t.Context(), []node.Sandbox{sandboxOf("client")}); err != nil {
			t.Fatal(err)
		}
		defer running(t, m)()
		told := func(what string, live int, want ...string) {
			t.Helper()
			for pod := range w.pods {
				name := types.NamespacedName{Namespace: "ns", Name: strings.TrimPrefix(pod, "ns/")}
				m.PodChanged(name)
			}
			time.Sleep(2 * unattended)
			synctest.Wait()
			if d := cmp.Diff(want, w.events); d != "" || w.live != live {
				t.Errorf("%s: %d requests beside the caches, want %d; events (-want +got):\n%s", what, w.live, live, d)
			}
		}
		const event = "host: EgressIgnored: the pod has the network of its node (hostNetwork), whose packets take no Egress: to name net/a, net/b has no effect"
		told("at first", 2, event) // of each that has no ADD and an annotation
		told("again", 2, event)
		w.pods["ns/host"].UID = "another"
		told("made again", 3, event, event)
		w.pod("plainhost", "b")
		told("an annotation comes", 4, event, event, "plainhost: EgressIgnored: the pod has the network of its node (hostNetwork), whose packets take no Egress: to name net/b has no effect")
		delete(w.pods, "ns/host")
		m.PodChanged(types.NamespacedName{Namespace: "ns", Name: "host"})
		time.Sleep(2 * unattended)
		synctest.Wait()
		if len(m.strangers) != 2 {
			t.Errorf("known are %v", m.strangers)
		}
	})
}
