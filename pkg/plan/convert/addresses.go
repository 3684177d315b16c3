package convert

import (
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Bounds of the API: addresses of an Egress, entries of spec.addresses.list, subnets of an AddressPool.
const (
	maxAddresses = 1024
	maxList      = 64
	maxSubnets   = 64
)

// pair is an address of each family, or one alone.
type pair struct{ ipv4, ipv6 netip.Addr }

// only is a pair with one address.
func only(a netip.Addr) pair {
	if a.Is4() {
		return pair{ipv4: a}
	}
	return pair{ipv6: a}
}

// key is the address that stands for the pair.
func (p pair) key() netip.Addr {
	if p.ipv4.IsValid() {
		return p.ipv4
	}
	return p.ipv6
}

func (p pair) both() bool { return p.ipv4.IsValid() && p.ipv6.IsValid() }

func (p pair) address() *v2.EgressAddress {
	out := &v2.EgressAddress{}
	if p.ipv4.IsValid() {
		out.IPv4 = p.ipv4.String()
	}
	if p.ipv6.IsValid() {
		out.IPv6 = p.ipv6.String()
	}
	return out
}

// parse reads a pair. Both addresses may be missing.
func (f family) parse() (p pair, err error) {
	if f.IPv4 != "" {
		if p.ipv4, err = netip.ParseAddr(f.IPv4); err != nil || !p.ipv4.Is4() {
			return pair{}, fmt.Errorf("%.100q isn't an IPv4 address", f.IPv4)
		}
	}
	if f.IPv6 != "" {
		if p.ipv6, err = netip.ParseAddr(f.IPv6); err != nil || !p.ipv6.Is6() || p.ipv6.Is4In6() || p.ipv6.Zone() != "" {
			return pair{}, fmt.Errorf("%.100q isn't an IPv6 address", f.IPv6)
		}
	}
	return p, nil
}

// entry is one of an EgressGateway's pool.
type entry struct {
	usable netipx.IPRange
	// net is the CIDR, if the entry is one.
	net netip.Prefix
}

// parseEntry reads an address, a range "a-b" or a CIDR, of which an IPv4 one with more than two addresses is used without the first and the last one.
func parseEntry(text string, v4 bool) (entry, error) {
	var e entry
	if strings.Contains(text, "-") {
		r, err := netipx.ParseIPRange(text)
		if err != nil {
			return entry{}, fmt.Errorf("%.100q isn't a range of addresses", text)
		}
		e.usable = r
	} else {
		p, _, err := prefix(text, true)
		if err != nil {
			return entry{}, fmt.Errorf("%.100q isn't an address, a range a-b or a CIDR", text)
		}
		e.usable = netipx.RangeOfPrefix(p)
		if strings.Contains(text, "/") {
			e.net = p
			if p.Addr().Is4() && p.Bits() < 31 {
				e.usable = netipx.IPRangeFrom(e.usable.From().Next(), e.usable.To().Prev())
			}
		}
	}
	if !sendable(e.usable.From()) || !sendable(e.usable.To()) {
		return entry{}, fmt.Errorf("%.100q has addresses that can't be the source of packets", text)
	}
	if e.usable.From().Is4() != v4 || e.usable.From().Is4In6() || e.usable.From().Zone() != "" {
		return entry{}, fmt.Errorf("%.100q isn't of the list's family", text)
	}
	return e, nil
}

// sendable says whether an AddressPool may have an address.
func sendable(a netip.Addr) bool {
	return a.IsGlobalUnicast() && !netip.PrefixFrom(netip.IPv4Unspecified(), 8).Contains(a)
}

func parseEntries(texts []string, v4 bool) (all []entry, err error) {
	for _, t := range texts {
		e, err := parseEntry(t, v4)
		if err != nil {
			return nil, err
		}
		all = append(all, e)
	}
	return all, nil
}

func has(entries []entry, a netip.Addr) bool {
	return slices.ContainsFunc(entries, func(e entry) bool { return e.usable.Contains(a) })
}

// each walks through the addresses of entries, in their order; one that is in two of them comes twice.
func each(entries []entry) iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for _, e := range entries {
			for a := e.usable.From(); a.IsValid() && a.Compare(e.usable.To()) <= 0; a = a.Next() {
				if !yield(a) {
					return
				}
			}
		}
	}
}

// addressBook is the addresses of an Egress: pairs, or those of one family.
type addressBook struct {
	dual  bool
	pairs map[netip.Addr]pair // by each of their addresses
	order []pair              // the most important ones first
	// spare are pairs that the pool has and that the Egress doesn't use: the first and the last one of a CIDR.
	spare []pair
	// left4 and left6 say that addresses of a family have no partner, more that there are more than an Egress may have.
	left4, left6, more bool
}

