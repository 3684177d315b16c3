package handover

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// Prometheus sees no increase of a counter that begins with 1: all results are there before the first hand-over.
func TestCountersBegin(t *testing.T) {
	r := prometheus.NewRegistry()
	newMetrics(r)
	for name, want := range map[string]int{"coil_floating_handover_total": 6, "coil_floating_handover_flows_total": 2} {
		if got, err := testutil.GatherAndCount(r, name); err != nil || got != want {
			t.Errorf("%s has %d series (error %v), want %d", name, got, err, want)
		}
	}
}
