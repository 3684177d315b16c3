package dataplane

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go4.org/netipx"
)

// Ruleset is a table of nftables, of the family inet, as it is wanted. The table of a Ruleset without
// chains isn't wanted at all.
type Ruleset struct {
	// Counters are the names of the counters that rules add to.
	Counters []string
	Sets     []Set
	Chains   []Chain
}

// Chain is a list of rules.
type Chain struct {
	Name string
	// Hook is where a base chain is called; nil of a chain that other chains' rules lead to.
	Hook  *Hook
	Rules []ChainRule
}

// Hook is where the kernel calls a base chain, in the words of nft(8). Packets that no rule drops are accepted.
type Hook struct {
	Type     string // filter, nat or route
	Name     string // prerouting, input, forward, output or postrouting; arp input in a table of the family arp
	Priority int    // see the constants of linux/netfilter_ipv4.h, the same in both families
}

// Priorities of hooks, lower ones first (nft(8), "Standard priority names").
const (
	HookRaw            = -300
	HookMangle         = -150
	HookDestinationNAT = -100
	HookFilter         = 0
	HookSourceNAT      = 100
)

// Priorities before and after all that programs use.
const (
	HookFirst = -1000
	HookLast  = 1000
)

// ChainRule is one rule of a chain.
type ChainRule struct {
	// Comment says in a few words which packets the rule matches.
	Comment string
	// Text is the rule in words of nft(8); package kernel/nft says which ones it knows.
	Text string
}

// Add adds a rule at the end of the chain.
func (c *Chain) Add(comment, text string) { c.Rules = append(c.Rules, ChainRule{comment, text}) }

// Set is a named set, or a map.
type Set struct {
	Name string
	// Key is the type of the keys in words of nft(8): ipv4_addr, or iface_index . ipv4_addr.
	Key string
	// Value is the type of a map's values, such as ipv4_addr or verdict; empty of a set.
	Value string
	// Size is how many elements there may be, 0 any number. A set with a size is found faster.
	Size uint32
	// Elements are those of a set, or map, that isn't Interval.
	Elements []Element
	// Interval says that keys are ranges: Ranges of addresses in a set, Elements with Last otherwise. Ranges
	// are sorted and don't overlap.
	Interval bool
	Ranges   []netipx.IPRange
	// Counting sets have elements that rules add, each with a state of its own; sets with a Timeout have
	// elements that rules add for so long, or others for a time of their own. These elements are never removed when the table is synced.
	Counting bool
	Timeout  time.Duration
	// Counted sets count packets and bytes of each element, whenever a rule finds it.
	Counted bool
}

// Element is an element of a set or map.
type Element struct {
	// Key has the bytes of the fields of the key, as they are in a packet; numbers that aren't in packets, as the
	// index of a link, have the byte order of the processor. Each field is filled up to a multiple of four bytes
	// if there are several.
	Key string
	// Last is the last key of a range that begins with Key; empty if Key is a single key.
	Last string
	// Value is that of a map: bytes as in Key, or the text of a verdict.
	Value string
}

// SetChange is elements that are removed from a set or map, and others that are added to it afterwards.
type SetChange struct {
	Set         string
	Remove, Add []Element
}

// KeyOf returns the key for an address.
func KeyOf(a netip.Addr) string { return string(a.AsSlice()) }

// Named returns the name of an object of which a ruleset has one for each family.
func (f Family) Named(name string) string { return name + "_" + f.word() }

// word is the family as nft(8) names it: ipv4 or ipv6.
func (f Family) word() string { return strings.ToLower(f.String()) }

// CutFamily returns the name and the family of which Named made a name, which has no family if Named made none.
func CutFamily(named string) (name string, f Family) {
	for _, f := range []Family{IPv4, IPv6} {
		if name, ok := strings.CutSuffix(named, "_"+f.word()); ok {
			return name, f
		}
	}
	return named, 0
}

// KeyOfLink returns the key for the index of a link.
func KeyOfLink(index int) string {
	return string(binary.NativeEndian.AppendUint32(nil, uint32(index)))
}

// LinkOfKey returns the index of the link of which a key is.
func LinkOfKey(key string) (index int, ok bool) {
	if len(key) != 4 {
		return 0, false
	}
	return int(binary.NativeEndian.Uint32([]byte(key))), true
}

// ClientGuard drops, on the node, packets that a client sends to destinations past its tunnels. The
// ranges are sorted and don't overlap. The zero ClientGuard drops nothing.
type ClientGuard struct {
	// Destinations are reached by tunnels alone, whose own packets are for other addresses.
	Destinations []netipx.IPRange
	// Replies are the destinations to which answers pass, in connections that were opened from there.
	Replies []netipx.IPRange
}

// Equal says whether two guards drop the same.
func (g ClientGuard) Equal(o ClientGuard) bool {
	return slices.Equal(g.Destinations, o.Destinations) && slices.Equal(g.Replies, o.Replies)
}