// find returns the pair of one of the addresses.
func (b *addressBook) find(p pair) (pair, bool) {
	have, ok := b.pairs[p.ipv4]
	if !ok {
		have, ok = b.pairs[p.ipv6]
	}
	return have, ok
}

// add adds a pair, unless one of its addresses has another partner. It says whether the pair is there.
func (b *addressBook) add(p pair) bool {
	if have, ok := b.pairs[p.key()]; ok {
		return have == p
	}
	if _, ok := b.pairs[p.ipv6]; p.both() && ok {
		return false
	}
	if len(b.order) >= maxAddresses {
		b.more = true
		return false
	}
	b.order = append(b.order, p)
	b.put(p)
	return true
}

func (b *addressBook) put(p pair) {
	if p.ipv4.IsValid() {
		b.pairs[p.ipv4] = p
	}
	if p.ipv6.IsValid() {
		b.pairs[p.ipv6] = p
	}
}

// bookOf returns the addresses of pools, with the named ones first.
func bookOf(ipv4, ipv6 []entry, named []pair) *addressBook {
	b := &addressBook{dual: len(ipv4) > 0 && len(ipv6) > 0, pairs: map[netip.Addr]pair{}}
	if !b.dual {
		for _, p := range named {
			if has(ipv4, p.ipv4) {
				b.add(only(p.ipv4))
			} else if has(ipv6, p.ipv6) {
				b.add(only(p.ipv6))
			}
		}
		for a := range each(slices.Concat(ipv4, ipv6)) {
			if b.add(only(a)); b.more {
				break
			}
		}
		return b
	}
	var single []netip.Addr // named, but without a partner
	for _, p := range named {
		switch {
		case p.both() && has(ipv4, p.ipv4) && has(ipv6, p.ipv6):
			b.add(p)
		case has(ipv4, p.ipv4):
			single = append(single, p.ipv4)
		case has(ipv6, p.ipv6):
			single = append(single, p.ipv6)
		}
	}
	b.pairByOffset(ipv4, ipv6)
	b.pairByOrder(ipv4, ipv6, single)
	return b
}

// pairByOffset pairs the addresses of equal offset in the n-th CIDRs of both families, since few subnets have all of them.
func (b *addressBook) pairByOffset(ipv4, ipv6 []entry) {
	nets4, nets6 := nets(ipv4), nets(ipv6)
	for i := range min(len(nets4), len(nets6)) {
		four, six := nets4[i], nets6[i]
		n := 1 << min(four.net.Addr().BitLen()-four.net.Bits(), six.net.Addr().BitLen()-six.net.Bits(), 10)
		p := pair{four.net.Addr(), six.net.Addr()}
		for range n {
			switch {
			case four.usable.Contains(p.ipv4):
				b.add(p)
			default:
				b.spare = append(b.spare, p)
			}
			p = pair{p.ipv4.Next(), p.ipv6.Next()}
		}
	}
}

func nets(entries []entry) []entry {
	return slices.DeleteFunc(slices.Clone(entries), func(e entry) bool { return !e.net.IsValid() })
}

// pairByOrder pairs what is left in both families, one after the other, the named ones first.
func (b *addressBook) pairByOrder(ipv4, ipv6 []entry, named []netip.Addr) {
	spares := map[netip.Addr]bool{} // so that CIDRs stay whole, they have a partner only if nothing else is left
	for _, p := range b.spare {
		spares[p.ipv4], spares[p.ipv6] = true, true
	}
	rest := func(entries []entry, v4 bool) (all []netip.Addr) {
		seen := map[netip.Addr]bool{}
		var late []netip.Addr
		add := func(a netip.Addr) {
			if _, ok := b.pairs[a]; ok || seen[a] || a.Is4() != v4 {
				return
			}
			if seen[a] = true; spares[a] {
				late = append(late, a)
			} else {
				all = append(all, a)
			}
		}
		for _, a := range named {
			delete(spares, a)
			add(a)
		}
		for a := range each(entries) {
			if len(all) > maxAddresses { // the next one is only to know that there is one
				break
			}
			add(a)
		}
		return append(all, late...)
	}
	four, six := rest(ipv4, true), rest(ipv6, false)
	n := min(len(four), len(six))
	for i := range n {
		b.add(pair{four[i], six[i]})
	}
	b.left4, b.left6 = len(four) > n, len(six) > n
	spare := addressBook{pairs: map[netip.Addr]pair{}}
	for _, p := range b.spare { // an address of one may have got another partner
		if _, ok := b.find(p); !ok {
			spare.add(p)
		}
	}
	b.spare = spare.order
}

