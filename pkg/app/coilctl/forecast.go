package coilctl

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// forecast returns the command that tells when AddressPools may be full.
func (t *tool) forecast() *cobra.Command {
	l := &list{
		tool: t, name: "forecast", kind: "AddressPool", what: "AddressPools", kinds: []source{readPools, readBlocks}, names: t.completeNames(resourcePools),
		short: "Estimate when AddressPools may have no block left",
		long: "The estimate is for as many blocks as were taken within the last 24 hours. Objects don't tell of blocks that were given back: where blocks only come and go, a pool lasts longer. " +
			"A pool younger than an hour has no forecast.",
		example: "  coilctl pools forecast\n  coilctl pools forecast default -o json",
		columns: []string{"NAME", "FREE BLOCKS", "TAKEN", "FULL NOT BEFORE"},
		rows:    forecastRows,
	}
	return l.command()
}

// expected is the forecast of an AddressPool.
type expected struct {
	Name string `json:"name"`
	pools.Forecast
}

// forecastRows returns the forecasts of AddressPools, sorted by name.
func forecastRows(o inventory.Objects) (rows []row) {
	for _, p := range sortedPools(o) {
		f := pools.Expect(p, o.Blocks, o.Now)
		full := "-"
		if f.FullInSeconds != nil {
			full = duration.HumanDuration(time.Duration(min(*f.FullInSeconds, maxForecast)) * time.Second)
		}
		rows = append(rows, row{names: []string{p.Name}, value: expected{p.Name, f}, cells: []string{
			p.Name, fmt.Sprint(f.Free), fmt.Sprintf("%d in %s", f.Taken, duration.HumanDuration(time.Duration(f.Seconds)*time.Second)), full,
		}})
	}
	return rows
}

// maxForecast is what fits into a time.Duration, in seconds.
const maxForecast = 1 << 33
