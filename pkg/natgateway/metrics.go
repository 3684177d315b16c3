package natgateway

import (
	"cmp"
	"net/netip"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/gateway"
)

// metrics are the figures that a gateway notes itself, and the descriptions of those that it collects.
type metrics struct {
	failed              prometheus.Gauge
	latency             prometheus.Histogram
	pods, tunnels, info *prometheus.Desc
}

func newMetrics(cfg Config, reg prometheus.Registerer) *metrics {
	router := routerLabels(cfg)
	m := &metrics{
		failed: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "coil_egress_client_failures", Help: "Addresses of clients that have no tunnel; the log says why.", ConstLabels: router,
		}),
		latency: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:        "coil_egress_client_latency_seconds",
			Help:        "Time from the notice of a change of clients or destinations until packets are treated accordingly. Changes that came together count as one.",
			ConstLabels: router, Buckets: prometheus.ExponentialBuckets(0.005, 2, 14),
		}),
		pods: prometheus.NewDesc("coil_egress_client_pod_count", "Pods that use the router.",
			nil, prometheus.Labels{"namespace": cfg.Namespace, "egress": cfg.Egress}),
		tunnels: prometheus.NewDesc("coil_egress_tunnels", "Tunnels to clients that are as they should be, by the protocol of packets.",
			[]string{"protocol"}, router),
		info: prometheus.NewDesc("coil_egress_client_pod_info", "A pod that uses the router, with each of its addresses: 1.",
			[]string{"namespace", "pod", "pod_ip", "interface"}, prometheus.Labels{"egress": cfg.Egress, "egress_namespace": cfg.Namespace}),
	}
	reg.MustRegister(m.failed, m.latency)
	return m
}

// routerLabels are the labels of metrics about a router pod.
func routerLabels(cfg Config) prometheus.Labels {
	return prometheus.Labels{"namespace": cfg.Namespace, "egress": cfg.Egress, "pod": cfg.Pod}
}

// protocol is the value of the label of this name.
func protocol(f dataplane.Family) string { return strings.ToLower(f.String()) }

// Describe implements prometheus.Collector.
func (g *Gateway) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{g.metrics.pods, g.metrics.tunnels, g.metrics.info} {
		ch <- d
	}
}

// Collect implements prometheus.Collector: the metrics are of the clients as they were made last.
func (g *Gateway) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, n int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), labels...)
	}
	g.mu.Lock()
	applied, links := cmp.Or(g.applied, &gateway.State{}), g.links
	g.mu.Unlock()
	type row struct {
		namespace, name string
		addr            netip.Addr
	}
	pods := make(map[types.UID]bool, len(applied.Pods))
	seen := make(map[row]bool, len(applied.Pods)) // a pod of the same name may have had the address before
	for _, p := range applied.Pods {
		pods[p.UID] = true
		r := row{p.Namespace, p.Name, p.Addr}
		if l, ok := links[p.Addr]; ok && !seen[r] {
			seen[r] = true
			gauge(g.metrics.info, 1, p.Namespace, p.Name, p.Addr.String(), l.Name)
		}
	}
	gauge(g.metrics.pods, len(pods))
	count := map[dataplane.Family]int{}
	for a := range links {
		count[dataplane.FamilyOf(a)]++
	}
	for _, a := range applied.Addresses {
		f := dataplane.FamilyOf(a)
		gauge(g.metrics.tunnels, count[f], protocol(f))
	}
}
