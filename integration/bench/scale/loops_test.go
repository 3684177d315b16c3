package main

import (
	"context"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/testkit"
)

// The loops of many nodes each see their own part of one watch: each asks an exhausted pool once, and
// not again in an hour.
func TestLoopsOfNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const nodes = 20
		client := fake.NewSimpleClientset(&v2.AddressPool{
			ObjectMeta: metav1.ObjectMeta{Name: fullPool},
			Status:     v2.AddressPoolStatus{Conditions: []metav1.Condition{{Type: v2.PoolExhausted, Status: metav1.ConditionTrue}}},
		})
		var asked, looked atomic.Int64
		client.PrependReactor("create", "blockrequests", func(a clienttesting.Action) (bool, runtime.Object, error) {
			r := a.(clienttesting.CreateAction).GetObject().(*v2.BlockRequest)
			r.UID = types.UID(fmt.Sprint("request-", asked.Add(1)))
			r.Status.Conditions = []v2.BlockRequestCondition{{Type: v2.BlockRequestFailed, Status: corev1.ConditionTrue, Reason: v2.ReasonPoolExhausted}}
			return false, nil, nil
		})
		client.PrependReactor("get", "addresspools", func(clienttesting.Action) (bool, runtime.Object, error) {
			looked.Add(1)
			return false, nil, nil
		})
		f := &fleet{rig: &rig.Rig{Coil: client}}
		for i := range nodes {
			n := holder{fmt.Sprint("node-", i), types.UID(fmt.Sprint("uid-", i))}
			f.nodes = append(f.nodes, n)
			cidr := fmt.Sprintf("10.0.%d.0/27", i)
			testkit.Check(t, client.Tracker().Add(&v2.AddressBlock{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", fullPool, i), Labels: map[string]string{v2.LabelNode: n.name, v2.LabelPool: fullPool}},
				Index:      int32(i), IPv4: &cidr,
			}))
		}
		ctx, cancel := context.WithCancel(t.Context())
		refused, done, err := f.askAll(ctx)
		testkit.Check(t, err)
		<-refused
		time.Sleep(time.Hour)
		cancel()
		testkit.Check(t, done())
		if n := asked.Load(); n != nodes {
			t.Errorf("%d nodes asked %d times", nodes, n)
		}
		if n := looked.Load(); n < 5*nodes || n > 8*nodes {
			t.Errorf("%d nodes looked %d times in an hour", nodes, n)
		}
	})
}

// told counts Events.
type told struct{ atomic.Int64 }

func (e *told) Eventf(_, _ runtime.Object, _, _, _, _ string, _ ...any) { e.Add(1) }

// The loops of many nodes each notice that a router dies, and that it lives again.
func TestLoopsNoticeADeath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const nodes = 20
		router := netip.MustParseAddr("192.0.2.1")
		w := &routersWorld{
			egress: &v2.Egress{
				ObjectMeta: metav1.ObjectMeta{Namespace: gateways, Name: direct},
				Spec:       v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}, Peering: v2.EgressPeeringDirect}, Status: v2.EgressStatus{Clients: nodes},
			},
			routers: []client.Router{{Addr: router, State: client.RouterLive}, {Addr: router.Next(), State: client.RouterLive}},
			dead:    map[netip.Addr]bool{}, seen: map[string]int{},
		}
		var events told
		ctx, cancel := context.WithCancel(t.Context())
		done, err := w.run(ctx, nodes, func(context.Context, int) (kube.Recorder, func(), error) { return &events, func() {}, nil })
		testkit.Check(t, err)
		testkit.Check(t, w.await(ctx, nodes, 0))
		time.Sleep(5 * time.Second) // each router was asked then
		if n := events.Load(); n != 0 {
			t.Errorf("%d Events before anything happened", n)
		}
		for _, dead := range []int{1, 0} {
			before := events.Load()
			w.set(router, dead > 0)
			testkit.Check(t, w.await(ctx, nodes, dead))
			time.Sleep(time.Second)
			if events.Load() == before {
				t.Errorf("no Event that %d routers are dead", dead)
			}
		}
		cancel()
		testkit.Check(t, done())
	})
}
