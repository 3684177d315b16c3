package ipam

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// Block is a range of addresses: an IPv4 prefix, an IPv6 prefix, or one of
// each of equal size. All its addresses can be given to pods, the first and the
// last too, since pods have routes to single addresses.
type Block struct {
	IPv4, IPv6 netip.Prefix
}

// Address has the addresses of one offset of a block, which one pod gets. A
// family that the block doesn't have is the zero Addr.
type Address struct {
	IPv4, IPv6 netip.Addr
}

// AddressOf returns the first address of each family. A mapped IPv4 address is one of
// IPv6; see Validate.
func AddressOf(addrs ...netip.Addr) Address {
	var a Address
	for _, x := range addrs {
		switch {
		case x.Is4() && !a.IPv4.IsValid():
			a.IPv4 = x
		case x.Is6() && !a.IPv6.IsValid():
			a.IPv6 = x
		}
	}
	return a
}

// Validate refuses addresses of another family than their field's, and addresses that could
// be written in two ways. A family that isn't there is right.
func (a Address) Validate() error {
	var errs []error
	if a.IPv4.IsValid() && !a.IPv4.Is4() {
		errs = append(errs, fmt.Errorf("%s is not an IPv4 address", a.IPv4))
	}
	if a.IPv6.IsValid() && (!a.IPv6.Is6() || a.IPv6.Is4In6() || a.IPv6.Zone() != "") {
		errs = append(errs, fmt.Errorf("%s is not an IPv6 address without zone", a.IPv6))
	}
	return errors.Join(errs...)
}

// Addrs returns the one or two addresses of a, IPv4 first.
func (a Address) Addrs() []netip.Addr {
	return present(a.IPv4, a.IPv6)
}

// Has says whether a is, or contains, an address.
func (a Address) Has(x netip.Addr) bool { return x.IsValid() && (x == a.IPv4 || x == a.IPv6) }

// present returns the valid ones of two addresses or prefixes.
func present[T interface{ IsValid() bool }](ipv4, ipv6 T) []T {
	there := make([]T, 0, 2)
	for _, x := range []T{ipv4, ipv6} {
		if x.IsValid() {
			there = append(there, x)
		}
	}
	return there
}

// joined is the texts of values joined by a comma.
func joined[T fmt.Stringer](values []T) string {
	var texts []string
	for _, v := range values {
		texts = append(texts, v.String())
	}
	return strings.Join(texts, ",")
}

// String is the addresses joined by a comma.
func (a Address) String() string { return cmp.Or(joined(a.Addrs()), "invalid IP") }

// ParseBlock returns the block of the CIDRs of an AddressBlock; nil or empty is
// a family that isn't there.
func ParseBlock(ipv4, ipv6 *string) (Block, error) {
	s, err := ParseSubnet(ipv4, ipv6)
	if err != nil {
		return Block{}, fmt.Errorf("parse block: %w", err)
	}
	b := Block(s)
	if err := b.Validate(); err != nil {
		return Block{}, err
	}
	return b, nil
}

// Validate says what is wrong with the prefixes of the block, if anything.
func (b Block) Validate() error {
	if err := Subnet(b).validate(0); err != nil {
		return fmt.Errorf("block %s: %w", b, err)
	}
	if hostBits(b.Prefixes()[0]) > MaxBlockSizeBits {
		return fmt.Errorf("block %s: it has more than %d addresses", b, 1<<MaxBlockSizeBits)
	}
	return nil
}

// Prefixes returns the one or two prefixes of the block, IPv4 first.
func (b Block) Prefixes() []netip.Prefix {
	return present(b.IPv4, b.IPv6)
}

// String is the prefixes joined by a comma.
func (b Block) String() string { return joined(b.Prefixes()) }

// Size is the number of offsets of the block.
func (b Block) Size() int {
	if ps := b.Prefixes(); len(ps) > 0 {
		return 1 << hostBits(ps[0])
	}
	return 0
}

// At returns the addresses of an offset from 0 to Size()-1.
func (b Block) At(offset int) Address {
	return Address{IPv4: advance(b.IPv4, uint64(offset)), IPv6: advance(b.IPv6, uint64(offset))}
}

// Offset returns the offset of an address in the block, and false when the
// block doesn't have it.
func (b Block) Offset(a netip.Addr) (int, bool) {
	for _, p := range b.Prefixes() {
		if p.Contains(a) {
			return int(low64(a) - low64(p.Addr())), true
		}
	}
	return 0, false
}

// advance returns the address n after the first of a prefix, which n stays inside
// of. So the low 64 bits never overflow: they are zero, or the prefix ends within
// them. Of no prefix it is no address.
func advance(p netip.Prefix, n uint64) netip.Addr {
	a := p.Addr()
	if !a.IsValid() {
		return a
	}
	if a.Is4() {
		b := a.As4()
		binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+uint32(n))
		return netip.AddrFrom4(b)
	}
	b := a.As16()
	binary.BigEndian.PutUint64(b[8:], binary.BigEndian.Uint64(b[8:])+n)
	return netip.AddrFrom16(b)
}

// low64 is the low 64 bits of an address.
func low64(a netip.Addr) uint64 {
	b := a.As16()
	return binary.BigEndian.Uint64(b[8:])
}
