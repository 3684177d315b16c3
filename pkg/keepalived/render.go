package keepalived

import (
	"bytes"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// loopback is the link of the address that adverts name.
const loopback = "lo"

// advertised is the only address that adverts of the instance name, one of lo that is never sent to; addresses proper are
// excluded from adverts.
//
// keepalived drops adverts whose addresses aren't its own ones, and becomes the master although there is one. With
// skip_check_adv_addr it looks only at the first advert of each master, which is enough for that. So two gateways would both be
// masters from the moment when one is told of a new address until the other one is told, too. The address also lets an
// instance elect a master that has no addresses yet: keepalived refuses an instance without one. And an advert has room
// for 255 addresses of IPv4 and 89 of IPv6 only.
//
// The IPv6 one is the link-local address of the virtual router's MAC address (RFC 5798, section 7.3).
func (i Instance) advertised() netip.Addr {
	if i.Source.Is4() {
		return netip.AddrFrom4([4]byte{127, 112, 0, byte(i.RouterID)})
	}
	return netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 8: 0x02, 10: 0x5e, 11: 0xff, 12: 0xfe, 14: 2, 15: byte(i.RouterID)})
}

// header begins the file.
const header = "# Coil writes this file. Changes are lost.\n"

// Render returns the text for keepalived of a configuration that is valid. The same configuration has the same text, in
// whatever order it names instances and addresses.
func (c Config) Render() []byte {
	b := bytes.NewBufferString(header)
	for _, i := range c.sorted() {
		i.render(b)
	}
	return b.Bytes()
}

// sorted returns the instances in normal form, by name.
func (c Config) sorted() []Instance {
	all := make([]Instance, 0, len(c.Instances))
	for _, i := range c.Instances {
		all = append(all, i.normal())
	}
	slices.SortFunc(all, func(a, b Instance) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// render writes an instance in normal form. What matters is written even where it is keepalived's default: the operator's
// global_defs may have another one.
func (i Instance) render(b *bytes.Buffer) {
	line := func(format string, args ...any) { fmt.Fprintf(b, "  "+format+"\n", args...) }
	block := func(name string, lines []string) {
		line("%s {", name)
		for _, l := range lines {
			line("  %s", l)
		}
		line("}")
	}
	fmt.Fprintf(b, "\nvrrp_instance %s {\n", i.Name)
	line("state BACKUP") // the election decides; preemption is configured for this state only
	line("version 3")
	line("strict_mode off") // it forbids unicast and to accept packets
	line("accept")
	line("interface %s", i.Interface)
	line("virtual_router_id %d", i.RouterID)
	line("priority %d", i.Priority)
	if i.NoPreempt {
		line("nopreempt")
	}
	if i.PreemptDelay != 0 {
		line("preempt_delay %s", seconds(i.PreemptDelay))
	}
	line("advert_int %s", seconds(i.AdvertInterval))
	i.renderSource(line, block)
	for _, l := range garp {
		line("%s", l)
	}
	scope := ""
	if i.Source.Is4() {
		scope = " scope host"
	}
	block("virtual_ipaddress", []string{fmt.Sprintf("%s dev %s%s", single(i.advertised()), loopback, scope)})
	if len(i.Addresses) > 0 {
		var lines []string
		for _, a := range i.Addresses {
			lines = append(lines, fmt.Sprintf("%s dev %s", single(a), i.AddressInterface))
		}
		block("virtual_ipaddress_excluded", lines)
	}
	b.WriteString("}\n")
}

// renderSource writes from where to where adverts go.
func (i Instance) renderSource(line func(string, ...any), block func(string, []string)) {
	how := "mcast_src_ip"
	if len(i.Peers) > 0 {
		how = "unicast_src_ip"
	}
	line("%s %s", how, i.Source)
	if len(i.Peers) > 0 {
		var peers []string
		for _, p := range i.Peers {
			peers = append(peers, p.String())
		}
		block("unicast_peer", peers)
	}
}

// garp says how often a master tells the network, for each address, that it is at its link: by gratuitous ARP, or
// unsolicited neighbour advertisements. At once when it becomes the master, since hosts and switches send to the old master
// until they hear it; twice, and again a second later, since one packet may be lost and a switch may just learn; each
// minute for those that missed all; and when another gateway thought that it was the master. keepalived's five at a time
// are too many for thousands of addresses: it sends no adverts meanwhile, and another gateway would become the master.
var garp = []string{
	"garp_master_repeat 2",
	"garp_master_delay 1",
	"garp_master_refresh 60",
	"garp_master_refresh_repeat 1",
	"garp_lower_prio_repeat 1",
	"garp_lower_prio_delay 1",
}

// single is the prefix of one address.
func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// seconds is a duration as keepalived reads it.
func seconds(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'f', -1, 64) }

// written matches a line of an address of an instance, of which group 1 is the address.
var written = regexp.MustCompile(`(?m)^    (\S+)/\d+ dev \S+$`)

// addressesIn returns the addresses of the instances of a text that Render wrote.
func addressesIn(text []byte) (all []netip.Addr) {
	for _, m := range written.FindAllSubmatch(text, -1) {
		if a, err := netip.ParseAddr(string(m[1])); err == nil && !a.IsLinkLocalUnicast() { // not what is advertised
			all = append(all, a)
		}
	}
	return all
}

var rendered = regexp.MustCompile(`(?m)^vrrp_instance (\S+) \{$`)

// instancesIn returns the names of the instances of a text that Render wrote.
func instancesIn(text []byte) (names []string) {
	for _, m := range rendered.FindAllSubmatch(text, -1) {
		names = append(names, string(m[1]))
	}
	return names
}
