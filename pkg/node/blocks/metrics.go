package blocks

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

var addresses = prometheus.NewDesc("coil_node_addresses",
	"Addresses of the blocks that the node holds, by pool and state: allocated, cooling or free. An address of each family together counts as one.",
	[]string{"pool", "state"}, nil)

// scrapeTimeout bounds the reading of the record for a scrape.
const scrapeTimeout = 2 * time.Second

// collector reads the record at each scrape, so that it is never out of date.
type collector struct {
	ctx    context.Context // a scrape has none of its own
	record Record
}

// NewCollector returns the metrics of the node's addresses; they are read while
// ctx lasts.
func NewCollector(ctx context.Context, r Record) prometheus.Collector { return collector{ctx, r} }

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) { ch <- addresses }

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(c.ctx, scrapeTimeout)
	defer cancel()
	usage, err := c.record.Usage(ctx)
	if err != nil {
		ch <- prometheus.NewInvalidMetric(addresses, err)
		return
	}
	counts := map[string][3]int{}
	for _, u := range usage {
		n := counts[u.Pool]
		n[0] += u.Allocated
		n[1] += u.Cooling
		n[2] += u.Size() - u.Allocated - u.Cooling
		counts[u.Pool] = n
	}
	for pool, n := range counts {
		for i, state := range []string{"allocated", "cooling", "free"} {
			ch <- prometheus.MustNewConstMetric(addresses, prometheus.GaugeValue, float64(n[i]), pool, state)
		}
	}
}
