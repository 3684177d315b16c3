package natgateway

import (
	"net/netip"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/gateway"
)

// metrics are what a gateway counts itself.
type metrics struct {
	pods    prometheus.Gauge
	tunnels *prometheus.GaugeVec
	failed  prometheus.Gauge
	latency prometheus.Histogram
	info    *clientInfo
}

func newMetrics(cfg Config, reg prometheus.Registerer) *metrics {
	egress := prometheus.Labels{"namespace": cfg.Namespace, "egress": cfg.Egress}
	router := routerLabels(cfg)
	m := &metrics{
		pods: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "coil_egress_client_pod_count", Help: "Pods that use the router.", ConstLabels: egress,
		}),
		tunnels: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "coil_egress_tunnels", Help: "Tunnels to clients that are as they should be, by the protocol of packets.", ConstLabels: router,
		}, []string{"protocol"}),
		failed: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "coil_egress_client_failures", Help: "Addresses of clients that have no tunnel; the log says why.", ConstLabels: router,
		}),
		latency: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:        "coil_egress_client_latency_seconds",
			Help:        "Time from the notice of a change of clients or destinations until packets are treated accordingly. Changes that came together count as one.",
			ConstLabels: router, Buckets: prometheus.ExponentialBuckets(0.005, 2, 14),
		}),
		info: &clientInfo{desc: prometheus.NewDesc("coil_egress_client_pod_info", "A pod that uses the router, with each of its addresses: 1.",
			[]string{"namespace", "pod", "pod_ip", "interface"},
			prometheus.Labels{"egress": cfg.Egress, "egress_namespace": cfg.Namespace})},
	}
	reg.MustRegister(m.pods, m.tunnels, m.failed, m.latency, m.info)
	return m
}

// routerLabels are those of metrics about a router pod.
func routerLabels(cfg Config) prometheus.Labels {
	return prometheus.Labels{"namespace": cfg.Namespace, "egress": cfg.Egress, "pod": cfg.Pod}
}

// protocol is the value of the label of this name.
func protocol(f dataplane.Family) string { return strings.ToLower(f.String()) }

// applied sets what is known of the clients after a sync.
func (m *metrics) applied(g gateway.State, links map[netip.Addr]dataplane.TunnelLink) {
	pods := make(map[types.UID]bool, len(g.Pods))
	for _, p := range g.Pods {
		pods[p.UID] = true
	}
	m.pods.Set(float64(len(pods)))
	count := map[dataplane.Family]int{}
	for a := range links {
		count[dataplane.FamilyOf(a)]++
	}
	for _, a := range g.Addresses {
		f := dataplane.FamilyOf(a)
		m.tunnels.WithLabelValues(protocol(f)).Set(float64(count[f]))
	}
	m.info.mu.Lock()
	defer m.info.mu.Unlock()
	m.info.pods, m.info.links = g.Pods, links
}

// clientInfo makes one metric of each client's address when it is asked.
type clientInfo struct {
	desc *prometheus.Desc

	mu    sync.Mutex
	pods  []gateway.Pod
	links map[netip.Addr]dataplane.TunnelLink
}

// Describe implements prometheus.Collector.
func (c *clientInfo) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c *clientInfo) Collect(ch chan<- prometheus.Metric) {
	c.mu.Lock()
	pods, links := c.pods, c.links
	c.mu.Unlock()
	type row struct {
		namespace, name string
		addr            netip.Addr
	}
	seen := make(map[row]bool, len(pods)) // a pod of the same name may have had the address before
	for _, p := range pods {
		r := row{p.Namespace, p.Name, p.Addr}
		if l, ok := links[p.Addr]; ok && !seen[r] {
			seen[r] = true
			ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, 1, p.Namespace, p.Name, p.Addr.String(), l.Name)
		}
	}
}
