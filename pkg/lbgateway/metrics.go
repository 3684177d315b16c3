package lbgateway

import (
	"context"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// collectTimeout bounds the work for one scrape.
const collectTimeout = 5 * time.Second

// metrics are those of a gateway. What the kernel counts is read when somebody asks.
type metrics struct {
	ctx                                 context.Context
	gateway                             *Gateway
	services, ports, endpoints, refused *prometheus.Desc
	packets, elections                  *prometheus.Desc
	forgotten                           prometheus.Counter
	saved                               prometheus.Gauge
}

func newMetrics(ctx context.Context, g *Gateway) *metrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return &metrics{
		ctx:       ctx,
		gateway:   g,
		services:  desc("coil_lb_gateway_services", "Services that the machine serves, and those that it can't serve.", "served"),
		ports:     desc("coil_lb_gateway_ports", "Ports of Services at addresses."),
		endpoints: desc("coil_lb_gateway_endpoints", "Endpoints to which the machine sends connections, of each port."),
		refused:   desc("coil_lb_gateway_kernel_refuses", "1 while the kernel refuses what the machine is to do, so that it does what it did before."),
		packets:   desc("coil_lb_gateway_dropped_packets_total", "Packets to addresses of Services that weren't sent on: for no Service's port, of clients that aren't let in, or without an endpoint.", "reason", "family"),
		elections: desc("coil_lb_gateway_vrrp_state", "1 for each election by VRRP, by the state in which keepalived is.", "router_id", "family", "state"),
		forgotten: prometheus.NewCounter(prometheus.CounterOpts{Name: "coil_lb_gateway_forgotten_flows_total", Help: "Flows to endpoints that are gone."}),
		saved:     prometheus.NewGauge(prometheus.GaugeOpts{Name: "coil_lb_gateway_saved_timestamp_seconds", Help: "When the file with what the machine does was written; 0 for never."}),
	}
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.services, m.ports, m.endpoints, m.refused, m.packets, m.elections} {
		ch <- d
	}
	m.forgotten.Describe(ch)
	m.saved.Describe(ch)
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	g := m.gateway
	g.mu.Lock()
	does, refused, elections := g.does, g.refused, g.vrrp.states
	g.mu.Unlock()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	told := does.told()
	gauge(m.services, float64(told.Services), "true")
	gauge(m.services, float64(len(does.services)-int(told.Services)), "false")
	gauge(m.ports, float64(told.Ports))
	gauge(m.endpoints, float64(told.Endpoints))
	gauge(m.refused, map[bool]float64{true: 1}[refused != nil])
	for _, e := range elections {
		gauge(m.elections, 1, strconv.Itoa(int(e.RouterID)), string(e.Family), e.State)
	}
	m.forgotten.Collect(ch)
	m.saved.Collect(ch)
	ctx, cancel := context.WithTimeout(m.ctx, collectTimeout)
	defer cancel()
	counters, err := g.cfg.Table.Counters(ctx)
	if err != nil {
		klog.FromContext(m.ctx).Error(err, "The kernel's counters can't be read")
		return
	}
	for _, c := range counters {
		name, f := dataplane.CutFamily(c.Name)
		if name == ruleset.NoService || name == ruleset.NotAllowed || name == ruleset.NoEndpoint {
			ch <- prometheus.MustNewConstMetric(m.packets, prometheus.CounterValue, float64(c.Packets), name, f.String())
		}
	}
}
