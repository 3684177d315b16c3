// Package coilv1 reads the addresses that Coil v1 keeps in etcd, and says which AddressPools and AddressBlocks take their place.
//
// It owns v1's keys and values. It must not know how they were read, nor where the objects go.
package coilv1

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coil-net/coil/pkg/ipam"
)

// Entry is a key of etcd, without v1's prefix, and its value.
type Entry struct {
	Key   string
	Value []byte
}

// State is what v1 has recorded. Everything in it is sorted.
type State struct {
	Pools []Pool
	// Blocks are those that have an address in use.
	Blocks []Block
}

// Pool is an address pool of v1. Its IPv4 subnets are cut into blocks of 2^BlockSizeBits addresses.
type Pool struct {
	Name          string
	BlockSizeBits int
	Subnets       []netip.Prefix // in v1's order
}

// Block is a range of a pool, held by a node.
type Block struct {
	Pool   string
	Prefix netip.Prefix
	Node   string
	Used   []Address
}

// Address is an address in use, and the pod that v1 gave it to.
type Address struct {
	Addr           netip.Addr
	Namespace, Pod string
}

// Values of v1.
type (
	poolValue struct {
		Subnets   []netip.Prefix `json:"subnets"`
		BlockSize *int           `json:"block_size"`
	}
	blockValue struct {
		Free  []netip.Prefix            `json:"free"`
		Nodes map[string][]netip.Prefix `json:"nodes"`
	}
	addressValue struct {
		ContainerID string    `json:"container_id"`
		Namespace   string    `json:"namespace"`
		Pod         string    `json:"pod"`
		CreatedAt   time.Time `json:"created_at"`
	}
)

// reader is the state of Parse.
type reader struct {
	pools   map[string]Pool
	subnets map[netip.Addr]bool // the keys subnet/
	ranges  map[subnet]blockValue
	used    map[netip.Addr]map[int]Address // by the first address of the block, and offset
	errs    []error
}

// subnet names a key block/.
type subnet struct {
	pool  string
	first netip.Addr
}

func (r *reader) fail(key, format string, args ...any) {
	r.errs = append(r.errs, fmt.Errorf("key %q: %w", key, fmt.Errorf(format, args...)))
}

// Parse returns what entries say, whose order doesn't matter. The error names each key that is damaged, unknown, or
// doesn't fit the others: v1 writes several keys one after the other, so one that stopped in between leaves some out.
func Parse(entries []Entry) (State, error) {
	r := reader{
		pools: map[string]Pool{}, subnets: map[netip.Addr]bool{},
		ranges: map[subnet]blockValue{}, used: map[netip.Addr]map[int]Address{},
	}
	for _, e := range entries {
		if err := r.read(e); err != nil {
			r.fail(e.Key, "%w", err)
		}
	}
	if len(r.errs) > 0 {
		return State{}, errors.Join(r.errs...) // what follows would blame right keys
	}
	r.comparePools()
	s := State{Blocks: r.blocks()}
	for _, name := range slices.Sorted(maps.Keys(r.pools)) {
		s.Pools = append(s.Pools, r.pools[name])
	}
	if err := errors.Join(r.errs...); err != nil {
		return State{}, err
	}
	return s, nil
}

// read takes one entry by itself.
func (r *reader) read(e Entry) error {
	kind, rest, _ := strings.Cut(e.Key, "/")
	parts := strings.Split(rest, "/")
	switch {
	case kind == "pool" && len(parts) == 1:
		return r.readPool(parts[0], e.Value)
	case kind == "subnet" && len(parts) == 1:
		first, err := parseIPv4(parts[0])
		if err == nil && len(e.Value) > 0 {
			err = fmt.Errorf("it has the value %s, but v1 writes none", quote(e.Value))
		}
		r.subnets[first] = true
		return err
	case kind == "block" && len(parts) == 2:
		first, err := parseIPv4(parts[1])
		if err != nil {
			return err
		}
		var v blockValue
		err = decode(e.Value, &v)
		r.ranges[subnet{parts[0], first}] = v
		return err
	case kind == "ip" && len(parts) == 2:
		return r.readAddress(parts[0], parts[1], e.Value)
	}
	return errors.New("v1 has no such key: is the prefix right, and is it v1's alone?")
}

