package addressmap_test

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/addressmap"
	"github.com/coil-net/coil/pkg/testkit"
)

// pool returns a pool with some subnets, each an IPv4 prefix, an IPv6 prefix or both with a comma between.
func pool(name string, bits int32, subnets ...string) *v2.AddressPool {
	p := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.AddressPoolSpec{BlockSizeBits: bits}}
	for _, text := range subnets {
		var s v2.SubnetSet
		for one := range strings.SplitSeq(text, ",") {
			if netip.MustParsePrefix(one).Addr().Is4() {
				s.IPv4 = &one
			} else {
				s.IPv6 = &one
			}
		}
		p.Spec.Subnets = append(p.Spec.Subnets, s)
	}
	return p
}

// held returns a block of a node with so many addresses in use.
func held(pool string, index int32, node string, allocated int32) *v2.AddressBlock {
	b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(pool, "-", index), Labels: map[string]string{v2.LabelPool: pool, v2.LabelNode: node}}, Index: index}
	b.Status.Allocated = allocated
	return b
}

// floating returns the block of a floating address.
func floating(pool string, index int32, owner string, released bool) *v2.AddressBlock {
	b := held(pool, index, "", 0)
	b.Labels = map[string]string{v2.LabelPool: pool, v2.LabelFloating: "true"}
	b.Floating = &v2.Floating{Owner: v2.FloatingOwner{Kind: "Egress", Namespace: "internet", Name: owner}}
	if released {
		b.Floating.ReleasedAt = &metav1.Time{}
	}
	return b
}

// A map shows what each block is, in the order of addresses, by subnet.
func TestText(t *testing.T) {
	for name, c := range map[string]struct {
		pool   *v2.AddressPool
		blocks []*v2.AddressBlock
		cells  int
		want   string
	}{
		"blocks of nodes": {pool("pods", 2, "10.0.0.0/28,fd00::/124", "10.0.1.0/30,fd00::100/126"),
			[]*v2.AddressBlock{held("pods", 0, "n1", 0), held("pods", 1, "n2", 2), held("pods", 4, "n1", 4), held("other", 2, "n3", 1), held("pods", 9, "n3", 1)}, 100, `
10.0.0.0/28 and fd00::/124: 2 of 4 blocks held, 2 of their 8 addresses in use
10.0.0.0  ▁▅··

10.0.1.0/30 and fd00::100/126: 1 of 1 block held, 4 of their 4 addresses in use
10.0.1.0  █

in no subnet of the pool: pods-9

each cell is a block of 4 addresses: · nobody has, ▁ to █ held by nodes, by addresses in use; F floating, c cooling down
`},
		"floating addresses": {pool("out", 0, "192.0.2.0/30"), []*v2.AddressBlock{floating("out", 1, "nat", false), floating("out", 2, "nat", true)}, 100, `
192.0.2.0/30: 0 of 4 blocks held, 1 floating, 1 cooling down
192.0.2.0  ·Fc·

each cell is a block of 1 address: · nobody has, ▁ to █ held by nodes, by addresses in use; F floating, c cooling down
`},
		"more blocks than cells": {pool("six", 5, "2001:db8::/112"), []*v2.AddressBlock{held("six", 0, "n1", 32), held("six", 1, "n2", 32), held("six", 2047, "n3", 32)}, 8, `
2001:db8::/112: 3 of 2048 blocks held, 96 of their 96 addresses in use
2001:db8::  ▁······▁

each cell is 256 blocks of 32 addresses: · nobody has, ▁ to █ held by nodes, by addresses in use; F floating, c cooling down
`},
		"several rows": {pool("wide", 0, "198.51.100.0/25"), []*v2.AddressBlock{held("wide", 64, "n1", 1)}, 1000, `
198.51.100.0/25: 1 of 128 blocks held, 1 of their 1 address in use
198.51.100.0   ` + strings.Repeat("·", 64) + `
198.51.100.64  █` + strings.Repeat("·", 63) + `

each cell is a block of 1 address: · nobody has, ▁ to █ held by nodes, by addresses in use; F floating, c cooling down
`},
	} {
		t.Run(name, func(t *testing.T) {
			m := testkit.Must(addressmap.New(c.pool, c.blocks, c.cells))(t)
			if diff := cmp.Diff(c.want, "\n"+m.Text(false)); diff != "" {
				t.Error(diff)
			}
			if plain := m.Text(false); strings.Contains(plain, "\x1b") || !strings.Contains(m.Text(true), "\x1b[") {
				t.Error("colours are where they aren't asked for, or aren't where they are")
			}
		})
	}
}

