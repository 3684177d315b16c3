package coilctl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/atomicfile"
	"github.com/coil-net/coil/pkg/plan/addressmap"
	"github.com/coil-net/coil/pkg/plan/inventory"
)

// poolsOptions are the flags of the command pools.
type poolsOptions struct {
	*tool
	drawn bool
	svg   string
	cells int
}

// pools returns the command that shows AddressPools.
func (t *tool) pools() *cobra.Command {
	o := &poolsOptions{tool: t}
	l := &list{
		tool: t, name: "pools", kind: "AddressPool", what: "AddressPools", kinds: []source{readPools}, names: t.completeNames(resourcePools),
		short: "Show how much of AddressPools is in use, or with --map who has which part of their addresses",
		long: "BLOCKS and ADDRESSES say how many are in use, of how many. FLOATING counts floating addresses that belong to an object, and COOLING those that were released and are given to " +
			"nobody yet. ATTENTION has the messages of conditions.",
		example: "  coilctl pools\n  coilctl pools default --map\n  coilctl pools default --map --watch\n  coilctl pools default --svg=default.svg",
		columns: []string{"NAME", "BLOCKS", "ADDRESSES", "FLOATING", "COOLING", "ANNOUNCE", "+BLOCKSIZEBITS", "+SUBNETS", "+AGE", "ATTENTION"},
		rows:    poolRows,
	}
	c := l.command()
	c.Long += " Maps need the same rights for addressblocks of coil.cybozu.com."
	c.RunE = func(c *cobra.Command, names []string) error {
		l.asked = names
		if o.cells < 1 {
			return fmt.Errorf("--cells can't be %d: it must be 1 or more", o.cells)
		}
		if o.drawn || o.svg != "" {
			return o.drawMaps(c.Context(), l)
		}
		return l.run(c.Context())
	}
	c.Flags().BoolVar(&o.drawn, "map", false, "draw the addresses of the pools")
	c.Flags().StringVar(&o.svg, "svg", "", "file for the map of one pool as SVG; - for the standard output")
	c.Flags().IntVar(&o.cells, "cells", 1024, "the most cells of a map; a pool with more blocks has several blocks in each cell")
	c.AddCommand(t.drain(), t.forecast())
	return c
}

// poolRows returns the AddressPools, sorted by name.
func poolRows(o inventory.Objects) (rows []row) {
	for _, shown := range inventory.Pools(o) {
		rows = append(rows, row{names: []string{shown.Name}, value: shown, cells: []string{
			shown.Name, shown.Blocks.Summary, shown.Addresses.Summary, fmt.Sprint(shown.Floating), fmt.Sprint(shown.Cooling), shown.Announce, fmt.Sprint(shown.BlockSizeBits),
			strings.Join(shown.Subnets, ","), age(shown.Created, o.Now), strings.Join(shown.Attention, "; "),
		}})
	}
	return rows
}

func sortedPools(o inventory.Objects) []*v2.AddressPool {
	return slices.SortedFunc(slices.Values(o.Pools), func(a, b *v2.AddressPool) int { return cmp.Compare(a.Name, b.Name) })
}

// drawMaps draws the pools that are asked for, with --watch again and again.
func (o *poolsOptions) drawMaps(ctx context.Context, l *list) error {
	kinds := []source{readPools, readBlocks}
	chosen := func(all inventory.Objects) ([]*v2.AddressPool, error) {
		rows, missing := l.choose(poolRows(all))
		if len(missing) > 0 {
			return nil, l.missing(missing)
		}
		return slices.DeleteFunc(sortedPools(all), func(p *v2.AddressPool) bool {
			return !slices.ContainsFunc(rows, func(r row) bool { return r.names[0] == p.Name })
		}), nil
	}
	draw := func(all inventory.Objects) error {
		pools, err := chosen(all)
		if err != nil {
			return err
		}
		return o.draw(pools, all.Blocks)
	}
	if !l.watch {
		all, err := o.read(ctx, kinds)
		if err != nil {
			return err
		}
		return draw(all)
	}
	if o.svg != "" || o.format != formatTable {
		return errors.New("--watch draws maps as text only")
	}
	return o.follow(ctx, kinds, func(all inventory.Objects) error {
		if height := o.height(); height > 0 {
			return o.redraw(height, func() error { return draw(all) })
		}
		return draw(all)
	})
}

// draw prints the maps of pools, or writes that of one.
func (o *poolsOptions) draw(pools []*v2.AddressPool, blocks []*v2.AddressBlock) error {
	if o.svg != "" && len(pools) != 1 {
		return errors.New("--svg draws one pool: name it")
	}
	maps := make([]addressmap.Map, 0, len(pools))
	for _, p := range pools {
		m, err := addressmap.New(p, blocks, o.cells)
		if err != nil {
			return err
		}
		maps = append(maps, m)
	}
	switch {
	case o.svg == "-":
		_, err := io.WriteString(o.Out, maps[0].SVG())
		return err
	case o.svg != "":
		return atomicfile.Write(o.svg, []byte(maps[0].SVG()), 0o644)
	case o.format != formatTable:
		return o.print(maps, nil, nil)
	}
	for i, m := range maps {
		if i > 0 {
			printf(o.Out, "\n")
		}
		printf(o.Out, "AddressPool %s\n%s", m.Pool, own(m.Text(o.coloured())))
	}
	return nil
}
