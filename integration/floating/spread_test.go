package floating

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
)

// block returns the AddressBlock of the Service in a pool.
func (s *served) block(pool string) v2.AddressBlock {
	s.t.Helper()
	all := testkit.Must(s.Coil.CoilV2().AddressBlocks().List(s.t.Context(), metav1.ListOptions{LabelSelector: v2.LabelPool + "=" + pool}))(s.t).Items
	if len(all) != 1 {
		s.t.Fatalf("pool %s has %d AddressBlocks", pool, len(all))
	}
	return all[0]
}

// events returns an error unless there is a Warning of a reason about an object, which names a node.
func (s *served) events(reason, kind, name string, n *rig.Node) error {
	events, err := s.Core.CoreV1().Events("").List(s.t.Context(), metav1.ListOptions{
		FieldSelector: "type=Warning,reason=" + reason + ",involvedObject.kind=" + kind + ",involvedObject.name=" + name,
	})
	if err != nil {
		return err
	}
	for _, e := range events.Items {
		if strings.Contains(e.Message, n.Name) {
			return nil
		}
	}
	return fmt.Errorf("no Event about %s %s names %s: %+v", kind, name, n.Name, events.Items)
}

// One of several nodes that announce an address of a Service has no Service proxy, and isn't the holder: it drops the packets that routers send to it. The AddressBlock and
// the Service say so, and name it, until it has one. The address stays where it is, and is told to clients.
func TestBlockedBesideHolder(t *testing.T) {
	t.Parallel()
	const pool = "unproxied"
	s, ctx := newServed(t, pool, v2.AnnounceRoute), t.Context()
	s.ready()
	s.serve("web", s.ports[0])
	s.reached("nodes with endpoints answer", s.nodes...)
	holding := s.block(pool).Floating.Holding
	n := s.nodes[slices.IndexFunc(s.nodes, func(n *rig.Node) bool { return n.Name != holding.Holder })]
	rigtest.Sh(t, n, "nft delete table inet proxy")
	calling, end := context.WithCancel(ctx)
	done := make(chan struct{})
	t.Cleanup(func() { end(); <-done })
	o := testkit.Must(s.services().Get(ctx, "web", metav1.GetOptions{}))(t)
	for _, in := range o.Status.LoadBalancer.Ingress {
		a := netip.MustParseAddr(in.IP)
		testkit.Check(t, s.RouteOutside(ctx, netip.PrefixFrom(a, a.BitLen()).String(), n))
	}
	go func() {
		defer close(done)
		s.reaches(calling, "web", s.ports[0])
	}()
	says := func(when string, blocked bool) {
		t.Helper()
		testkit.Eventually(t, time.Minute, when, func() error {
			b := s.block(pool)
			c := meta.FindStatusCondition(b.Status.Conditions, v2.BlockForwardingBlocked)
			if is := c != nil && c.Status == metav1.ConditionTrue && strings.HasPrefix(c.Message, "node "+n.Name+": "); is != blocked {
				return fmt.Errorf("the block says %+v", b.Status.Conditions)
			}
			o := testkit.Must(s.services().Get(ctx, "web", metav1.GetOptions{}))(t)
			c = meta.FindStatusCondition(o.Status.Conditions, loadbalancer.ConditionServed)
			if is := c != nil && c.Status == metav1.ConditionFalse && c.Reason == v2.BlockForwardingBlocked && strings.Contains(c.Message, n.Name); is != blocked {
				return fmt.Errorf("the Service says %+v", c)
			}
			if len(o.Status.LoadBalancer.Ingress) != 2 {
				return fmt.Errorf("the Service's status has %+v", o.Status.LoadBalancer)
			}
			text, err := n.Get(ctx, "/metrics")
			if want := fmt.Sprintf("coil_floating_troubled_addresses{condition=%q} %d\n", v2.BlockForwardingBlocked, map[bool]int{true: 1}[blocked]); err == nil && !strings.Contains(text, want) {
				err = fmt.Errorf("%s has no metric %s", n.Name, want)
			}
			if !blocked || err != nil {
				return err
			}
			return errors.Join(s.events(v2.BlockForwardingBlocked, "AddressBlock", b.Name, n), s.events(v2.BlockForwardingBlocked, "Service", "web", n))
		})
	}
	says("a node without a Service proxy is told", true)
	s.proxy(n)
	says("it isn't any more when it has one", false)
	if now := s.block(pool).Floating.Holding; now.Epoch != holding.Epoch || now.Holder != holding.Holder {
		t.Errorf("the address has moved: %+v, then %+v", holding, now)
	}
	testkit.Check(t, s.services().Delete(ctx, "web", metav1.DeleteOptions{}))
}

// heals destroys, as other programs do, the kernel objects of the address at each node that announces it, at one of them while its coild is away. All objects come back.
func (s *served) heals() {
	s.t.Helper()
	const routes = "for table in 119 255; do ip -4 route flush table $table proto 32; ip -6 route flush table $table proto 32; done; "
	const tables = "nft delete table ip coil_floating; nft delete table ip6 coil_floating; nft delete table arp coil_floating"
	losses := []struct {
		script string
		kinds  []string // of coil_repairs_total
	}{
		{tables, []string{"floating_rules"}},
		{routes + "nft flush set ip coil_floating ports_ipv4; nft flush chain ip6 coil_floating input", []string{"floating_route", "floating_rules"}},
		{routes + tables, nil},
	}
	var want [][]string
	var counted []map[string]float64
	for i, l := range losses {
		n := s.nodes[i]
		want, counted = append(want, ofCoil(s.t, n)), append(counted, repairs(s.t, n))
		if l.kinds == nil {
			n.Coild.Kill()
		}
		rigtest.Sh(s.t, n, l.script)
	}
	for i, l := range losses {
		n := s.nodes[i]
		if l.kinds == nil {
			testkit.Check(s.t, n.Start(s.t.Context()))
		}
		testkit.Eventually(s.t, 2*healed, "what others have destroyed on "+n.Name+" is back", func() error {
			if now := ofCoil(s.t, n); !slices.Equal(now, want[i]) {
				return fmt.Errorf("there is\n%s\nwant\n%s", strings.Join(now, "\n"), strings.Join(want[i], "\n"))
			}
			for _, kind := range l.kinds {
				if now := repairs(s.t, n)[kind]; now <= counted[i][kind] {
					return fmt.Errorf("%v repairs of %s, as before", now, kind)
				}
			}
			return nil
		})
	}
	s.reached("all is back", s.nodes...)
}