// subnets returns the fewest subnets of an AddressPool that have the addresses, and the first and the last ones of CIDRs. The most important addresses
// come first if there are too many; the others leave the book.
func (b *addressBook) subnets(whole []entry) (all []v2.SubnetSet, tooMany bool) {
	sets := b.together()
	if !b.dual {
		sets = b.alone(whole)
	}
	if tooMany = len(sets) > maxSubnets; tooMany {
		place := map[netip.Addr]int{}
		for i, p := range b.order {
			place[p.key()] = i
		}
		first := func(s subnet) int {
			least := len(place)
			for a, i := range place {
				if s.prefix().Contains(a) {
					least = min(least, i)
				}
			}
			return least
		}
		rank := map[subnet]int{}
		for _, s := range sets {
			rank[s] = first(s)
		}
		slices.SortStableFunc(sets, func(x, y subnet) int { return rank[x] - rank[y] })
		sets = sets[:maxSubnets]
		b.keep(func(p pair) bool {
			return slices.ContainsFunc(sets, func(s subnet) bool { return s.prefix().Contains(p.key()) })
		})
	}
	for _, s := range sets {
		var set v2.SubnetSet
		if s.ipv4.IsValid() {
			set.IPv4 = new(s.ipv4.String())
		}
		if s.ipv6.IsValid() {
			set.IPv6 = new(s.ipv6.String())
		}
		all = append(all, set)
	}
	return all, tooMany
}

// subnet is one of an AddressPool.
type subnet struct{ ipv4, ipv6 netip.Prefix }

// prefix is that of the addresses that stand for pairs.
func (s subnet) prefix() netip.Prefix {
	if s.ipv4.IsValid() {
		return s.ipv4
	}
	return s.ipv6
}

// alone returns the subnets of one family.
func (b *addressBook) alone(whole []entry) (all []subnet) {
	var set netipx.IPSetBuilder
	for _, p := range b.order {
		set.Add(p.key())
	}
	if !b.more {
		for _, e := range whole {
			if e.net.IsValid() {
				set.AddPrefix(e.net)
			}
		}
	}
	made, _ := set.IPSet() // an error is of an invalid address, which there is none of
	for _, p := range made.Prefixes() {
		if p.Addr().Is4() {
			all = append(all, subnet{ipv4: p})
		} else {
			all = append(all, subnet{ipv6: p})
		}
	}
	return all
}

// together returns the subnets of pairs: runs of pairs whose addresses follow each other in both families.
func (b *addressBook) together() (all []subnet) {
	pairs := slices.Concat(b.order, b.spare)
	slices.SortFunc(pairs, func(p, q pair) int { return p.ipv4.Compare(q.ipv4) })
	for i := 0; i < len(pairs); {
		bits := 0
		for run := 1; ; bits++ {
			for run < 2<<bits && i+run < len(pairs) && pairs[i+run] == (pair{pairs[i+run-1].ipv4.Next(), pairs[i+run-1].ipv6.Next()}) {
				run++
			}
			four, six := netip.PrefixFrom(pairs[i].ipv4, 32-bits-1), netip.PrefixFrom(pairs[i].ipv6, 128-bits-1)
			if run < 2<<bits || four != four.Masked() || six != six.Masked() {
				break
			}
		}
		all = append(all, subnet{netip.PrefixFrom(pairs[i].ipv4, 32-bits), netip.PrefixFrom(pairs[i].ipv6, 128-bits)})
		i += 1 << bits
	}
	return all
}

// list returns spec.addresses.list of the Egress, the first address at its beginning. If it has too many entries, addresses leave the book.
func (b *addressBook) list(first pair) (all []string, tooMany bool) {
	var set netipx.IPSetBuilder
	for _, p := range b.order {
		set.Add(p.key())
	}
	if first, _ = b.find(first); first != (pair{}) {
		set.Remove(first.key())
		all = append(all, first.key().String())
	}
	made, _ := set.IPSet()
	ranges := made.Ranges()
	if tooMany = len(all)+len(ranges) > maxList; tooMany {
		ranges = ranges[:maxList-len(all)]
		b.keep(func(p pair) bool {
			return p == first || slices.ContainsFunc(ranges, func(r netipx.IPRange) bool { return r.Contains(p.key()) })
		})
	}
	for _, r := range ranges {
		if r.From() == r.To() {
			all = append(all, r.From().String())
		} else {
			all = append(all, r.String())
		}
	}
	return all, tooMany
}

// keep takes pairs out.
func (b *addressBook) keep(which func(pair) bool) {
	b.order = slices.DeleteFunc(b.order, func(p pair) bool { return !which(p) })
	maps.DeleteFunc(b.pairs, func(_ netip.Addr, p pair) bool { return !which(p) })
}
