package openstack

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
)

// Address is an address as the cloud had it when it was read.
type Address struct {
	Key string
	// PortID is empty if there is no port.
	PortID string
	// Fixed are the addresses that the port has of the configured subnets, in the order of these: one of each, unless others have added some.
	Fixed []netip.Addr
	// FloatingID is empty if there is no floating IP.
	FloatingID string
	// Floating is the floating IP; it is valid only if it leads to an address in Fixed.
	Floating netip.Addr
	// Incomplete says what the address lacks, for people. Ensure adds it. That there is no floating IP isn't among this: whether
	// one is wanted, the cloud doesn't tell.
	Incomplete []string

	port    *port
	float   *float
	surplus []string // IDs of objects of the same key that Sweep deletes
}

// addresses joins objects to addresses, sorted by their keys.
func (f found) addresses(m marks, subnets []subnet) (all []Address) {
	of := map[string]found{}
	for _, p := range f.ports {
		g := of[p.key]
		g.ports = append(g.ports, p)
		of[p.key] = g
	}
	for _, f := range f.floats {
		g := of[f.key]
		g.floats = append(g.floats, f)
		of[f.key] = g
	}
	for _, key := range slices.Sorted(maps.Keys(of)) {
		all = append(all, newAddress(m, key, of[key], subnets))
	}
	return all
}

// newAddress joins the objects of a key, which are sorted by age.
func newAddress(m marks, key string, f found, subnets []subnet) Address {
	a := Address{Key: key}
	if len(f.ports) > 0 {
		a.port = f.ports[0]
		for _, p := range f.ports[1:] {
			a.surplus = append(a.surplus, p.ID)
		}
	}
	a.float = choose(f.floats, a.port)
	for _, f := range f.floats {
		if f != a.float {
			a.surplus = append(a.surplus, f.ID)
		}
	}
	a.describe(m, subnets)
	return a
}

// choose returns the floating IP of an address: the one that leads to its port, since no second one can, or else the oldest.
func choose(floats []*float, p *port) *float {
	for _, f := range floats {
		if p != nil && f.PortID == p.ID {
			return f
		}
	}
	if len(floats) > 0 {
		return floats[0]
	}
	return nil
}

// describe fills in the fields for the caller.
func (a *Address) describe(m marks, subnets []subnet) {
	*a = Address{Key: a.Key, port: a.port, float: a.float, surplus: a.surplus}
	lacks := func(format string, args ...any) { a.Incomplete = append(a.Incomplete, fmt.Sprintf(format, args...)) }
	if a.port == nil {
		lacks("there is no port")
	} else {
		a.PortID = a.port.ID
		if !m.tagged(a.Key, a.port.Tags) {
			lacks("port %s has no tags", a.port.ID)
		}
		for _, s := range subnets {
			a.Fixed = append(a.Fixed, a.port.in(s)...)
		}
		if len(a.Fixed) == 0 {
			lacks("port %s has no address of the configured subnets", a.port.ID)
		}
	}
	if a.float == nil {
		return
	}
	a.FloatingID = a.float.ID
	if !m.tagged(a.Key, a.float.Tags) {
		lacks("the floating IP %s has no tags", a.float.Address)
	}
	if a.leads(netip.Addr{}) {
		a.Floating = parse(a.float.Address)
	} else {
		lacks("the floating IP %s doesn't lead to the port", a.float.Address)
	}
}

// fixed4 is the address of IPv4 that the floating IP is to lead to: the one that is named, if any is.
func (a *Address) fixed4(named netip.Addr) netip.Addr {
	for _, addr := range a.Fixed {
		if addr.Is4() && (!named.IsValid() || addr == named) {
			return addr
		}
	}
	return netip.Addr{}
}

// leads says whether the floating IP leads to the port's address that is named or, if none is, to any. Neutron keeps the former address in a
// floating IP whose port has lost it.
func (a *Address) leads(named netip.Addr) bool {
	if a.port == nil || a.float == nil || a.float.PortID != a.port.ID {
		return false
	}
	to := parse(a.float.FixedIP)
	return to.IsValid() && slices.Contains(a.Fixed, to) && (!named.IsValid() || to == named)
}

// lacking are the wanted subnets of which the port has no address, or not the one that is named.
func (a *Address) lacking(wanted []subnet) []subnet {
	return slices.DeleteFunc(slices.Clone(wanted), func(s subnet) bool {
		has := a.port.in(s)
		return len(has) > 0 && (!s.named.IsValid() || slices.Contains(has, s.named))
	})
}

// complete says whether all that is wanted was there.
func (a *Address) complete(m marks, wanted []subnet, w Want) bool {
	return a.port != nil && m.tagged(a.Key, a.port.Tags) && len(a.lacking(wanted)) == 0 &&
		(a.float == nil || m.tagged(a.Key, a.float.Tags)) && (!w.Floating || a.leads(w.named(true)))
}

// Object is an object of the cloud that is deleted.
type Object struct {
	// Resource is ports or floatingips.
	Resource, ID string
	// Key is that of the address.
	Key string
	// Addresses are what it had.
	Addresses []netip.Addr

	object object
}

// objects are all objects as those that may be deleted: floating IPs come first, so that none is left without its port.
func (f found) objects() (all []Object) {
	for _, f := range f.floats {
		all = append(all, Object{Resource: floatsResource, ID: f.ID, Key: f.key, Addresses: []netip.Addr{parse(f.Address)}, object: f.object})
	}
	for _, p := range f.ports {
		o := Object{Resource: portsResource, ID: p.ID, Key: p.key, object: p.object}
		for _, f := range p.FixedIPs {
			o.Addresses = append(o.Addresses, f.addr())
		}
		all = append(all, o)
	}
	return all
}

// String names the object for errors.
func (o Object) String() string {
	kind := "port"
	if o.Resource == floatsResource {
		kind = "floating IP"
	}
	return fmt.Sprintf("%s %s of address %s", kind, o.ID, o.Key)
}
