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
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// A router whose clients leave by the node's address isn't ready, and lets nobody open a connection, until the node is; and no longer when the node
// isn't any more. Another use needs nothing of the node.
func TestTheNodeIsReady(t *testing.T) {
	run(t, func(f *fixture) {
		client, transit := netip.MustParseAddr("10.1.0.1"), dataplane.TransitAddr(dataplane.IPv4, 7)
		update := func(generation int64, a *v2.EgressAddresses) {
			f.check(f.egresses.Update(&v2.Egress{
				ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat", Generation: generation},
				Spec:       v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}, Addresses: a},
			}))
		}
		give := func(addrs ...netip.Addr) {
			f.kernel.mu.Lock()
			f.kernel.transits = addrs
			f.kernel.mu.Unlock()
			time.Sleep(lookEvery + 2*settle)
			synctest.Wait()
		}
		is := func(when string, ready bool, want ...ruleset.GatewaySource) {
			t.Helper()
			if err := f.condition(Environment); (err == nil) != ready || err != nil && !strings.Contains(err.Error(), "IPv4") {
				t.Errorf("%s: the condition is %v, want ready %t", when, err, ready)
			}
			f.kernel.mu.Lock()
			defer f.kernel.mu.Unlock()
			if f.filter.Floating == nil || !slices.Equal(f.filter.Floating.Sources, want) {
				t.Errorf("%s: clients leave by %+v, want %+v", when, f.filter.Floating, want)
			}
		}
		by := ruleset.GatewaySource{Client: client, Address: transit}
		update(1, &v2.EgressAddresses{Use: v2.EgressAddressOfNode})
		f.list(map[string]string{"a": client.String()})
		f.start()
		give()
		is("before the node is ready", false)
		give(dataplane.TransitAddr(dataplane.IPv6, 7))
		is("with an address of the other family", false)
		give(transit, dataplane.TransitAddr(dataplane.IPv6, 7))
		is("when the node is ready", true, by)
		if got, want := f.Addresses(), []netip.Addr{netip.MustParseAddr("10.0.0.1"), transit}; !slices.Equal(got, want) {
			t.Errorf("connections by %v are counted, want %v", got, want)
		}
		f.did(0)
		time.Sleep(10 * lookEvery)
		synctest.Wait()
		if calls := f.did(moment); strings.Contains(calls, "filter") {
			t.Errorf("without a change it did %s", calls)
		}
		give()
		is("when it isn't any more", false)
		give(transit)
		is("when it is again", true, by)
		f.check(f.egresses.Update(&v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat", Generation: 2}, Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}}}))
		f.changed()
		give(transit)
		f.kernel.mu.Lock()
		defer f.kernel.mu.Unlock()
		if f.filter.Floating != nil {
			t.Errorf("without addresses clients leave by %+v", *f.filter.Floating)
		}
		if want := []netip.Addr{transit}; !slices.Equal(f.filter.Transits, want) {
			t.Errorf("open connections have %v for the filter, want %v", f.filter.Transits, want)
		}
	})
}
