// Package addressmap draws the address space of a pool for people: who has which part of it.
//
// It owns what a cell of the map shows. It must not know where objects come from, nor which of them are right.
package addressmap

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// Map is the address space of a pool, in the order of its blocks.
type Map struct {
	// Pool is the name of the AddressPool.
	Pool string `json:"pool"`
	// BlockSize is the number of addresses of a block, pairs as one in a dual-stack pool.
	BlockSize int64 `json:"blockSize"`
	// BlocksPerCell is the number of blocks of each cell but the last one of a subnet, a power of two.
	BlocksPerCell int64    `json:"blocksPerCell"`
	Subnets       []Subnet `json:"subnets"`
	// Lost are AddressBlocks that count for the pool, and that none of its subnets has.
	Lost []string `json:"lost,omitempty"`
}

// Subnet is a subnet of a pool.
type Subnet struct {
	// Prefixes are its IPv4 prefix, its IPv6 prefix or both.
	Prefixes []netip.Prefix `json:"prefixes"`
	Cells    []Cell         `json:"cells"`
}

// Cell is one block, or some that follow each other.
type Cell struct {
	// Addresses are the first and the last one of the cell, of the first family of the pool.
	First netip.Addr `json:"first"`
	Last  netip.Addr `json:"last"`
	// Blocks is how many there can be, Held how many nodes have, Floating how many are floating addresses of an owner, Cooling how many of those were released and
	// are given to nobody yet.
	Blocks   int64 `json:"blocks"`
	Held     int64 `json:"held,omitempty"`
	Floating int64 `json:"floating,omitempty"`
	Cooling  int64 `json:"cooling,omitempty"`
	// Excluded is how many of Blocks the pool excludes, whoever has them.
	Excluded int64 `json:"excluded,omitempty"`
	// Allocated is how many addresses of the held blocks pods have.
	Allocated int64 `json:"allocated,omitempty"`
	// Holders are the nodes of held blocks, and the owners of floating addresses; at most maxHolders, sorted.
	Holders []string `json:"holders,omitempty"`
	// More is how many holders there are beyond Holders.
	More int `json:"more,omitempty"`
}

// maxHolders bounds the names in a cell.
const maxHolders = 8

// New returns the map of a pool with at most so many cells, but one for each subnet at least. Blocks may be those of other pools, too.
func New(pool *v2.AddressPool, blocks []*v2.AddressBlock, cells int) (Map, error) {
	p, err := pools.Parse(pool.Spec)
	if err != nil {
		return Map{}, fmt.Errorf("AddressPool %s: %w", pool.Name, err)
	}
	m := Map{Pool: pool.Name, BlockSize: int64(p.BlockSize()), BlocksPerCell: 1}
	sizes := make([]int64, len(pool.Spec.Subnets)) // in blocks
	left := p.Total()
	for i, s := range pool.Spec.Subnets {
		prefixes := ipam.Prefixes(s.IPv4, s.IPv6)
		if len(prefixes) == 0 {
			continue // Parse has refused it
		}
		bits := prefixes[0].Addr().BitLen() - prefixes[0].Bits() - int(pool.Spec.BlockSizeBits)
		sizes[i] = min(left, int64(1)<<min(bits, 62))
		left -= sizes[i]
		m.Subnets = append(m.Subnets, Subnet{Prefixes: prefixes})
	}
	for m.BlocksPerCell < p.Total() && cellsOf(sizes, m.BlocksPerCell) > cells {
		m.BlocksPerCell *= 2
	}
	first := make([]int64, len(sizes)) // the index of the first block of a subnet
	for i := range sizes {
		if i > 0 {
			first[i] = first[i-1] + sizes[i-1]
		}
		for n := int64(0); n < sizes[i]; n += m.BlocksPerCell {
			c := Cell{Blocks: min(m.BlocksPerCell, sizes[i]-n)}
			c.Excluded = p.ExcludedWithin(first[i]+n, c.Blocks)
			from, errFrom := p.Block(int32(first[i] + n))
			to, errTo := p.Block(int32(first[i] + n + c.Blocks - 1))
			if err := cmp.Or(errFrom, errTo); err != nil {
				return Map{}, fmt.Errorf("AddressPool %s: %w", pool.Name, err)
			}
			c.First, c.Last = from.At(0).Addrs()[0], to.At(to.Size() - 1).Addrs()[0]
			m.Subnets[i].Cells = append(m.Subnets[i].Cells, c)
		}
	}
	for _, b := range blocks {
		if !slices.Contains(pools.BlockPools(b), pool.Name) {
			continue
		}
		index := int64(b.Index)
		at := slices.IndexFunc(sizes, func(size int64) bool {
			if index < size {
				return true
			}
			index -= size
			return false
		})
		if index < 0 || at < 0 {
			m.Lost = append(m.Lost, b.Name)
			continue
		}
		m.Subnets[at].Cells[index/m.BlocksPerCell].add(b)
	}
	for _, s := range m.Subnets {
		for i := range s.Cells {
			s.Cells[i].sort()
		}
	}
	slices.Sort(m.Lost)
	return m, nil
}

// cellsOf is how many cells of so many blocks some subnets need.
func cellsOf(sizes []int64, perCell int64) (n int) {
	for _, size := range sizes {
		n += int((size + perCell - 1) / perCell)
	}
	return n
}

// add counts a block.
func (c *Cell) add(b *v2.AddressBlock) {
	holder := b.Labels[v2.LabelNode]
	switch {
	case b.Floating == nil || !pools.IsFloating(b):
		c.Held++
		c.Allocated += int64(b.Status.Allocated)
	case b.Floating.ReleasedAt == nil:
		c.Floating++
		holder = fmt.Sprintf("%s %s/%s", b.Floating.Owner.Kind, b.Floating.Owner.Namespace, b.Floating.Owner.Name)
	default:
		c.Cooling++
		holder = ""
	}
	if holder != "" {
		c.Holders = append(c.Holders, holder)
	}
}

// sort sorts the holders, and cuts what is too much.
func (c *Cell) sort() {
	slices.Sort(c.Holders)
	c.Holders = slices.Compact(c.Holders)
	if c.More = len(c.Holders) - maxHolders; c.More <= 0 {
		c.More = 0
		return
	}
	c.Holders = c.Holders[:maxHolders:maxHolders]
}
