package egress

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	gosync "sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// A policy that was made before a pod was bound to its node is in force before the pod's first packet, whichever of the two was made
// first. Here nothing lies between the policy, the binding and ADD, where kubelet makes a sandbox. The pod sends from its first moment,
// which is when ADD has answered: nothing leaves but through the tunnel.
func testTogether(l *lab) {
	for i := range testkit.EgressForm.Times(6, 200) {
		l.Run(fmt.Sprintf("together-%d", i), func(t *testing.T) { l.together(t, fmt.Sprintf("together-%d", i), i%2 == 0) })
	}
	l.must(l.AwaitClean(l.Context(), within))
}

// together makes a policy and a pod of one name. The policy selects the pod by its label. A pod that is made first is bound after the policy
// was made; another one has its node from the beginning.
func (l *lab) together(t *testing.T, name string, policyFirst bool) {
	ctx := t.Context()
	selected := map[string]string{"app": name}
	policies := l.Coil.CoilV2().EgressPolicies(metav1.NamespaceDefault)
	makePolicy := func() {
		t.Helper()
		testkit.Must(policies.Create(ctx, &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.EgressPolicySpec{
			EgressUse: v2.EgressUse{Egress: &v2.EgressReference{Namespace: metav1.NamespaceDefault, Name: "gw"}},
			Pods:      &metav1.LabelSelector{MatchLabels: selected},
		}}, metav1.CreateOptions{}))(t)
		t.Cleanup(func() { testkit.Check(t, policies.Delete(context.WithoutCancel(ctx), name, metav1.DeleteOptions{})) })
	}
	if policyFirst {
		makePolicy()
	}
	s := testkit.Must(l.node.NewSandbox(ctx, rig.SandboxOptions{Name: name, Labels: selected, Unbound: !policyFirst}))(t)
	t.Cleanup(func() { testkit.Check(t, s.Close()) })
	ns := netnstest.Open(t, s.Path)
	n := &network{t: t, pod: ns, sniffer: sniff(t, ns)}
	if !policyFirst {
		makePolicy()
		testkit.Check(t, s.Bind(ctx))
	}
	testkit.Must(s.Add(ctx))(t)
	end := sendAlways(t, ns)
	_, h := handleOf(t, ns)
	n.eth0 = testkit.Must(h.IndexByName("eth0"))(t)
	tunnelled := 0
	testkit.Eventually(t, within, "packets go through the tunnel", func() error {
		for _, count := range n.closed("from the first moment") {
			tunnelled += count
		}
		if tunnelled < 10 {
			return fmt.Errorf("%d packets", tunnelled)
		}
		return nil
	})
	end()
	testkit.Check(t, s.Check(ctx), s.Del(ctx))
	n.closed("until the end")
}

// sendAlways sends to all servers until it is ended; what can't be sent isn't.
func sendAlways(t *testing.T, ns *netnstest.NS) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var all gosync.WaitGroup
	for _, server := range servers {
		network := map[bool]string{true: "udp4", false: "udp6"}[server.Is4()]
		conn := testkit.Must(ns.Lab().ListenPacket(ctx, network, ":0"))(t)
		all.Go(func() {
			defer conn.Close()
			pause := time.NewTicker(time.Millisecond)
			defer pause.Stop()
			for ctx.Err() == nil {
				_, _ = conn.WriteTo([]byte("x"), net.UDPAddrFromAddrPort(netip.AddrPortFrom(server, 9)))
				<-pause.C
			}
		})
	}
	end = gosync.OnceFunc(func() { cancel(); all.Wait() })
	t.Cleanup(end)
	return end
}
