package place

import (
	"context"
	"errors"
	"fmt"
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

// Count is how many packets there were to an address of the node since it came to the node.
type Count struct {
	Received uint64
	// NoProxy is how many of them were for ports of Services, and reached the node itself, since no Service proxy had translated them. They are dropped.
	NoProxy uint64
}

// Counts returns what the tables count of each address.
func (t Tables) Counts(ctx context.Context) (map[netip.Addr]Count, error) {
	return countsOf(ctx, func(f dataplane.Family) Counters { return t.of(f) })
}

func countsOf(ctx context.Context, tables func(dataplane.Family) Counters) (map[netip.Addr]Count, error) {
	all := map[netip.Addr]Count{}
	read := func(f dataplane.Family, set string, note func(c *Count, packets uint64)) error {
		counted, err := tables(f).Counted(ctx, f.Named(set))
		for _, of := range counted {
			if a, ok := netip.AddrFromSlice([]byte(of.Key)); ok {
				c := all[a]
				note(&c, of.Packets)
				all[a] = c
			}
		}
		return err
	}
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		if err := errors.Join(
			read(f, ruleset.Received, func(c *Count, n uint64) { c.Received = n }),
			read(f, ruleset.NoProxy, func(c *Count, n uint64) { c.NoProxy = n }),
		); err != nil {
			return nil, fmt.Errorf("read how many packets addresses got: %w", err)
		}
	}
	return all, nil
}

// Traffic makes metrics of the packets of each address of the node, when it is asked.
type Traffic struct {
	ctx                     context.Context
	tables                  func(dataplane.Family) Counters
	packets, bytes, noProxy *prometheus.Desc
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
	return &Traffic{
		ctx: ctx, tables: tables, packets: desc("packets", "Packets"), bytes: desc("bytes", "Bytes of packets"),
		noProxy: prometheus.NewDesc("coil_floating_untranslated_packets_total",
			"Packets to a floating address of Services that were dropped since no Service proxy of the node had translated them, since the address came to the node.",
			[]string{"address"}, nil),
	}
}

// Describe implements prometheus.Collector.
func (t *Traffic) Describe(ch chan<- *prometheus.Desc) {
	ch <- t.packets
	ch <- t.bytes
	ch <- t.noProxy
}

// Collect implements prometheus.Collector.
func (t *Traffic) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(t.ctx, collectTimeout)
	defer cancel()
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		for _, set := range []string{ruleset.Sent, ruleset.Received, ruleset.NoProxy} {
			all, err := t.tables(f).Counted(ctx, f.Named(set))
			if err != nil {
				klog.FromContext(ctx).Error(err, "No metrics of the packets of floating addresses")
				return
			}
			for _, c := range all {
				a, ok := netip.AddrFromSlice([]byte(c.Key))
				if !ok {
					continue
				}
				if set == ruleset.NoProxy {
					ch <- prometheus.MustNewConstMetric(t.noProxy, prometheus.CounterValue, float64(c.Packets), a.String())
					continue
				}
				ch <- prometheus.MustNewConstMetric(t.packets, prometheus.CounterValue, float64(c.Packets), a.String(), set)
				ch <- prometheus.MustNewConstMetric(t.bytes, prometheus.CounterValue, float64(c.Bytes), a.String(), set)
			}
		}
	}
}
