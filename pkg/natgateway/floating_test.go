package natgateway

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// The router follows which addresses are its own, and makes no tunnel anew for that. All of its connections count for the limit of a client.
func TestAddressesOfTheRouter(t *testing.T) {
	run(t, func(f *fixture) {
		client := netip.MustParseAddr("10.1.0.1")
		state := func(routers ...string) *v2.Egress {
			e := &v2.Egress{
				ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat", Generation: 1},
				Spec: v2.EgressSpec{
					Destinations: []string{"0.0.0.0/0"}, MaxConnectionsPerClient: new(int32(10)),
					Addresses: &v2.EgressAddresses{Use: v2.EgressAddressOfRouter, Pool: "partners"},
				},
			}
			for i, r := range routers {
				addr := netip.AddrFrom4([4]byte{203, 0, 113, byte(i)})
				e.Status.Addresses = append(e.Status.Addresses, v2.EgressAddressStatus{Block: addr.String(), Router: r, EgressAddress: v2.EgressAddress{IPv4: addr.String()}})
			}
			return e
		}
		leaves := func(when string, want ...ruleset.GatewaySource) {
			t.Helper()
			f.kernel.mu.Lock()
			defer f.kernel.mu.Unlock()
			if f.filter.Floating == nil || !slices.Equal(f.filter.Floating.Sources, want) {
				t.Errorf("%s: clients leave by %+v, want %+v", when, f.filter.Floating, want)
			}
		}
		by := func(n byte) ruleset.GatewaySource {
			return ruleset.GatewaySource{Client: client, Address: netip.AddrFrom4([4]byte{203, 0, 113, n})}
		}
		f.check(f.egresses.Update(state("", "nat-1")))
		f.list(map[string]string{"a": client.String()})
		f.start()
		f.did(moment)
		leaves("it has none")
		for _, c := range []struct {
			when    string
			routers []string
			want    []ruleset.GatewaySource
		}{
			{"it gets one", []string{"nat-0", "nat-1"}, []ruleset.GatewaySource{by(0)}},
			{"another one", []string{"nat-1", "nat-0"}, []ruleset.GatewaySource{by(1)}},
			{"it has lost it", []string{"nat-1", ""}, nil},
		} {
			f.did(0)
			f.check(f.egresses.Update(state(c.routers...)))
			f.changed()
			if calls := f.did(moment); strings.Contains(calls, "tunnels") {
				t.Errorf("%s: everything is compared with the kernel: %s", c.when, calls)
			}
			leaves(c.when, c.want...)
		}
		f.kernel.mu.Lock()
		f.flows = map[netip.Addr]int{client: 11}
		f.kernel.mu.Unlock()
		time.Sleep(countEvery + 2*settle)
		synctest.Wait()
		f.kernel.mu.Lock()
		defer f.kernel.mu.Unlock()
		if want := []netip.Addr{netip.MustParseAddr("10.0.0.1"), by(0).Address, by(1).Address}; !slices.Equal(f.by, want) {
			t.Errorf("connections by %v are counted, want %v", f.by, want)
		}
	})
}
