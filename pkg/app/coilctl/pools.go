package coilctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/atomicfile"
	"github.com/coil-net/coil/pkg/plan/addressmap"
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
	c := &cobra.Command{
		Use: "pools [NAME...]", Short: "Show how much of AddressPools is in use",
		Long: "Show how much of AddressPools is in use, or with --map who has which part of their addresses.\n\n" +
			"It needs the right to list addresspools and, for maps, addressblocks of coil.cybozu.com.",
		Example: "  coilctl pools\n  coilctl pools default --map\n  coilctl pools default --svg=default.svg",
		RunE:    func(c *cobra.Command, names []string) error { return o.run(c.Context(), names) },
	}
	c.Flags().BoolVar(&o.drawn, "map", false, "draw the addresses of the pools")
	c.Flags().StringVar(&o.svg, "svg", "", "file for the map of one pool as SVG; - for the standard output")
	c.Flags().IntVar(&o.cells, "cells", 1024, "the most cells of a map; a pool with more blocks has several blocks in each cell")
	return c
}

// pool is what the command pools shows of an AddressPool.
type pool struct {
	Name      string   `json:"name"`
	Blocks    v2.Usage `json:"blocks"`
	Addresses v2.Usage `json:"addresses"`
	// Floating and Cooling are how many floating addresses belong to an object, and how many were released and are given to nobody yet.
	Floating int64  `json:"floating"`
	Cooling  int64  `json:"cooling"`
	Announce string `json:"announce,omitempty"`
	// Attention are the messages of conditions that somebody should look at.
	Attention []string `json:"attention,omitempty"`
}

func (o *poolsOptions) run(ctx context.Context, names []string) error {
	if o.cells < 1 {
		return fmt.Errorf("--cells can't be %d: it must be 1 or more", o.cells)
	}
	client, err := o.coil()
	if err != nil {
		return err
	}
	// From the API server's cache the list is one answer, however long.
	list, err := client.CoilV2().AddressPools().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return fmt.Errorf("list AddressPools: %w", err)
	}
	chosen, err := choose(list.Items, names)
	if err != nil {
		return err
	}
	if o.drawn || o.svg != "" {
		blocks, err := client.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
		if err != nil {
			return fmt.Errorf("list AddressBlocks: %w", err)
		}
		return o.draw(chosen, pointers(blocks.Items))
	}
	all := make([]pool, 0, len(chosen))
	var rows [][]string
	for _, p := range chosen {
		shown := describe(p)
		all = append(all, shown)
		rows = append(rows, []string{
			shown.Name, shown.Blocks.Summary, shown.Addresses.Summary, fmt.Sprint(shown.Floating), fmt.Sprint(shown.Cooling), shown.Announce, strings.Join(shown.Attention, "; "),
		})
	}
	return o.print(all, []string{"NAME", "BLOCKS", "ADDRESSES", "FLOATING", "COOLING", "ANNOUNCE", "ATTENTION"}, rows)
}

// choose returns the pools of some names, in their order, or all.
func choose(all []v2.AddressPool, names []string) ([]*v2.AddressPool, error) {
	if len(names) == 0 {
		return pointers(all), nil
	}
	var chosen []*v2.AddressPool
	var missing []string
	for _, n := range names {
		i := slices.IndexFunc(all, func(p v2.AddressPool) bool { return p.Name == n })
		if i < 0 {
			missing = append(missing, n)
			continue
		}
		chosen = append(chosen, &all[i])
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("there is no AddressPool %s", strings.Join(missing, ", nor "))
	}
	return chosen, nil
}

// pointers returns pointers to the elements of a list.
func pointers[T any](list []T) []*T {
	all := make([]*T, len(list))
	for i := range list {
		all[i] = &list[i]
	}
	return all
}

// describe says what there is to show of a pool.
func describe(p *v2.AddressPool) pool {
	shown := pool{
		Name: p.Name, Blocks: p.Status.Blocks, Addresses: p.Status.Addresses,
		Floating: p.Status.Floating.Used, Cooling: p.Status.Floating.Cooling, Announce: string(p.Spec.Announce),
	}
	for _, kind := range []string{v2.PoolExhausted, v2.PoolOverlapping, v2.PoolSuspended, v2.PoolTerminating} {
		if c := meta.FindStatusCondition(p.Status.Conditions, kind); c != nil && c.Status != metav1.ConditionFalse {
			shown.Attention = append(shown.Attention, c.Message)
		}
	}
	return shown
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
			fmt.Fprintln(o.Out)
		}
		fmt.Fprintf(o.Out, "AddressPool %s\n%s", m.Pool, m.Text(o.coloured()))
	}
	return nil
}
