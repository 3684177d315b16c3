package sending

import (
	"cmp"
	"fmt"
)

// Unreachable are the types of errors that say that a packet can't get to its destination, of ICMP and of ICMPv6. Exceeded are those of a time that is over.
const (
	unreachable4 = 3
	unreachable6 = 1
	exceeded4    = 11
	exceeded6    = 3
)

// kinds are the words for other types of errors, and codes those for codes of unreachable (RFC 792, 1812, 4443).
var (
	kinds4 = map[byte]string{12: "parameter problem"}
	kinds6 = map[byte]string{2: "the packet is too big", 4: "parameter problem"}
	codes4 = map[byte]string{
		0: "network unreachable", 1: "host unreachable", 2: "protocol unreachable", 3: "port unreachable", 4: "the packet is too big", 5: "source route failed",
		6: "network unknown", 7: "host unknown", 9: "network prohibited", 10: "host prohibited", 13: "communication prohibited",
	}
	codes6 = map[byte]string{
		0: "no route", 1: "communication prohibited", 2: "beyond the scope of the source", 3: "address unreachable", 4: "port unreachable",
		5: "source address prohibited", 6: "route rejected",
	}
)

// Words names the answer; it is empty if there is none.
func (o Outcome) Words(k Kind, v4 bool) string {
	switch o.Answer {
	case Replied:
		if k == Echo {
			return "echo reply"
		}
		return "datagram"
	case Accepted:
		return "SYN-ACK"
	case Refused:
		return "RST"
	case Failed:
		name := "ICMPv6"
		if v4 {
			name = "ICMP"
		}
		return fmt.Sprintf("%s (%s type %d, code %d)", o.failure(v4), name, o.Type, o.Code)
	}
	return ""
}

// failure names the error.
func (o Outcome) failure(v4 bool) string {
	kinds, codes, unreachable, exceeded := kinds6, codes6, byte(unreachable6), byte(exceeded6)
	if v4 {
		kinds, codes, unreachable, exceeded = kinds4, codes4, unreachable4, exceeded4
	}
	switch {
	case o.Type == unreachable:
		return cmp.Or(codes[o.Code], "unreachable")
	case o.Type == exceeded && o.Code == 0:
		return "hop limit exceeded"
	case o.Type == exceeded:
		return "a fragment is missing"
	}
	return cmp.Or(kinds[o.Type], "another error")
}

// Port unreachable, of ICMP and of ICMPv6.
const (
	port4 = 3
	port6 = 4
)

// Arrived says whether the answer shows that the packet got to its destination: that answered, or has no socket for the packet. An echo may be answered by another
// address: somebody has translated the destination, and not the answer.
func (o Outcome) Arrived(order Order) bool {
	to := order.To.Addr()
	switch o.Answer {
	case Replied, Accepted, Refused:
		return o.By == to
	case Failed:
		port := to.Is4() && o.Type == unreachable4 && o.Code == port4 || !to.Is4() && o.Type == unreachable6 && o.Code == port6
		return port && o.By == to
	}
	return false
}