func (r *reader) readPool(name string, value []byte) error {
	if err := checkPoolName(name); err != nil {
		return err
	}
	var v poolValue
	if err := decode(value, &v); err != nil {
		return err
	}
	if v.BlockSize == nil {
		return errors.New("block_size is missing")
	}
	p := Pool{Name: name, BlockSizeBits: *v.BlockSize, Subnets: v.Subnets}
	for _, s := range p.Subnets {
		if err := checkIPv4(s); err != nil {
			return err
		}
	}
	if _, err := p.carve(); err != nil {
		return err
	}
	r.pools[name] = p
	return nil
}

// carve returns the pool for ipam.
func (p Pool) carve() (ipam.Pool, error) {
	var subnets []ipam.Subnet
	for _, s := range p.Subnets {
		subnets = append(subnets, ipam.Subnet{IPv4: s})
	}
	return ipam.NewPool(p.BlockSizeBits, subnets)
}

func (r *reader) readAddress(block, offset string, value []byte) error {
	first, err := parseIPv4(block)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(offset)
	if err != nil || n < 0 || strconv.Itoa(n) != offset {
		return fmt.Errorf("%q isn't the offset of an address in its block", offset)
	}
	var a Address
	if bytes.HasPrefix(bytes.TrimSpace(value), []byte("{")) {
		var v addressValue
		if err := decode(value, &v); err != nil {
			return err
		}
		a.Namespace, a.Pod = v.Namespace, v.Pod
	} else { // before v1.0.2
		a.Namespace, a.Pod, _ = strings.Cut(string(value), "/")
	}
	if !isName(a.Namespace) || !isName(a.Pod) {
		return fmt.Errorf("its value %s names no pod", quote(value))
	}
	if r.used[first] == nil {
		r.used[first] = map[int]Address{}
	}
	r.used[first][n] = a
	return nil
}

// comparePools compares pools with each other and with the keys of their subnets.
func (r *reader) comparePools() {
	type owned struct {
		pool string
		netip.Prefix
	}
	var all []owned
	for name, p := range r.pools {
		for _, s := range p.Subnets {
			all = append(all, owned{name, s})
			if !r.subnets[s.Addr()] {
				r.fail("subnet/"+s.Addr().String(), "it is missing, but pool/%s has the subnet %s", name, s)
			}
			if _, ok := r.ranges[subnet{name, s.Addr()}]; !ok {
				r.fail(fmt.Sprintf("block/%s/%s", name, s.Addr()), "it is missing, but pool/%s has the subnet %s", name, s)
			}
			delete(r.subnets, s.Addr())
		}
	}
	for first := range r.subnets {
		r.fail("subnet/"+first.String(), "no pool has a subnet that begins there")
	}
	slices.SortFunc(all, func(a, b owned) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()), cmp.Compare(a.pool, b.pool))
	})
	for i, s := range all[min(1, len(all)):] {
		if before := all[i]; s.Overlaps(before.Prefix) {
			r.fail("pool/"+s.pool, "its subnet %s overlaps %s of pool/%s", s, before, before.pool)
		}
	}
}

