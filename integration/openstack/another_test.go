package openstack

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/openstack"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
)

// TestServicePairTaken has somebody use one address of each pair but one of those that Neutron gives out: a Service gets this one, and the next one says why it has none, until one is free.
func TestServicePairTaken(t *testing.T) {
	s := newServed(t, ranges("10.1.0.0/24", "fd00:1::/120"))
	// The ports of gateways have addresses of both families already.
	used := map[string]bool{}
	for _, p := range s.raw("ports", "network_id="+s.NetworkID) {
		for _, f := range p.FixedIPs {
			used[f.IP] = true
		}
	}
	pair := func(i int) (string, string) { return fmt.Sprintf("10.1.0.%d", i), fmt.Sprintf("fd00:1::%x", i) }
	first, free := 100, 107
	for i := first; i < first+10; i++ { // the pair that stays free has to be so
		if ipv4, ipv6 := pair(i); !used[ipv4] && !used[ipv6] {
			free = i
		}
	}
	s.update("subnets/"+s.Subnet4, "subnet", map[string]any{"allocation_pools": []map[string]any{{"start": "10.1.0.100", "end": "10.1.0.109"}}})
	var theirs []map[string]any
	for i := first; i < first+10; i++ {
		if _, ipv6 := pair(i); i != free && !used[ipv6] {
			theirs = append(theirs, map[string]any{"subnet_id": s.Subnet6, "ip_address": ipv6})
		}
	}
	port := testkit.Must(s.Create(t.Context(), "port", map[string]any{"network_id": s.NetworkID, "device_owner": "compute:nova", "fixed_ips": theirs}))(t)
	s.make("one", 80)
	s.tells("one", "AddressAssigned", isFloating)
	one := s.claim("one")
	if ipv4, ipv6 := pair(free); one.Status.Provided.IPv4 != ipv4 || one.Status.Provided.IPv6 != ipv6 {
		t.Errorf("the Service has %+v, want %s and %s", one.Status.Provided, ipv4, ipv6)
	}
	s.has("of one Service", one)

	s.make("two", 80)
	s.tells("two", string(openstack.AddressesExhausted), none)
	o := testkit.Must(s.services().Get(t.Context(), "two", metav1.GetOptions{}))(t)
	is := meta.FindStatusCondition(o.Status.Conditions, loadbalancer.ConditionAssigned)
	for _, words := range []string{"AddressPool " + s.pool, "(409 IpAddressAlreadyAllocated)"} {
		if !strings.Contains(is.Message, words) {
			t.Errorf("the Service says %q, want %q in it", is.Message, words)
		}
	}
	t.Logf("the second Service says: %s", is.Message)
	testkit.Check(t, s.Network(t.Context(), http.MethodPut, "ports/"+port, map[string]any{"port": map[string]any{"fixed_ips": theirs[:1]}}, nil))
	s.tells("two", "AddressAssigned", isFloating)
	s.has("of two Services", one, s.claim("two"))
	testkit.Check(t, s.services().Delete(t.Context(), "two", metav1.DeleteOptions{}), s.services().Delete(t.Context(), "one", metav1.DeleteOptions{}))
	s.has("in the end")
}
