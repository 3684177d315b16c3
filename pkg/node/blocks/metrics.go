package blocks

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coil-net/coil/pkg/store"
)

var addresses = prometheus.NewDesc("coil_node_addresses",
	"Addresses of the blocks that the node holds, by pool and state: allocated, cooling or free. An address of each family together counts as one.",
	[]string{"pool", "state"}, nil)

// NewMissing returns the metric of blocks that are lost though pods have addresses of them.
func NewMissing(m *Manager) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "coil_node_missing_blocks",
		Help: "AddressBlocks of which pods of the node have addresses and that don't exist for the node any more.",
	}, func() float64 { return float64(m.Missing()) })
}

// scrapeTimeout bounds the reading of the record for a scrape.
const scrapeTimeout = 2 * time.Second

// collector reads the record at each scrape, so that it is never out of date.
type collector struct {
	ctx    context.Context // a scrape has none of its own
	record Record
	// reading has an item while the record is read: on a disk that hangs, scrapes don't pile up.
	reading chan struct{}
}

// NewCollector returns the metrics of the node's addresses; they are read while
// ctx lasts.
func NewCollector(ctx context.Context, r Record) prometheus.Collector {
	return collector{ctx, r, make(chan struct{}, 1)}
}

// usage reads the record. SQLite is never interrupted, so that a reading may outlast the
// scrape that began it.
func (c collector) usage() ([]store.Usage, error) {
	ctx, cancel := context.WithTimeout(c.ctx, scrapeTimeout)
	defer cancel()
	select {
	case c.reading <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("an earlier scrape reads the record still: %w", ctx.Err())
	}
	var usage []store.Usage
	done := make(chan error, 1)
	go func() {
		defer func() { <-c.reading }()
		var err error
		usage, err = c.record.Usage(ctx)
		done <- err
	}()
	select {
	case err := <-done:
		return usage, err
	case <-ctx.Done():
		return nil, fmt.Errorf("read the record: %w", ctx.Err())
	}
}

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) { ch <- addresses }

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	usage, err := c.usage()
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
