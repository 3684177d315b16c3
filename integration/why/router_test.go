package why

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/testkit"
)

// A router says of its client what there is, and by which address its packets leave; coilctl follows these from the pod to the router.
func TestRouter(t *testing.T) {
	t.Parallel()
	f, ctx := newFixture(t), t.Context()
	f.showCoild(corev1.ConditionTrue)
	controller := testkit.Must(f.NewEgressController(ctx))(t)
	testkit.Check(t, controller.Start())
	t.Cleanup(func() {
		controller.Kill()
		testkit.Check(t, f.TakeLease(context.WithoutCancel(ctx), rig.EgressLease))
	})
	egresses := f.pool + "-out"
	testkit.Check(t, f.AddNamespace(ctx, egresses, f.pool))
	egress := testkit.Must(f.NewEgress(ctx, egresses, "nat", v2.EgressSpec{Replicas: 1, Destinations: []string{"203.0.113.0/24"}, Peering: v2.EgressPeeringDirect}))(t)
	t.Cleanup(func() { testkit.Check(t, egress.Close()) })
	router := testkit.Must(egress.AddRouter(ctx, f.Node))(t)
	client := testkit.Must(f.NewSandbox(ctx, rig.SandboxOptions{Namespace: f.pool, Annotations: map[string]string{v2.AnnotationEgressPrefix + egresses: "nat"}}))(t)
	testkit.Eventually(t, 30*time.Second, "the client is added", func() error { _, err := client.Add(ctx); return err })
	f.report(client)
	addrs := f.Ledger.Live()[client]

	if fi, err := os.Stat(router.DebugSocket()); err != nil || fi.Mode() != os.ModeSocket|0o600 {
		t.Errorf("%v, %v; want a socket of mode 0600", fi, err)
	}
	testkit.Eventually(t, 30*time.Second, "the router has the client", func() error {
		a, err := router.Debug(ctx, "pod", f.pool+"/"+client.Name)
		if err != nil {
			return err
		}
		if len(a.Clients) == 0 || len(inspection.Wrong(slices.Concat(a.Clients[0].Objects, a.Shared))) > 0 || len(a.Problems) > 0 || a.Router.NotReady != "" {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	way := testkit.Must(router.Debug(ctx, "way", addrs[0].String(), "203.0.113.5"))(t).Way
	if way == nil || !way.Allowed || way.Source != router.Addrs[0].String() {
		t.Errorf("the router's way: %+v", way)
	}

	e := f.examiner(0)
	e.AskRouter = func(ctx context.Context, pod *corev1.Pod, words ...string) (*inspection.RouterAnswer, error) {
		if pod.Name != router.Name {
			return nil, fmt.Errorf("router %s was asked", pod.Name)
		}
		return router.Debug(ctx, words...)
	}
	f.available(egress, egresses, true)
	healthy(t, testkit.Must(e.Pod(ctx, f.pool, client.Name))(t))
	p := testkit.Must(e.Trace(ctx, f.pool, client.Name, netip.MustParseAddrPort("203.0.113.5:443")))(t)
	if !slices.Equal(p.Sources, []string{router.Addrs[0].String()}) || p.Lost != "" || len(p.Hops) != 4 || len(p.Unknown) > 0 || p.Hops[0].Table != 118 || p.Hops[2].Table != 116 {
		t.Errorf("by the router: %+v", p)
	}
	p = testkit.Must(e.Trace(ctx, f.pool, f.pod.Name, netip.MustParseAddrPort("192.0.2.1:80")))(t)
	if len(p.Hops) == 0 || p.Hops[0].Where != "pod "+f.pool+"/"+f.pod.Name || len(p.Hops[0].Tunnels) > 0 {
		t.Errorf("without an Egress: %+v", p)
	}
	f.sends(t, e, client, router)
	testkit.Must(client.Run(ctx, "sh", "-ec", "ip route add unreachable 203.0.113.5 table 117 proto 30"))(t)
	if p = testkit.Must(e.Trace(ctx, f.pool, client.Name, netip.MustParseAddrPort("203.0.113.5:443")))(t); p.Lost == "" {
		t.Errorf("with an unreachable route: %+v", p)
	}
	f.stops(t, e, client)
}
