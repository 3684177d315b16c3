package announce

import (
	"context"
	"errors"
	"fmt"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
)

// Parameter is the kind of the kernel parameters that are repaired, which other parts of the node have, too.
const Parameter = "sysctl"

// parameter is a kernel parameter, and the index of the link that it is of; 0 is of all links.
type parameter struct {
	key  string
	link int
}

// parametersOf are those that the kernel needs to answer for spots, and their values, in a fixed order:
//
//	proxy_ndp of all     that of a single link answers multicast solicitations, but not the probes of hosts that know the address
//	                     already, which are forwarded
//	proxy_delay          else the answer is late, by up to 0.8 s
//
// For ARP the parameter proxy_arp isn't needed. Forwarding has other owners.
func parametersOf(links map[int]link, want []spot) (all []parameter, values map[parameter]string) {
	values = map[parameter]string{}
	add := func(p parameter, value string) {
		if _, ok := values[p]; !ok {
			values[p] = value
			all = append(all, p)
		}
	}
	for _, s := range want {
		family := "ipv4"
		if dataplane.FamilyOf(s.addr) == dataplane.IPv6 {
			family = "ipv6"
			add(parameter{key: "net/ipv6/conf/all/proxy_ndp"}, "1")
		}
		add(parameter{fmt.Sprintf("net/%s/neigh/%s/proxy_delay", family, links[s.link].name), s.link}, "0")
	}
	return all, values
}

// setParameters sets the parameters that the kernel needs to answer for spots. One that had its value before is repaired.
func (k *Keeper) setParameters(ctx context.Context, want []spot) error {
	all, values := parametersOf(k.links, want)
	var errs []error
	set := map[parameter]bool{}
	for _, p := range all {
		changed, err := k.cfg.Set(sysctl.Setting{Key: p.key, Value: values[p]})
		if errors.Is(err, sysctl.ErrNotExist) {
			continue // the link is gone, or has another name
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if changed && k.set[p] {
			k.cfg.Repairs.Done(ctx, Parameter, 1)
		}
		set[p] = true
	}
	k.set = set
	return errors.Join(errs...)
}
