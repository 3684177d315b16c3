package lbgateway

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
)

func poolOf(name string, routerID, instances int32) *v2.AddressPool {
	p := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.AddressPoolSpec{Announce: v2.AnnounceGateway}}
	if routerID > 0 {
		p.Spec.VRRP = &v2.PoolVRRP{RouterID: routerID, Instances: instances}
	}
	return p
}

func gatewayOf(name string, sources []string, pools ...string) *v2.LoadBalancerGateway {
	g := &v2.LoadBalancerGateway{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.LoadBalancerGatewaySpec{Pools: pools}}
	if len(sources) > 0 {
		g.Spec.VRRP = &v2.GatewayVRRP{Interface: "eth0", AddressInterface: "eth1", Sources: sources}
	}
	return g
}

// Scenario 30: gateways agree: for each instance one of them has the highest priority, which differs between instances; each address is in one instance, the same one at all
// gateways; and gateways know each other.
func TestScenario30Elections(t *testing.T) {
	pools := []*v2.AddressPool{poolOf("dmz", 10, 3), poolOf("lan", 0, 0), poolOf("other", 40, 1)}
	gateways := []*v2.LoadBalancerGateway{
		gatewayOf("gw2", []string{"192.0.2.2", "2001:db8::2"}, "dmz", "lan"), gatewayOf("gw1", []string{"192.0.2.1", "2001:db8::1"}, "dmz"),
		gatewayOf("gw3", []string{"192.0.2.3"}, "dmz"), gatewayOf("gw4", []string{"192.0.2.4"}, "other"), gatewayOf("gw5", nil, "lan"),
	}
	var addresses []at
	for i := range int32(7) {
		addresses = append(addresses, at{netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), "dmz", i}, at{netip.MustParseAddr(fmt.Sprintf("2001:db8:100::%d", i)), "dmz", i},
			at{netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}), "lan", i})
	}
	masters, owners := map[string]string{}, map[netip.Addr]string{}
	best := map[string]int{}
	for _, g := range gateways[:3] {
		c, err := elections(g, gateways, pools, addresses)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, i := range c.Instances {
			names = append(names, i.Name)
			if i.Priority > best[i.Name] {
				best[i.Name], masters[i.Name] = i.Priority, g.Name
			}
			if i.Interface != "eth0" || i.AddressInterface != "eth1" || i.Source != sourceOf(g, dataplane.FamilyOf(i.Source)) || !strings.HasPrefix(i.Name, fmt.Sprintf("coil_%d_", i.RouterID)) {
				t.Errorf("%s: %+v", g.Name, i)
			}
			wantPeers := 2
			if !i.Source.Is4() {
				wantPeers = 1
			}
			if len(i.Peers) != wantPeers || slices.Contains(i.Peers, i.Source) {
				t.Errorf("%s: instance %s has the peers %v", g.Name, i.Name, i.Peers)
			}
			for _, a := range i.Addresses {
				if was := owners[a]; was != "" && was != i.Name {
					t.Errorf("%s is in %s and %s", a, was, i.Name)
				}
				owners[a] = i.Name
			}
		}
		want := []string{"coil_10_ipv4", "coil_10_ipv6", "coil_11_ipv4", "coil_11_ipv6", "coil_12_ipv4", "coil_12_ipv6"}
		if g.Name == "gw3" {
			want = []string{"coil_10_ipv4", "coil_11_ipv4", "coil_12_ipv4"}
		}
		if !slices.Equal(names, want) {
			t.Errorf("%s: instances %v, want %v", g.Name, names, want)
		}
	}
	for name, want := range map[string]string{"coil_10_ipv4": "gw1", "coil_11_ipv4": "gw2", "coil_12_ipv4": "gw3", "coil_10_ipv6": "gw1", "coil_11_ipv6": "gw2", "coil_12_ipv6": "gw1"} {
		if masters[name] != want {
			t.Errorf("%s is to be at %s, want %s", name, masters[name], want)
		}
	}
	if len(owners) != 14 {
		t.Errorf("%d addresses are in an instance, want 14", len(owners))
	}
	// One that takes no part is told so, and serves the pool all the same.
	if c, err := elections(gatewayOf("gw6", nil, "dmz"), gateways, pools, addresses); err == nil || len(c.Instances) > 0 || !strings.Contains(err.Error(), "set spec.vrrp of LoadBalancerGateway gw6") {
		t.Errorf("%+v, %v", c, err)
	}
	// Two pools with the same virtual router IDs.
	if _, err := elections(gatewayOf("gw1", []string{"192.0.2.1"}, "dmz", "same"), gateways, append(pools, poolOf("same", 12, 1)), addresses); err == nil || !strings.Contains(err.Error(), "12") {
		t.Errorf("two pools with one virtual router ID: %v", err)
	}
}
