package egress

import (
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

const (
	// mostNamed is how many policies an Egress names for an address, and mostNamedInAll for all of its addresses together. There is a limit because
	// each node gets the status.
	mostNamed      = 8
	mostNamedInAll = 256
)

// namePolicies adds to addresses the policies whose pods leave by them. policies are by block.
func namePolicies(all []v2.EgressAddressStatus, policies map[string][]string) {
	left := mostNamedInAll
	for i := range all {
		names := slices.Sorted(slices.Values(policies[all[i].Block]))
		all[i].PolicyCount = int32(len(names))
		all[i].Policies = names[:min(len(names), mostNamed, left)]
		left -= len(all[i].Policies)
	}
}

// SameCounts says whether two statuses of an Egress have the same number of clients, and the same policies of each address.
func SameCounts(a, b v2.EgressStatus) bool {
	return a.Clients == b.Clients && slices.EqualFunc(a.Addresses, b.Addresses, func(x, y v2.EgressAddressStatus) bool {
		return x.PolicyCount == y.PolicyCount && slices.Equal(x.Policies, y.Policies)
	})
}

// OnlyCounts says whether two statuses differ, but only in these.
func OnlyCounts(a, b v2.EgressStatus) bool {
	return !SameCounts(a, b) && equality.Semantic.DeepEqual(withoutCounts(a), withoutCounts(b))
}

func withoutCounts(st v2.EgressStatus) v2.EgressStatus {
	st.Clients, st.Addresses = 0, slices.Clone(st.Addresses)
	for i := range st.Addresses {
		st.Addresses[i].PolicyCount, st.Addresses[i].Policies = 0, nil
	}
	return st
}
