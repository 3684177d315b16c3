package egress_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/egress"
)

// The status names the policies that leave by an address, as many as fit, and counts all.
func TestPoliciesOfTheStatus(t *testing.T) {
	e := withAddresses()
	claim := egress.AddressClaim(e)
	policies := map[string][]string{"partners-0": {"shop/b", "shop/a"}, "of another": {"x/y"}}
	for i := range 100 {
		block := fmt.Sprint("partners-", i)
		claim.Status.Addresses = append(claim.Status.Addresses, v2.ClaimedAddress{Block: block, IPv4: fmt.Sprint("198.51.100.", i)})
		for n := range 20 {
			if i > 1 {
				policies[block] = append(policies[block], fmt.Sprintf("team-%d/policy-%02d", i, n))
			}
		}
	}
	all := egress.Status(egress.Facts{Egress: e, Claim: claim, Policies: policies}).Addresses
	if d := cmp.Diff(all[:2], []v2.EgressAddressStatus{
		{Block: "partners-0", EgressAddress: v2.EgressAddress{IPv4: "198.51.100.0"}, PolicyCount: 2, Policies: []string{"shop/a", "shop/b"}},
		{Block: "partners-1", EgressAddress: v2.EgressAddress{IPv4: "198.51.100.1"}},
	}); d != "" {
		t.Error(d)
	}
	if a := all[2]; a.PolicyCount != 20 || len(a.Policies) != 8 || a.Policies[7] != "team-2/policy-07" {
		t.Errorf("of 20 policies %+v", a)
	}
	named := 0
	for _, a := range all {
		named += len(a.Policies)
	}
	if last := all[99]; last.PolicyCount != 20 || len(last.Policies) != 0 || named != 256 {
		t.Errorf("%d policies are named, and the last address is %+v", named, last)
	}
}

func TestOnlyCounts(t *testing.T) {
	base := v2.EgressStatus{Clients: 1, Addresses: []v2.EgressAddressStatus{{Block: "b", PolicyCount: 1, Policies: []string{"a/b"}}}}
	for name, c := range map[string]struct {
		change func(*v2.EgressStatus)
		want   bool
	}{
		"nothing":           {func(*v2.EgressStatus) {}, false},
		"clients":           {func(s *v2.EgressStatus) { s.Clients++ }, true},
		"policies":          {func(s *v2.EgressStatus) { s.Addresses[0].PolicyCount, s.Addresses[0].Policies = 0, nil }, true},
		"a node":            {func(s *v2.EgressStatus) { s.Addresses[0].Node = "n" }, false},
		"clients, replicas": {func(s *v2.EgressStatus) { s.Clients, s.Replicas = 7, 7 }, false},
	} {
		other := base
		other.Addresses = slices.Clone(base.Addresses)
		c.change(&other)
		if got := egress.OnlyCounts(base, other); got != c.want {
			t.Errorf("%s: %t, want %t", name, got, c.want)
		}
		if base.Addresses[0].PolicyCount != 1 {
			t.Errorf("%s: it has changed what it was given", name)
		}
	}
}
