// Package ipam is the arithmetic of address pools: which blocks a pool has,
// which addresses a block has, and which of them to take next.
//
// It works on netip values and owns no state. It must not know Kubernetes,
// storage or the kernel, and does no I/O.
package ipam

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
)

const (
	// MaxBlockSizeBits bounds the size of blocks: 65,536 addresses.
	MaxBlockSizeBits = 16
	// MaxBlocks bounds how many blocks of a pool are used, since a block's
	// index is a non-negative int32.
	MaxBlocks = 1 << 31
)

// Subnet is an IPv4 prefix, an IPv6 prefix, or one of each of equal size. A
// family that isn't there is the zero Prefix.
type Subnet struct {
	IPv4, IPv6 netip.Prefix
}

// ParseSubnet returns the subnet of two CIDRs; nil or empty is a family that isn't there.
func ParseSubnet(ipv4, ipv6 *string) (Subnet, error) {
	v4, err4 := parsePrefix(ipv4)
	v6, err6 := parsePrefix(ipv6)
	return Subnet{v4, v6}, cmp.Or(err4, err6)
}

func parsePrefix(cidr *string) (netip.Prefix, error) {
	if cidr == nil || *cidr == "" {
		return netip.Prefix{}, nil
	}
	return netip.ParsePrefix(*cidr)
}

// Prefixes returns the prefixes, without host bits, of the CIDRs that can be understood.
func Prefixes(cidrs ...*string) []netip.Prefix {
	var ps []netip.Prefix
	for _, cidr := range cidrs {
		if p, err := parsePrefix(cidr); err == nil && p.IsValid() {
			ps = append(ps, p.Masked())
		}
	}
	return ps
}

// Pool carves equal blocks out of subnets. The blocks of the first subnet have
// the lowest indexes; appending a subnet doesn't change the index of a block.
// The zero Pool has no blocks.
type Pool struct {
	subnets []Subnet
	bits    int
	// excluded are blocks that aren't to be carved, in order; they don't touch each other. See Without.
	excluded []indexes
}

