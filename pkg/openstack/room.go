package openstack

import (
	"context"
	"errors"
	"net/url"

	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/ports"
	"github.com/gophercloud/gophercloud/v2/openstack/networking/v2/subnets"
	"go4.org/netipx"
)

// Room is what Neutron has for ports.
type Room struct {
	// Given are the addresses out of which Neutron chooses: the allocation pools of the configured subnets. Others of these subnets may be kept for
	// something that Neutron doesn't know.
	Given *netipx.IPSet
	// Taken are the addresses that ports on the network have, whoever they belong to.
	Taken *netipx.IPSet
}

// Room reads which addresses are free. It makes a call for each configured subnet, and one for each page of the network's ports. Only the owner of the network
// sees all of these: an address that isn't in Taken may be taken nevertheless.
func (c *Client) Room(ctx context.Context) (room Room, err error) {
	err = c.do(ctx, func(s *session) error {
		var given, taken netipx.IPSetBuilder
		for _, n := range s.subnets {
			got, err := subnets.Get(ctx, s.net, n.id).Extract()
			if err != nil {
				return explain("read subnet "+n.id, err)
			}
			for _, p := range got.AllocationPools {
				given.AddRange(netipx.IPRangeFrom(parse(p.Start), parse(p.End)))
			}
		}
		q := query(url.Values{"network_id": {s.network}, "fields": {"id", "fixed_ips"}})
		err := pages(ctx, ports.List(s.net, q), func(a answer) {
			for _, p := range a.Ports {
				for _, f := range p.FixedIPs {
					if addr := f.addr(); addr.IsValid() {
						taken.Add(addr)
					}
				}
			}
		})
		if err != nil {
			return explain("list the ports of network "+s.network, err)
		}
		if room.Given, err = given.IPSet(); err != nil {
			return misconfigured("the allocation pools of the configured subnets: %w", err)
		}
		room.Taken, err = taken.IPSet()
		return err
	})
	return room, err
}

// IsTaken says whether err is Neutron's word that a port has an address that was wanted by name.
func IsTaken(err error) bool {
	e := new(Error)
	return errors.As(err, &e) && (e.Type == "IpAddressAlreadyAllocated" || e.Type == "IpAddressInUse")
}