// blocks returns the blocks with addresses in use.
func (r *reader) blocks() []Block {
	var used []Block
	for key, v := range r.ranges {
		for _, b := range r.held(key, v) {
			addrs := r.used[b.Prefix.Addr()]
			delete(r.used, b.Prefix.Addr())
			block := ipam.Block{IPv4: b.Prefix}
			for _, n := range slices.Sorted(maps.Keys(addrs)) {
				a := addrs[n]
				if n >= block.Size() {
					r.fail(fmt.Sprintf("ip/%s/%d", b.Prefix.Addr(), n), "the block %s has only %d addresses", b.Prefix, block.Size())
					continue
				}
				a.Addr = block.At(n).IPv4
				b.Used = append(b.Used, a)
			}
			if len(b.Used) > 0 {
				used = append(used, b)
			}
		}
	}
	for first, addrs := range r.used {
		for n := range addrs {
			r.fail(fmt.Sprintf("ip/%s/%d", first, n), "no node holds a block that begins at %s", first)
		}
	}
	slices.SortFunc(used, func(a, b Block) int { return a.Prefix.Addr().Compare(b.Prefix.Addr()) })
	return used
}

// held returns the blocks of one key block/ that nodes hold, if everything in its value is right.
func (r *reader) held(key subnet, v blockValue) []Block {
	name := fmt.Sprintf("block/%s/%s", key.pool, key.first)
	pool, known := r.pools[key.pool]
	i := slices.IndexFunc(pool.Subnets, func(s netip.Prefix) bool { return s.Addr() == key.first })
	switch {
	case !known:
		r.fail(name, "there is no pool/%s", key.pool)
		return nil
	case i < 0:
		r.fail(name, "pool/%s has no subnet that begins there", key.pool)
		return nil
	}

	var held []Block
	ranges := slices.Clone(v.Free)
	for _, node := range slices.Sorted(maps.Keys(v.Nodes)) {
		if !isName(node) && len(v.Nodes[node]) > 0 {
			r.fail(name, "%q isn't the name of a node", node)
		}
		for _, p := range v.Nodes[node] {
			held = append(held, Block{Pool: key.pool, Prefix: p, Node: node})
			ranges = append(ranges, p)
		}
	}
	for _, p := range ranges {
		if err := checkIPv4(p); err != nil {
			r.fail(name, "%w", err)
			return nil
		}
		if s := pool.Subnets[i]; !s.Overlaps(p) || p.Bits() < s.Bits() {
			r.fail(name, "%s isn't within the subnet %s", p, s)
			return nil
		}
	}
	for _, b := range held {
		if b.Prefix.Bits() != 32-pool.BlockSizeBits {
			r.fail(name, "%s of node %s isn't a block of %d addresses", b.Prefix, b.Node, 1<<pool.BlockSizeBits)
			return nil
		}
	}
	slices.SortFunc(ranges, func(a, b netip.Prefix) int { return cmp.Or(a.Addr().Compare(b.Addr()), a.Bits()-b.Bits()) })
	for i, p := range ranges[min(1, len(ranges)):] {
		if before := ranges[i]; p.Overlaps(before) {
			r.fail(name, "it has %s twice, in %s and in %s: free or held by nodes", p, before, p)
			return nil
		}
	}
	return held
}

// decode reads exactly one JSON object, without unknown fields.
func decode(value []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(value))
	d.DisallowUnknownFields()
	err := d.Decode(into)
	if err == nil {
		if _, more := d.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("more follows the first object")
		}
	}
	if err != nil {
		return fmt.Errorf("its value %s can't be understood: %w", quote(value), err)
	}
	return nil
}

// quote shows a value, or its beginning.
func quote(value []byte) string {
	const most = 100
	if len(value) > most {
		return fmt.Sprintf("%q...", value[:most])
	}
	return strconv.Quote(string(value))
}

func parseIPv4(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if err != nil || !a.Is4() || a.String() != text {
		return netip.Addr{}, fmt.Errorf("%q isn't an IPv4 address", text)
	}
	return a, nil
}

func checkIPv4(p netip.Prefix) error {
	if !p.IsValid() || !p.Addr().Is4() || p != p.Masked() {
		return fmt.Errorf("%q isn't an IPv4 range without host bits", p)
	}
	return nil
}