// NewPool returns the pool of subnets whose blocks have 2^blockSizeBits
// addresses. The error names each subnet that can't be used, and why.
func NewPool(blockSizeBits int, subnets []Subnet) (Pool, error) {
	var errs []error
	bits := blockSizeBits
	if bits < 0 || bits > MaxBlockSizeBits {
		errs = append(errs, fmt.Errorf("block size of %d bits is not within 0 and %d", bits, MaxBlockSizeBits))
		bits = 0 // other faults of the subnets don't depend on it
	}
	if len(subnets) == 0 {
		errs = append(errs, errors.New("there is no subnet"))
	}
	first := -1 // the subnet whose families the others must have
	for i, s := range subnets {
		if err := s.validate(bits); err != nil {
			errs = append(errs, fmt.Errorf("subnet %d: %w", i, err))
			continue
		}
		if first < 0 {
			first = i
		}
		if f := subnets[first]; s.IPv4.IsValid() != f.IPv4.IsValid() || s.IPv6.IsValid() != f.IPv6.IsValid() {
			errs = append(errs, fmt.Errorf("subnet %d: its address families differ from those of subnet %d", i, first))
		}
		for j, o := range subnets[:i] {
			if s.overlaps(o) {
				errs = append(errs, fmt.Errorf("subnet %d: it overlaps subnet %d", i, j))
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return Pool{}, err
	}
	return Pool{subnets: slices.Clone(subnets), bits: bits}, nil
}

func (s Subnet) validate(blockSizeBits int) error {
	if !s.IPv4.IsValid() && !s.IPv6.IsValid() {
		return errors.New("it has neither an IPv4 nor an IPv6 prefix")
	}
	if s.IPv4.IsValid() && !s.IPv4.Addr().Is4() {
		return fmt.Errorf("%s is not an IPv4 prefix", s.IPv4)
	}
	if s.IPv6.IsValid() && (!s.IPv6.Addr().Is6() || s.IPv6.Addr().Is4In6()) {
		return fmt.Errorf("%s is not an IPv6 prefix", s.IPv6)
	}
	for _, p := range present(s.IPv4, s.IPv6) {
		if p != p.Masked() {
			return fmt.Errorf("%s has host bits: %s is meant", p, p.Masked())
		}
		if hostBits(p) < blockSizeBits {
			return fmt.Errorf("%s is smaller than a block of %d addresses", p, 1<<blockSizeBits)
		}
	}
	if s.IPv4.IsValid() && s.IPv6.IsValid() && hostBits(s.IPv4) != hostBits(s.IPv6) {
		return fmt.Errorf("%s and %s are of different size", s.IPv4, s.IPv6)
	}
	return nil
}

func (s Subnet) overlaps(o Subnet) bool {
	return s.IPv4.IsValid() && o.IPv4.IsValid() && s.IPv4.Overlaps(o.IPv4) ||
		s.IPv6.IsValid() && o.IPv6.IsValid() && s.IPv6.Overlaps(o.IPv6)
}

// hostBits is the number of bits of p that aren't fixed.
func hostBits(p netip.Prefix) int { return p.Addr().BitLen() - p.Bits() }

// blocks is the number of blocks in the subnet, at most MaxBlocks.
func (s Subnet) blocks(blockSizeBits int) int64 {
	n := hostBits(present(s.IPv4, s.IPv6)[0]) - blockSizeBits
	if n >= 31 {
		return MaxBlocks
	}
	return 1 << n
}

// Total is the number of blocks that the pool has, at most MaxBlocks; see also Available.
func (p Pool) Total() int64 {
	var n int64
	for _, s := range p.subnets {
		n += s.blocks(p.bits)
		if n >= MaxBlocks {
			return MaxBlocks
		}
	}
	return n
}

// BlockSize is the number of addresses of a block, of each family.
func (p Pool) BlockSize() int { return 1 << p.bits }

// Block returns the block of an index; it is an error if index isn't within 0
// and Total()-1.
func (p Pool) Block(index int32) (Block, error) {
	rest := int64(index) // from the first block of the subnet
	for _, s := range p.subnets {
		if n := s.blocks(p.bits); rest < 0 || rest >= n {
			rest -= n
			continue
		}
		offset := uint64(rest) << p.bits
		return Block{
			IPv4: netip.PrefixFrom(advance(s.IPv4, offset), 32-p.bits),
			IPv6: netip.PrefixFrom(advance(s.IPv6, offset), 128-p.bits),
		}, nil
	}
	return Block{}, fmt.Errorf("block %d is not within the %d blocks of the pool", index, p.Total())
}

// Index returns the index of a block, and false when the pool doesn't have exactly this block.
func (p Pool) Index(b Block) (int32, bool) {
	if len(b.Prefixes()) == 0 {
		return 0, false
	}
	index, ok := p.Containing(b.Prefixes()[0].Addr())
	if !ok {
		return 0, false
	}
	found, err := p.Block(index)
	return index, err == nil && found == b
}

// Containing returns the index of the block that has an address, and false when no block has it.
func (p Pool) Containing(a netip.Addr) (int32, bool) {
	first := int64(0) // index of the first block of the subnet
	for _, s := range p.subnets {
		n := s.blocks(p.bits)
		if offset, ok := Block(s).Offset(a); ok {
			at := uint64(offset) >> p.bits
			if at >= uint64(n) || first+int64(at) >= MaxBlocks {
				return 0, false
			}
			index := int32(first + int64(at))
			b, err := p.Block(index)
			_, ok := b.Offset(a) // an offset has 64 bits only
			return index, err == nil && ok
		}
		first += n
	}
	return 0, false
}

// Free yields the indexes that taken doesn't have and that aren't excluded: those after last, and those up to it. A negative
// last starts at 0. A returned block is so carved again as late as possible.
func (p Pool) Free(last int32, taken map[int32]struct{}) iter.Seq[int32] {
	return func(yield func(int32) bool) {
		start, total := max(int64(last), -1)+1, p.Total()
		for n := int64(0); n < total; n++ {
			i := (start + n) % total
			if last, ok := p.excludedTo(i); ok {
				n += last - i // there may be millions
				continue
			}
			if _, ok := taken[int32(i)]; !ok && !yield(int32(i)) {
				return
			}
		}
	}
}
