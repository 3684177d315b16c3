package sending

import "fmt"

// Unreachable are the types of errors that say that a packet can't get to its destination, of ICMP and of ICMPv6.
const (
	unreachable4 = 3
	unreachable6 = 1
)

// codes are the words for codes of these (RFC 792, 1812, 4443).
var (
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
		codes, unreachable, name := codes6, byte(unreachable6), "ICMPv6"
		if v4 {
			codes, unreachable, name = codes4, unreachable4, "ICMP"
		}
		text := codes[o.Code]
		if o.Type != unreachable {
			text = "hop limit exceeded"
		}
		if text == "" {
			text = "unreachable"
		}
		return fmt.Sprintf("%s (%s type %d, code %d)", text, name, o.Type, o.Code)
	}
	return ""
}

// Port unreachable, of ICMP and of ICMPv6.
const (
	port4 = 3
	port6 = 4
)

// Arrived says whether the answer shows that the packet got to its destination: that answered, or has no socket for the packet.
func (o Outcome) Arrived(order Order) bool {
	switch o.Answer {
	case Replied, Accepted, Refused:
		return true
	case Failed:
		to := order.To.Addr()
		port := to.Is4() && o.Type == unreachable4 && o.Code == port4 || !to.Is4() && o.Type == unreachable6 && o.Code == port6
		return port && o.By == to
	}
	return false
}
