package dataplane

import "net/netip"

// Packet is what rules see of a packet, without its transport.
type Packet struct {
	// From is not valid for a packet whose source isn't chosen yet.
	From, To netip.Addr
	// Input is the name of the link by which it came, Loopback for a packet of this host.
	Input string
	Mark  uint32
}

// Takes says whether a rule is for a packet. One for a transport, or for a bound socket, isn't.
func (r Rule) Takes(p Packet) bool {
	return r.Family == FamilyOf(p.To) && r.Transport == 0 && r.SourcePort == 0 && r.DestinationPort == 0 && r.Output == "" &&
		(!r.To.IsValid() || r.To.Contains(p.To)) && (!r.From.IsValid() || p.From.IsValid() && r.From.Contains(p.From)) &&
		(r.Input == "" || r.Input == p.Input) && p.Mark&r.Mask == r.Mark&r.Mask
}