// An SVG has a rectangle for each cell, which tells who has its addresses.
func TestSVG(t *testing.T) {
	blocks := []*v2.AddressBlock{held("pods", 0, "n1", 3), held("pods", 1, "n2", 0), floating("pods", 3, "<nat>", false)}
	m := testkit.Must(addressmap.New(pool("pods", 2, "10.0.0.0/28"), blocks, 2))(t)
	var titles []string
	rects := 0
	d := xml.NewDecoder(strings.NewReader(m.SVG()))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		start, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		switch start.Name.Local {
		case "rect":
			rects++
		case "title":
			var text string
			if err := d.DecodeElement(&text, &start); err != nil {
				t.Fatal(err)
			}
			titles = append(titles, text)
		}
	}
	want := []string{
		"10.0.0.0 to 10.0.0.7: 2 of 2 blocks held, 3 of their 8 addresses in use; n1, n2",
		"10.0.0.8 to 10.0.0.15: 0 of 2 blocks held, 1 floating; Egress internet/<nat>",
	}
	if diff := cmp.Diff(want, titles); diff != "" || rects != len(want)+1 { // the background
		t.Errorf("%d rectangles, %s", rects, diff)
	}
}

// Whatever a pool is, its cells are all of its blocks in order, not more than asked for, and each taken block is counted once.
func TestMapsOfAnyPool(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		bits := int32(r.IntN(6))
		var subnets []string
		total := int64(0)
		for i := range 1 + r.IntN(4) {
			size := int(bits) + r.IntN(11)
			subnets = append(subnets, fmt.Sprintf("10.%d.0.0/%d", i, 32-size))
			total += int64(1) << (size - int(bits))
		}
		var blocks []*v2.AddressBlock
		var wantHeld, wantFloating int64
		for i := range total {
			switch r.IntN(6) {
			case 0:
				blocks = append(blocks, held("p", int32(i), fmt.Sprint("n", r.IntN(20)), 1))
				wantHeld++
			case 1:
				if bits == 0 {
					blocks = append(blocks, floating("p", int32(i), "nat", r.IntN(2) == 0))
					wantFloating++
				}
			}
		}
		cells := 1 + r.IntN(300)
		m := testkit.Must(addressmap.New(pool("p", bits, subnets...), blocks, cells))(t)
		var count int
		var all, isHeld, isFloating int64
		last := netip.Addr{}
		for i, s := range m.Subnets {
			for _, c := range s.Cells {
				count++
				all += c.Blocks
				isHeld += c.Held
				isFloating += c.Floating + c.Cooling
				if last.IsValid() && !last.Less(c.First) || c.Last.Less(c.First) || !s.Prefixes[0].Contains(c.First) || !s.Prefixes[0].Contains(c.Last) {
					t.Fatalf("seed %d: subnet %d has a cell from %s to %s, after %s", seed, i, c.First, c.Last, last)
				}
				last = c.Last
			}
		}
		if count > max(cells, len(subnets)) || all != total || isHeld != wantHeld || isFloating != wantFloating || len(m.Lost) > 0 {
			t.Fatalf("seed %d: %d cells of %d, %d blocks of %d, %d held of %d, %d floating of %d, lost %v", seed, count, cells, all, total, isHeld, wantHeld, isFloating, wantFloating, m.Lost)
		}
	}
}

// A pool that can't be understood has no map, and the error names it.
func TestInvalidPool(t *testing.T) {
	if _, err := addressmap.New(pool("small", 5, "10.0.0.0/30"), nil, 10); err == nil || !strings.Contains(err.Error(), "AddressPool small") {
		t.Errorf("error is %v", err)
	}
}

// Excluded blocks are drawn until somebody has them, and counted also then. A cell of several blocks is drawn so if all of them are excluded.
func TestExcluded(t *testing.T) {
	p := pool("p", 2, "10.0.0.0/27")
	p.Spec.Exclude = []string{"10.0.0.0", "10.0.0.9-10.0.0.16"} // blocks 0, 2, 3 and 4
	blocks := []*v2.AddressBlock{held("p", 0, "n1", 1), held("p", 1, "n1", 4)}
	for cells, want := range map[int]string{
		8: "10.0.0.0/27: 2 of 8 blocks held, 5 of their 8 addresses in use, 4 excluded\n10.0.0.0  ▃█xxx···\n\n" +
			"each cell is a block of 4 addresses: · nobody has, ▁ to █ held by nodes, by addresses in use; F floating, c cooling down, x excluded\n",
		4: "10.0.0.0/27: 2 of 8 blocks held, 5 of their 8 addresses in use, 4 excluded\n10.0.0.0  ▆x··\n\n" +
			"each cell is 2 blocks of 4 addresses: · nobody has, ▁ to █ held by nodes, by addresses in use; F floating, c cooling down, x excluded\n",
	} {
		m, err := addressmap.New(p, blocks, cells)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, m.Text(false)); diff != "" {
			t.Errorf("%d cells (-want +got):\n%s", cells, diff)
		}
		if svg := m.SVG(); !strings.Contains(svg, `fill="#7f7f7f"><title>10.0.0.8 to `) || !strings.Contains(svg, "excluded</title>") {
			t.Errorf("%d cells: the SVG is %s", cells, svg)
		}
	}
}
