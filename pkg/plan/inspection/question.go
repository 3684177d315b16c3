package inspection

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// PodPath is the path of a question about a pod, NAMESPACE/NAME, that begins with before.
func PodPath(before, pod string) (string, error) {
	namespace, name, ok := strings.Cut(pod, "/")
	if !ok || namespace == "" || name == "" || strings.Contains(name, "/") || strings.ContainsAny(pod, "?#%") {
		return "", fmt.Errorf("%q isn't NAMESPACE/NAME of a pod", pod)
	}
	return before + pod, nil
}

// The protocols of packets that coild sends.
const (
	ICMP = "icmp"
	TCP  = "tcp"
	UDP  = "udp"
)

// MostSent is the most packets that are sent at once.
const MostSent = 10

// Order says what coild is to send from a pod.
type Order struct {
	// Protocol is ICMP, TCP or UDP: echo requests, SYN, or datagrams.
	Protocol string
	// To has the port 0 for ICMP.
	To    netip.AddrPort
	Count int
}

// Validate says what is wrong with the order.
func (o Order) Validate() error {
	if err := validProtocol(o.Protocol, o.To); err != nil {
		return err
	}
	if o.Count < 1 || o.Count > MostSent {
		return fmt.Errorf("1 to %d packets can be sent, not %d", MostSent, o.Count)
	}
	return nil
}

func validProtocol(protocol string, to netip.AddrPort) error {
	switch a, ported := to.Addr(), protocol == TCP || protocol == UDP; {
	case !a.IsValid() || a.Is4In6() || a.Zone() != "" || a.IsUnspecified() || a.IsMulticast(): // a packet to a group is answered by any number of hosts
		return fmt.Errorf("%s isn't the address of one destination", a)
	case !ported && protocol != ICMP:
		return fmt.Errorf("no packets are sent by the protocol %q, but by %s, %s or %s", protocol, ICMP, TCP, UDP)
	case ported && to.Port() == 0:
		return fmt.Errorf("packets of %s need a port: ADDRESS:PORT", protocol)
	case !ported && to.Port() != 0:
		return fmt.Errorf("packets of %s have no port: leave %d out", protocol, to.Port())
	}
	return nil
}

// words are the protocol and the destination, as questions have them.
func words(protocol string, to netip.AddrPort) []string {
	return []string{protocol, to.Addr().String(), strconv.Itoa(int(to.Port()))}
}

// Words are the order in a question: "tcp 203.0.113.5 443 3". ICMP has the port 0.
func (o Order) Words() []string { return append(words(o.Protocol, o.To), strconv.Itoa(o.Count)) }

// ParseOrder reads the words of an order.
func ParseOrder(text []string) (o Order, err error) {
	if len(text) != 4 {
		return o, fmt.Errorf("say PROTOCOL ADDRESS PORT COUNT, not %q", strings.Join(text, " "))
	}
	if o.Protocol, o.To, err = parseTo(text[:3]); err != nil {
		return o, err
	}
	if o.Count, err = strconv.Atoi(text[3]); err != nil {
		return o, fmt.Errorf("%q isn't a number of packets", text[3])
	}
	return o, o.Validate()
}

func parseTo(text []string) (protocol string, to netip.AddrPort, err error) {
	a, err := netip.ParseAddr(text[1])
	if err != nil {
		return "", to, err
	}
	port, err := strconv.ParseUint(text[2], 10, 16)
	if err != nil {
		return "", to, fmt.Errorf("%q isn't a port", text[2])
	}
	return text[0], netip.AddrPortFrom(a.WithZone("").Unmap(), uint16(port)), nil
}

// Flows asks which flows of a client a router has. Each packet that coild sends is one.
type Flows struct {
	Client   netip.Addr
	Protocol string
	To       netip.AddrPort
	// IDs are source ports, or identifiers of echo requests.
	IDs []uint16
}

// Words are the question without its name: "10.100.0.33 tcp 203.0.113.5 443 40001,40002".
func (f Flows) Words() []string {
	var ids []string
	for _, id := range f.IDs {
		ids = append(ids, strconv.Itoa(int(id)))
	}
	return append(append([]string{f.Client.String()}, words(f.Protocol, f.To)...), strings.Join(ids, ","))
}

// ParseFlows reads the words of a question.
func ParseFlows(text []string) (f Flows, err error) {
	if len(text) != 5 {
		return f, fmt.Errorf("say CLIENT PROTOCOL ADDRESS PORT ID[,ID...], not %q", strings.Join(text, " "))
	}
	if f.Client, err = netip.ParseAddr(text[0]); err != nil {
		return f, err
	}
	f.Client = f.Client.WithZone("").Unmap()
	if f.Protocol, f.To, err = parseTo(text[1:4]); err != nil {
		return f, err
	}
	ids := strings.Split(text[4], ",")
	if len(ids) > MostSent {
		return f, fmt.Errorf("at most %d flows are looked for, not %d", MostSent, len(ids))
	}
	for _, t := range ids {
		id, err := strconv.ParseUint(t, 10, 16)
		if err != nil {
			return f, fmt.Errorf("%q isn't a source port, or an identifier", t)
		}
		f.IDs = append(f.IDs, uint16(id))
	}
	if f.Client.Is4() != f.To.Addr().Is4() {
		return f, fmt.Errorf("no packets go from %s to %s", f.Client, f.To.Addr())
	}
	return f, validProtocol(f.Protocol, f.To)
}
