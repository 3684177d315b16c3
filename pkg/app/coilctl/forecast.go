package coilctl

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/coil-net/coil/pkg/plan/pools"
)

// forecast returns the command that tells when AddressPools may be full.
func (t *tool) forecast() *cobra.Command {
	return &cobra.Command{
		Use: "forecast [NAME...]", Short: "Estimate when AddressPools may have no block left",
		Long: "Estimate when AddressPools may have no block left, if as many blocks are taken as within the last 24 hours. Objects don't tell of blocks that were given back: " +
			"where blocks only come and go, a pool lasts longer. A pool younger than an hour has no forecast.\n\n" +
			"It needs the right to list addresspools and addressblocks of coil.cybozu.com.",
		Example: "  coilctl pools forecast\n  coilctl pools forecast default -o json",
		RunE:    func(c *cobra.Command, names []string) error { return t.expect(c.Context(), names, time.Now()) },
	}
}

// expected is the forecast of an AddressPool.
type expected struct {
	Name string `json:"name"`
	pools.Forecast
}

func (t *tool) expect(ctx context.Context, names []string, now time.Time) error {
	client, err := t.coil()
	if err != nil {
		return err
	}
	list, err := client.CoilV2().AddressPools().List(ctx, cached())
	if err != nil {
		return fmt.Errorf("list AddressPools: %w", err)
	}
	chosen, err := choose(list.Items, names)
	if err != nil {
		return err
	}
	blocks, err := client.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return fmt.Errorf("list AddressBlocks: %w", err)
	}
	all := make([]expected, 0, len(chosen))
	var rows [][]string
	for _, p := range chosen {
		f := pools.Expect(p, pointers(blocks.Items), now)
		all = append(all, expected{p.Name, f})
		full := "-"
		if f.FullInSeconds != nil {
			full = duration.HumanDuration(time.Duration(min(*f.FullInSeconds, maxForecast)) * time.Second)
		}
		rows = append(rows, []string{p.Name, fmt.Sprint(f.Free), fmt.Sprintf("%d in %s", f.Taken, duration.HumanDuration(time.Duration(f.Seconds)*time.Second)), full})
	}
	return t.print(all, []string{"NAME", "FREE BLOCKS", "TAKEN", "FULL NOT BEFORE"}, rows)
}

// maxForecast is what fits into a time.Duration, in seconds.
const maxForecast = 1 << 33
