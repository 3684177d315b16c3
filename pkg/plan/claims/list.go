package claims

import (
	"fmt"
	"net/netip"
	"strings"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
)

// Problem is why a claim hasn't got an address, in the words of its condition.
type Problem struct{ Reason, Message string }

func problemf(reason, format string, args ...any) Problem {
	return Problem{reason, fmt.Sprintf(format, args...)}
}

// span is a range of addresses, both ends included.
type span struct{ first, last netip.Addr }

// Indexes returns the blocks of a pool that an AddressClaim lists, in the order of the list, each once. Entries that can't be
// had are told.
func Indexes(list []string, pool ipam.Pool) ([]int32, []Problem) {
	var indexes []int32
	var problems []Problem
	listed := map[int32]bool{}
	for _, entry := range list {
		s, err := parse(entry)
		if err != nil {
			problems = append(problems, problemf(v2.ReasonAddressInvalid, "%s: %v", entry, err))
			continue
		}
		for a, n := s.first, 0; a.IsValid() && a.Compare(s.last) <= 0; a, n = a.Next(), n+1 {
			if n == v2.MaxClaimedAddresses {
				problems = append(problems, problemf(v2.ReasonAddressInvalid, "%s has more than %d addresses", entry, v2.MaxClaimedAddresses))
				break
			}
			index, ok := pool.Containing(a)
			if !ok {
				problems = append(problems, problemf(v2.ReasonAddressOutsidePool, "%s isn't an address of the pool", a))
				break // the rest of the entry may be as wrong, and long
			}
			if listed[index] {
				continue
			}
			if len(indexes) == v2.MaxClaimedAddresses {
				return indexes, append(problems, problemf(v2.ReasonAddressInvalid, "there are more than %d addresses: those from %s on are left out", v2.MaxClaimedAddresses, a))
			}
			listed[index] = true
			indexes = append(indexes, index)
		}
	}
	return indexes, problems
}

// parse reads an address, a range or a CIDR.
func parse(entry string) (span, error) {
	if first, last, ok := strings.Cut(entry, "-"); ok {
		return parseRange(first, last)
	}
	if strings.Contains(entry, "/") {
		p, err := netip.ParsePrefix(entry)
		if err != nil {
			return span{}, fmt.Errorf("it is no CIDR: %w", err)
		}
		if p != p.Masked() {
			return span{}, fmt.Errorf("it has host bits: %s is meant, or the single address %s", p.Masked(), p.Addr())
		}
		return span{p.Addr(), end(p)}, nil
	}
	return parseRange(entry, entry)
}

func parseRange(from, to string) (span, error) {
	first, err := netip.ParseAddr(strings.TrimSpace(from))
	if err != nil {
		return span{}, fmt.Errorf("it is no address, range or CIDR: %w", err)
	}
	last, err := netip.ParseAddr(strings.TrimSpace(to))
	switch {
	case err != nil:
		return span{}, fmt.Errorf("it is no range: %w", err)
	case first.Is4() != last.Is4():
		return span{}, fmt.Errorf("%s and %s aren't of one family", first, last)
	case last.Less(first):
		return span{}, fmt.Errorf("%s comes after %s", first, last)
	}
	return span{first, last}, nil
}

// end is the last address of a prefix.
func end(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for bit := p.Bits(); bit < len(b)*8; bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
