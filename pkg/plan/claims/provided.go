package claims

import (
	"cmp"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// ProvidedTo returns a claim as if it listed the address that OpenStack provides for it, nil as long as there is none.
func ProvidedTo(c *v2.AddressClaim) *v2.AddressClaim {
	p := c.Status.Provided
	if p == nil {
		return nil
	}
	as := c.DeepCopy()
	as.Spec.Count, as.Spec.Addresses = nil, []string{cmp.Or(p.IPv4, p.IPv6)}
	return as
}
