package nft_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/gateway"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
)

// ofRouters is how the clients of the lab leave through router r when each of some routers has the next address.
func (l *lab) ofRouters(routers ...string) *ruleset.GatewayFloating {
	l.t.Helper()
	e := &v2.Egress{Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0", "::/0"}, Addresses: &v2.EgressAddresses{Use: v2.EgressAddressOfRouter}}}
	for i, r := range routers {
		e.Status.Addresses = append(e.Status.Addresses, v2.EgressAddressStatus{Router: r, EgressAddress: v2.EgressAddress{
			IPv4: floating(dataplane.IPv4, i).String(), IPv6: floating(dataplane.IPv6, i).String(),
		}})
	}
	var list discoveryv1.EndpointSlice
	for i := range l.clients {
		ep := discoveryv1.Endpoint{TargetRef: &corev1.ObjectReference{Namespace: "ns", Name: fmt.Sprint("client-", i)}}
		for _, f := range families {
			ep.Addresses = append(ep.Addresses, addr(f, 1, i+1).String())
		}
		list.Endpoints = append(list.Endpoints, ep)
	}
	state, skipped := gateway.StateOf(gateway.Config{Pod: "r", Addresses: l.rules.Addresses, MTU: 1500}, e, []*discoveryv1.EndpointSlice{&list})
	if len(skipped) > 0 {
		l.t.Fatalf("skipped %q", skipped)
	}
	return state.Floating
}

// Clients leave by the addresses of the router that they take: by one while it has that alone, by the other one afterwards, but for
// connections that live, and by none when the router has none, not even by its own.
func TestClientsLeaveByAddressesOfTheirRouter(t *testing.T) {
	l := newLab(t)
	l.withFloating()
	l.rules.Floating = l.ofRouters("r", "another")
	l.sync(dataplane.Result{Added: 1})
	sees := func(when string, n int) {
		t.Helper()
		for _, f := range families {
			for i, c := range l.clients {
				if got := testkit.Must(c.SourceOf(l.server, addr(f, 9, 2), timeout))(t); got != floating(f, n) {
					t.Errorf("%s: %s: the server sees client %d as %s, want %s", when, f, i, got, floating(f, n))
				}
			}
		}
	}
	sees("the router has one", 0)
	asks := map[dataplane.Family]func() error{}
	for _, f := range families {
		to := l.receiver(addr(f, 9, 2))
		conn := l.dial(l.clients[0], to)
		asks[f] = func() error {
			testkit.Must(conn.Write([]byte("question")))(t)
			if got := receive(t, to).Addr(); got != floating(f, 0) {
				return fmt.Errorf("%s: a connection that was opened as %s is seen as %s", f, floating(f, 0), got)
			}
			return nil
		}
		testkit.Check(t, asks[f]())
	}
	l.rules.Floating = l.ofRouters("another", "r")
	testkit.Must(l.Sync(t.Context(), l.rules))(t)
	sees("the router has the other one", 1)
	for _, f := range families {
		testkit.Check(t, asks[f]())
	}
	l.rules.Floating = l.ofRouters("another", "")
	testkit.Must(l.Sync(t.Context(), l.rules))(t)
	for _, f := range families {
		before := l.count(ruleset.ForeignSource, f)
		if err := l.clients[0].Ping(addr(f, 9, 2), silence); err == nil {
			t.Errorf("%s: a client opens a connection through a router without an address", f)
		}
		if l.count(ruleset.ForeignSource, f) == before {
			t.Errorf("%s: %s wasn't counted", f, ruleset.ForeignSource)
		}
	}
}
