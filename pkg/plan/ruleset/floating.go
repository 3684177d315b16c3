package ruleset

import (
	"net/netip"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/holding"
)

// Floating is what the table of a node does with floating addresses. It is a table of its own: the elements of its sets come and go all
// the time.
type Floating struct {
	// Addresses are those that have routes to pods of the node.
	Addresses []netip.Addr
}

// NotHeld is the counter of packets from and to floating addresses for which the node doesn't answer.
const NotHeld = "not_held"

// Names of sets.
const (
	floatingSet  = "floating"
	answeringSet = "answering"
)

// Answering is the set of addresses of a family for which the node answers. Its elements end by themselves, so that the node stops also if
// coild doesn't run any more. A former holder would otherwise send and take packets of connections that the next one has.
func Answering(f dataplane.Family) dataplane.Set {
	for _, known := range families {
		if known.Family == f {
			return known.answering()
		}
	}
	return dataplane.Set{}
}

func (f family) answering() dataplane.Set {
	return dataplane.Set{Name: f.Named(answeringSet), Key: f.addr, Timeout: holding.Lease}
}

// Ruleset returns the table of the family inet. The hook comes before connections are tracked. Hosts that ask for an address of IPv6 get
// no answer either (RFC 4861, section 4.3: the target is behind the first 8 bytes).
func (h Floating) Ruleset() dataplane.Ruleset {
	var r dataplane.Ruleset
	if len(h.Addresses) == 0 {
		return r
	}
	entry := base("prerouting", "filter", "prerouting", dataplane.HookRaw)
	for _, f := range families {
		r.Counters = append(r.Counters, f.Named(NotHeld))
		r.Sets = append(r.Sets, f.set(floatingSet, h.Addresses), f.answering())
		for _, side := range []string{"daddr", "saddr"} {
			f.rule(&entry, "a floating address for which the node doesn't answer", "meta nfproto $f $ip %s @%s_$f $ip %s != @%s_$f counter name %s_$f drop",
				side, floatingSet, side, answeringSet, NotHeld)
		}
		if f.Family == dataplane.IPv6 {
			f.rule(&entry, "a host asks for a floating address for which the node doesn't answer", "meta l4proto $ping $icmp type nd-neighbor-solicit @th,64,128 @%s_$f @th,64,128 != @%s_$f drop",
				floatingSet, answeringSet)
		}
	}
	r.Chains = append(r.Chains, entry)
	return r
}

// ARP returns the table of the family arp: hosts that ask for an address for which the node doesn't answer get no answer. A holder
// that announces one isn't asking.
func (h Floating) ARP() dataplane.Ruleset {
	f := families[0]
	asked := f.set(floatingSet, h.Addresses)
	if len(asked.Elements) == 0 {
		return dataplane.Ruleset{}
	}
	entry := base("input", "filter", "arp input", dataplane.HookFilter)
	f.rule(&entry, "a host asks for a floating address for which the node doesn't answer", "arp daddr ip @%[1]s_$f arp daddr ip != @%[2]s_$f arp saddr ip != @%[1]s_$f drop",
		floatingSet, answeringSet)
	return dataplane.Ruleset{Sets: []dataplane.Set{asked, f.answering()}, Chains: []dataplane.Chain{entry}}
}
