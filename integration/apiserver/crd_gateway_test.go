package apiserver

import (
	"fmt"
	"strings"
)

// gatewayPoolAttempts are attempts to create or change an AddressPool of gateways.
func gatewayPoolAttempts() []attempt {
	pool := func(more string) string {
		return fmt.Sprintf(`spec: {purpose: Floating, announce: Gateway, blockSizeBits: 0, %ssubnets: [{ipv4: 10.0.0.0/24}]}`, more)
	}
	const (
		ofGateways = "is for pools with announce: Gateway"
		another    = "can't be changed: make another pool"
		forGood    = "can't be added or removed: make another pool"
	)
	return []attempt{
		{name: "of gateways", new: pool("")},
		{name: "of gateways, for any purpose", new: `spec: {announce: Gateway, blockSizeBits: 0, subnets: [{ipv4: 10.0.0.0/24}]}`, field: "spec.announce", reason: "needs purpose: Floating"},
		{name: "gateways that elect", new: pool("vrrp: {routerID: 1}, ")},
		{name: "the last router IDs", new: pool("vrrp: {routerID: 240, instances: 16}, ")},
		{name: "router IDs above 255", new: pool("vrrp: {routerID: 241, instances: 16}, "), field: "spec.vrrp", reason: "virtual router IDs above 255"},
		{name: "no router ID", new: pool("vrrp: {instances: 2}, "), field: "spec.vrrp.routerID", reason: "Required value"},
		{name: "elections of nodes", new: `spec: {vrrp: {routerID: 1}, subnets: [{ipv4: 10.0.0.0/24}]}`, field: "spec.vrrp", reason: ofGateways},

		{name: "of OpenStack", new: pool("openstack: {cloud: prod, subnetIDs: [a, b], floatingNetworkID: c}, ")},
		{name: "of OpenStack, the default cloud", new: pool("openstack: {subnetIDs: [a]}, ")},
		{name: "of OpenStack, on nodes", new: `spec: {openstack: {subnetIDs: [a]}, subnets: [{ipv4: 10.0.0.0/24}]}`, field: "spec.openstack", reason: ofGateways},
		{name: "of no subnet", new: pool("openstack: {subnetIDs: []}, "), field: "spec.openstack.subnetIDs", reason: "at least 1"},
		{name: "of three subnets", new: pool("openstack: {subnetIDs: [a, b, c]}, "), field: "spec.openstack.subnetIDs", reason: "at most 2"},
		{name: "other floating IPs", old: pool("openstack: {subnetIDs: [a]}, "), new: pool("openstack: {subnetIDs: [a], floatingNetworkID: c}, ")},
		{name: "another cloud", old: pool("openstack: {cloud: old, subnetIDs: [a]}, "), new: pool("openstack: {cloud: new, subnetIDs: [a]}, ")},
		{name: "other subnets", old: pool("openstack: {subnetIDs: [a]}, "), new: pool("openstack: {subnetIDs: [b]}, "), field: "spec.openstack.subnetIDs", reason: another},
		{name: "of OpenStack from now on", old: pool(""), new: pool("openstack: {subnetIDs: [a]}, "), field: "spec.openstack", reason: forGood},
		{name: "of OpenStack no longer", old: pool("openstack: {subnetIDs: [a]}, "), new: pool(""), field: "spec.openstack", reason: forGood},
	}
}

// gatewayAttempts are attempts to create a LoadBalancerGateway.
func gatewayAttempts() []attempt {
	return []attempt{
		{name: "a pool", new: `spec: {pools: [dmz]}`},
		{name: "no pool", new: `spec: {pools: []}`, field: "spec.pools", reason: "at least 1"},
		{name: "a long name", object: strings.Repeat("g", 64), new: `spec: {pools: [dmz]}`, field: "metadata.name", reason: "has at most 63 characters"},
		{name: "elections of both families", new: `spec: {pools: [dmz], vrrp: {interface: eth0, sources: [192.0.2.1, "2001:db8::1"]}}`},
		{name: "two sources of a family", new: `spec: {pools: [dmz], vrrp: {interface: eth0, sources: [192.0.2.1, 192.0.2.2]}}`, field: "spec.vrrp.sources", reason: "one of each family"},
		{name: "a source with a length", new: `spec: {pools: [dmz], vrrp: {interface: eth0, sources: [192.0.2.1/24]}}`, field: "spec.vrrp.sources", reason: "must be an address"},
		{name: "a link that can't be", new: `spec: {pools: [dmz], vrrp: {interface: "a b", sources: [192.0.2.1]}}`, field: "spec.vrrp.interface", reason: "should match"},
		{name: "a port of OpenStack", new: `spec: {pools: [dmz], openstack: {portID: a, addressPairs: [192.0.2.0/26, "2001:db8::/64"]}}`},
		{name: "no port", new: `spec: {pools: [dmz], openstack: {portID: ""}}`, field: "spec.openstack.portID", reason: "should be at least 1 chars long"},
		{name: "an address in place of a range", new: `spec: {pools: [dmz], openstack: {portID: a, addressPairs: [192.0.2.1]}}`, field: "spec.openstack.addressPairs", reason: "must be ranges"},
		{name: "endpoints elsewhere", new: `spec: {pools: [dmz], endpoints: Node}`, field: "spec.endpoints", reason: "Unsupported value"},
	}
}
