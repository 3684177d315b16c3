package repair

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
)

// sweep deletes what a program that knows nothing of Coil takes for leftovers, as felix and
// systemd-networkd do: rules and routes of a protocol that isn't its own.
const sweep = `
	for family in -4 -6; do
		for table in 116 119 120; do ip $family route flush table $table proto 30; done
		for priority in 2000 2001; do
			ip $family rule del priority $priority protocol 30 2>/dev/null || true
		done
	done`

// A neighbour that deletes everything every second gets everything back each time, and
// no more often; the admin is told once what happens and what to do.
func TestNeighbourThatDeletesEverySecond(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 2, rig.NodeOptions{})
	f.sh(foreign)
	want := f.kernel()
	var slowest time.Duration
	const rounds = 12
	for range rounds {
		next := time.Now().Add(time.Second)
		f.sh(sweep)
		slowest = max(slowest, f.awaitKernel(want, within))
		f.pause(time.Until(next))
	}
	t.Logf("everything was back after %s at most", slowest.Round(time.Millisecond))
	if slowest > testkit.Limit(within) {
		t.Errorf("everything was back only after %s", slowest)
	}
	// Of each kind, how many objects one sweep deletes.
	perSweep := map[string]float64{"rule": 4, "pod_route": 4, "block_route": 2, "unreachable_route": 2}
	losses := map[string]float64{}
	for kind, n := range perSweep {
		losses[kind] = rounds * n
	}
	f.awaitCounted(losses)
	repairs := f.repairs()
	for kind, n := range losses {
		if repairs[kind] > n*1.5 {
			t.Errorf("%s: %v repairs for %v losses", kind, repairs[kind], n)
		}
	}
	for kind, n := range repairs {
		if n != 0 && perSweep[kind] == 0 {
			t.Errorf("%s: %v repairs though nobody touched one", kind, n)
		}
	}
	f.eventsSay(map[string][]string{
		"rule":        {"by netlink port", "ManageForeignRoutingPolicyRules=no"},
		"pod_route":   {"table 116", "ManageForeignRoutes=no", "FELIX_REMOVEEXTERNALROUTES"},
		"block_route": {"table 119", "ManageForeignRoutes=no"},
	})
	for _, p := range f.pods {
		f.check(p.Check(t.Context()))
	}
}

// eventsSay waits for an Event of the Node about each kind that has all texts.
func (f *fixture) eventsSay(want map[string][]string) {
	f.t.Helper()
	testkit.Eventually(f.t, 10*time.Second, "Events of the Node", func() error {
		events, err := f.Core.CoreV1().Events(metav1.NamespaceDefault).List(f.t.Context(), metav1.ListOptions{
			FieldSelector: "involvedObject.kind=Node,involvedObject.name=" + f.Name,
		})
		if err != nil {
			return err
		}
		for kind, texts := range want {
			var of []corev1.Event
			for _, e := range events.Items {
				if e.Reason == "RepeatedlyDestroyed" && e.Type == corev1.EventTypeWarning && strings.Contains(e.Message, "("+kind+")") {
					of = append(of, e)
				}
			}
			if len(of) != 1 {
				return fmt.Errorf("%d Events about %s", len(of), kind)
			}
			for _, text := range texts {
				if !strings.Contains(of[0].Message, text) {
					return fmt.Errorf("%s: %q is missing: %s", kind, text, of[0].Message)
				}
			}
		}
		return nil
	})
}

// A neighbour that deletes a rule the moment it appears gets it back once in a second and
// not more often, and coild serves pods meanwhile.
func TestNeighbourThatDeletesAtOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1, rig.NodeOptions{})
	want := f.kernel()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := f.Run(ctx, "sh", "-c", `while true; do ip rule del priority 2000 2>/dev/null || true; done`)
		done <- err
	}()
	const watched = 10 * time.Second
	f.pause(watched)
	n := f.repairs()["rule"]
	if limit := watched.Seconds()*1.2 + 5; n < watched.Seconds()/2 || n > limit {
		t.Errorf("%v repairs within %s; at most %v are wanted", n, watched, limit)
	}
	s, err := f.NewSandbox(t.Context(), rig.SandboxOptions{Namespace: f.pool})
	f.check(err)
	_, err = s.Add(t.Context())
	f.check(err)
	f.check(s.Del(t.Context()), s.Close())
	cancel()
	<-done
	f.awaitKernel(want, within)
	f.eventsSay(map[string][]string{"rule": {"rule lost: 2000: from all lookup 116 proto 30 (IPv4)"}})
}

// A route of another program in the place of a pod's is never removed: coild says which.
func TestForeignRouteInThePlaceOfAPods(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 2, rig.NodeOptions{})
	want := f.kernel()
	addr := f.Ledger.Live()[f.pods[0]][0]
	if !addr.Is4() {
		addr = f.Ledger.Live()[f.pods[0]][1]
	}
	f.sh(fmt.Sprintf("ip route replace %s dev lo table 116 proto 99", addr))
	testkit.Eventually(t, 5*time.Second, "coild says who is in the way", func() error {
		if f.Coild.CountLogs("its place is taken by "+addr.String()) == 0 {
			return fmt.Errorf("nothing in the log")
		}
		return nil
	})
	if out := f.sh("ip -N route show table 116 proto 99"); !strings.Contains(out, addr.String()) {
		t.Errorf("the other's route is gone: %s", out)
	}
	// Objects that it has nothing to do with are repaired all the same.
	f.sh("ip -6 route flush table 116 proto 30; ip rule del priority 2000")
	f.sh(fmt.Sprintf("sleep 1; ip route del %s table 116 proto 99", addr))
	f.awaitKernel(want, 30*time.Second)
}
