package loadbalancer

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// claimFor is how the name of a claim of any address begins that is made for a Service.
func claimFor(service types.UID) string { return "lb-" + string(service) }

// claimOfAddress is how the name of a claim of an address begins that a Service asks for.
func claimOfAddress(a netip.Addr) string {
	return "lb-" + strings.NewReplacer(".", "-", ":", "-").Replace(a.String())
}

// ClaimOf returns the AddressClaim of a Service's address, among those of Services, as far as objects tell; nil if there is none. The controller knows more: what it has planned.
func ClaimOf(s *corev1.Service, claims []*v2.AddressClaim, blocks []*v2.AddressBlock) *v2.AddressClaim {
	asks := Of(s)
	find := func(is func(*v2.AddressClaim) bool) *v2.AddressClaim {
		i := slices.IndexFunc(claims, func(c *v2.AddressClaim) bool { return c.DeletionTimestamp == nil && is(c) })
		if i < 0 {
			return nil
		}
		return claims[i]
	}
	if len(asks.Has) > 0 {
		if c := find(func(c *v2.AddressClaim) bool {
			addrs := AddressOf(c).Addrs()
			return !slices.ContainsFunc(asks.Has, func(a netip.Addr) bool { return !slices.Contains(addrs, a) })
		}); c != nil {
			return c
		}
	}
	for _, b := range blocks {
		if b.Floating == nil || !slices.ContainsFunc(b.Floating.Ports, func(p v2.FloatingPort) bool { return p.Service == asks.Name.String() }) {
			continue
		}
		if c := find(func(c *v2.AddressClaim) bool { return c.UID == b.Floating.Owner.UID }); c != nil {
			return c
		}
	}
	names := []string{claimFor(s.UID)}
	if len(asks.Wants) > 0 {
		names = []string{claimOfAddress(asks.Wants[0])}
	}
	return find(func(c *v2.AddressClaim) bool { return slices.Contains(names, c.Name) })
}
