package place

import (
	"context"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// collectTimeout bounds the work for one scrape.
const collectTimeout = 8 * time.Second

// Counters has what sets count; see nft.Table.
type Counters interface {
	Counted(ctx context.Context, set string) ([]nft.ElementCounter, error)
}

// Traffic makes metrics of the packets of each address of the node, when it is asked.
type Traffic struct {
	ctx            context.Context
	tables         func(dataplane.Family) Counters
	packets, bytes *prometheus.Desc
}

// NewTraffic returns a Traffic of tables. ctx has the logger, and ends scrapes in progress.
func NewTraffic(ctx context.Context, t Tables) *Traffic {
	return newTraffic(ctx, func(f dataplane.Family) Counters { return t.of(f) })
}

func newTraffic(ctx context.Context, tables func(dataplane.Family) Counters) *Traffic {
	desc := func(what, help string) *prometheus.Desc {
		return prometheus.NewDesc("coil_floating_"+what+"_total", help+" from (sent) and to (received) a floating address of the node, since it came to the node.",
			[]string{"address", "direction"}, nil)
	}
	return &Traffic{ctx: ctx, tables: tables, packets: desc("packets", "Packets"), bytes: desc("bytes", "Bytes of packets")}
}

// Describe implements prometheus.Collector.
func (t *Traffic) Describe(ch chan<- *prometheus.Desc) {
	ch <- t.packets
	ch <- t.bytes
}

// Collect implements prometheus.Collector.
func (t *Traffic) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(t.ctx, collectTimeout)
	defer cancel()
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		for _, direction := range []string{ruleset.Sent, ruleset.Received} {
			all, err := t.tables(f).Counted(ctx, f.Named(direction))
			if err != nil {
				klog.FromContext(ctx).Error(err, "No metrics of the packets of floating addresses")
				return
			}
			for _, c := range all {
				a, ok := netip.AddrFromSlice([]byte(c.Key))
				if !ok {
					continue
				}
				ch <- prometheus.MustNewConstMetric(t.packets, prometheus.CounterValue, float64(c.Packets), a.String(), direction)
				ch <- prometheus.MustNewConstMetric(t.bytes, prometheus.CounterValue, float64(c.Bytes), a.String(), direction)
			}
		}
	}
}
